from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kareus_pp.builders import build_1f1b, build_schedule
from kareus_pp.errors import FormatError, KareusError
from kareus_pp.measure import Runs, load_runs, save_runs
from kareus_pp.measure.runs_file import runs_from_dict, runs_to_dict
from kareus_pp.schedule import Kind
from kareus_pp.setting import Setting
from tests.measure.job import Job


def some_runs(schedule_name: str = "1f1b") -> Runs:
    job = Job(build_schedule(schedule_name, 2, 4))
    run = job.run(job.uniform(1200), name="first")
    flagged = replace(
        run.iterations[0],
        flags=("", "throttled: thermal"),
        temperature_c=(61.0, None),
        energy_sd_j=(0.1, None),
    )
    rejected = replace(run.iterations[1], rejected="outlier", energy_j=(None, 5.0))
    run = replace(run, iterations=(flagged, rejected, run.iterations[2]))
    other = replace(
        job.run(job.uniform(None)),
        settings=tuple(
            tuple(Setting.parse("1410/attention@2:8") for _ in row) for row in run.settings
        ),
    )
    return job.runs(run, other, blocking_power_w=(80.0, 81.0), facts={"gpu": "A"}, scope="gpu")


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_round_trip(tmp_path: Path, suffix: str, schedule: str) -> None:
    runs = some_runs(schedule)
    path = tmp_path / f"runs.{suffix}"
    save_runs(runs, path)
    found = load_runs(path)
    assert runs_to_dict(found) == runs_to_dict(runs)
    assert found.runs[0].iterations[0] == replace(runs.runs[0].iterations[0])
    assert found.schedule.signature == runs.schedule.signature
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def short_form(**changes: Any) -> dict[str, Any]:
    stage = {
        "forward_mhz": [1410, 1200],
        "backward_mhz": [None, 1050],
        "forward_s": [0.1, 0.11],
        "backward_s": [0.2, 0.24],
        "iter_energy_j": [100.0, 101.0, None],
    }
    body = {
        "model": "m",
        "gpu": "A100",
        "stages": 1,
        "microbatches": 2,
        "microbatch_size": 4,
        "blocking_power_w": 83.64,
        "order": "text",
        "runs": [{"plan": 0, "iter_time_s": [1.0, 1.1, 1.2], "stages": [stage]}],
    }
    body.update(changes)
    return body


def test_short_form_is_synchronous_1f1b() -> None:
    runs = runs_from_dict(short_form())
    assert runs.schedule == build_1f1b(1, 2)
    assert runs.blocking_power_w == (83.64,)
    assert runs.facts == {"model": "m", "gpu": "A100", "microbatch_size": "4"}
    order = runs.schedule.order[0]
    by_name = dict(zip(map(str, order), runs.runs[0].settings[0], strict=True))
    assert by_name == {
        "0F0": Setting(1410),
        "0F1": Setting(1200),
        "0B0": Setting(None),
        "0B1": Setting(1050),
    }
    record = runs.runs[0].iterations[2]
    assert record.iter_time_s == 1.2
    assert record.energy_j == (None,)
    assert record.duration_s[0][[i.kind for i in order].index(Kind.BACKWARD)] == 0.2


@pytest.mark.parametrize("blank", [None, "absent"])
def test_a_plan_without_results_has_no_iterations(blank: str | None) -> None:
    body = short_form()
    run = body["runs"][0]
    names = [(run, "iter_time_s")] + [
        (run["stages"][0], name) for name in ("forward_s", "backward_s", "iter_energy_j")
    ]
    for where, name in names:
        if blank is None:
            where[name] = None
        else:
            del where[name]
    assert runs_from_dict(body).runs[0].iterations == ()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"runs": [{"stages": []}]}, "stages"),
        ({"stages": None}, "schedule"),
        ({"microbatches": 3}, "microbatches"),
        ({"version": 2}, "version"),
        ({"format": "kareus-pp/plan"}, "format"),
        ({"runs": 3}, "runs"),
        ({"blocking_power_w": -1}, "blocking_power_w"),
        ({"blocking_power_w": [1.0, 2.0]}, "blocking"),
    ],
)
def test_malformed_is_one_sentence(change: dict[str, Any], word: str) -> None:
    with pytest.raises(KareusError, match=word) as caught:
        runs_from_dict(short_form(**change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\x1f\x8bxx", gzip.compress(b"[]"), b"\xff\xfe"])
def test_no_runs_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "runs.json.gz"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        load_runs(path)
    with pytest.raises(FormatError, match="existing"):
        load_runs(tmp_path / "absent.json")


def test_column_lengths_are_checked() -> None:
    body = short_form()
    body["runs"][0]["stages"][0]["iter_energy_j"] = [1.0]
    with pytest.raises(FormatError, match="iter_energy_j has 1 values"):
        runs_from_dict(json.loads(json.dumps(body)))

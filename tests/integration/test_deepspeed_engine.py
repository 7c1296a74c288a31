"""Real engines of one stage, in one process without a launcher."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launcher import alone
from tests.integration.test_deepspeed_launcher import write_plan

pytest.importorskip("deepspeed")


class Cases:
    """One run of jobs/engine_cases.py: its results and what it said."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        write_plan(folder / "plan.json")
        self.folder = folder
        self.results, self.stderr = alone(
            "engine_cases.py", str(folder), folder=folder, python=python
        )


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("engine"))


EXPECTED: dict[str, dict[str, Any]] = {
    "activation": {
        "same": True,
        "stream": True,
        "replaced": True,
        "clean": True,
        "class_untouched": True,
        "silent_after_detach": True,
    },
    "switched_off": {"session": None, "hooked": False},
    "user_exception": {
        "same_exception": True,
        "aborted": "abort",
        "stream_after": True,
        "standing_down": "",
    },
    "own_map_and_loop": {"stream": True, "own": 4, "has_backward": True},
    "both_phases": {
        "each_once": True,
        "model_order": [[0, 0], [0, 1]],
        "chunks_with_work": 2,
        "standing_down": "",
    },
    "mismatching_plan": {"phase": "observe", "standing_down": ""},
}


def check(cases: Cases) -> None:
    for name, expected in EXPECTED.items():
        assert cases.results[name] in (expected, {"absent": True}), name


@pytest.mark.parametrize("name", EXPECTED)
def test_engine(cases: Cases, name: str) -> None:
    assert cases.results[name] == EXPECTED[name]


def test_the_fingerprint_names_the_effective_modes(cases: Cases) -> None:
    modes = cases.results["modes"]
    assert modes["stream"]
    assert modes["standing_down"] == ""
    fingerprint = modes["fingerprint"]
    assert len(fingerprint.pop("layers")) == 16
    assert fingerprint == {
        "framework": "deepspeed",
        "partition": "0 2",
        "microbatch_size": "2",
        "precision": "bf16",
        "zero_stage": "1",
        "recompute_interval": "1",
        "data_parallel": "1",
        "tensor_parallel": "1",
    }


def test_mistakes_are_told_and_leave_the_engine_alone(cases: Cases) -> None:
    mistakes = cases.results["mistakes"]
    misspelt, absent, no_engine = mistakes["told"]
    assert misspelt.startswith("ConfigError: the kareus config has an unknown key 'modee'")
    assert absent.startswith(
        f"ConfigError: cannot read the config file '{cases.folder}/absent.yaml'"
    )
    assert no_engine == "TypeError: attach needs a DeepSpeed PipelineEngine and got Linear"
    assert not mistakes["hooked"]


def test_a_plan_for_another_schedule_is_warned_of_once(cases: Cases) -> None:
    lines = [line for line in cases.stderr.splitlines() if "kareus-pp: the plan" in line]
    assert len(lines) == 1
    assert "2 stages, 4 microbatches) and this job runs" in lines[0]
    assert lines[0].endswith("training goes on at default clocks")

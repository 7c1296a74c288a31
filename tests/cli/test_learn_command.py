from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kareus_pp.cli.main import app, main
from kareus_pp.measure import Runs, save_runs
from kareus_pp.profile import Profile
from tests.measure.job import Job

KEYS = {
    "plans_train",
    "plans_test",
    "time_mape",
    "energy_mape",
    "time_max",
    "energy_max",
    "coverage_90",
    "half_width_median",
    "blocking_power_w",
}


@pytest.fixture(scope="module")
def runs() -> Runs:
    job = Job(time_noise=0.005, energy_noise=0.002)
    return job.runs(
        *(
            job.run(job.uniform(mhz), name=str(mhz))
            for mhz in (1410, 1050, 1200, 1305, 1110, 1260, 1155, 1350)
        ),
        blocking_power_w=(80.0,) * 4,
    )


@pytest.fixture(scope="module")
def path(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "runs.json.gz"
    save_runs(runs, path)
    return path


@pytest.mark.parametrize(
    ("arguments", "train"),
    [(["--train", "0.5"], 4), (["--train", "5"], 5), (["--train", "4", "--design"], 4)],
)
def test_train_and_predict(path: Path, arguments: list[str], train: int) -> None:
    result = CliRunner().invoke(app, ["learn", str(path), *arguments, "--seed", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert set(found) >= KEYS
    assert found["plans_train"] == train
    assert found["plans_test"] == 8 - train == len(found["plans"])
    assert found["time_mape"] < 0.01
    assert found["energy_mape"] < 0.02
    assert found["time_max"] >= found["time_mape"]
    assert set(found["coverage_90"]) == set(found["half_width_median"]) == {"time", "energy"}
    again = CliRunner().invoke(app, ["learn", str(path), *arguments, "--seed", "1", "--json"])
    assert json.loads(again.output) == found


def test_blanked_results_of_left_out_plans_change_nothing(
    path: Path, runs: Runs, tmp_path: Path
) -> None:
    arguments = ["--train", "4", "--seed", "2", "--json"]
    found = json.loads(CliRunner().invoke(app, ["learn", str(path), *arguments]).output)
    left_out = {plan["plan"] for plan in found["plans"]}
    blanked = tmp_path / "blanked.json"
    save_runs(
        runs.with_runs(
            tuple(replace(r, iterations=()) if r.name in left_out else r for r in runs.runs)
        ),
        blanked,
    )
    again = json.loads(CliRunner().invoke(app, ["learn", str(blanked), *arguments]).output)
    for key in ("predicted_time_s", "predicted_energy_j", "half_width_time_s"):
        assert [p[key] for p in again["plans"]] == [p[key] for p in found["plans"]]
    assert again["time_mape"] is None


def test_profile_is_written_and_text_says_it(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "profile.json"
    result = CliRunner().invoke(app, ["learn", str(path), "-o", str(target)])
    assert result.exit_code == 0, result.output
    assert "the data support a plan" in result.output
    assert len(Profile.load(target).options) == 8


@pytest.mark.parametrize(
    "arguments", [["--train", "9"], ["--train", "0"], ["--design"], ["--train", "2.5"]]
)
def test_mistakes_are_one_sentence(
    path: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["kareus-pp", "learn", str(path), *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("kareus-pp: ")
    assert error.count("\n") == 1

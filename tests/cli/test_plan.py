"""`kareus-pp plan` and `simulate`, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kareus_pp.builders import build_schedule
from kareus_pp.cli.main import app
from kareus_pp.errors import KareusError
from kareus_pp.plan import Frontier, Plan
from kareus_pp.profile import Option, Profile
from kareus_pp.profile_csv import load_any_profile
from kareus_pp.schedule import Instruction, Kind
from kareus_pp.setting import Setting
from tests.planner.test_switches import gpu

runner = CliRunner()


def run(*arguments: str | Path) -> str:
    """Standard output of a run that must succeed."""
    result = runner.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def refused(*arguments: str | Path) -> str:
    """The one sentence of a run that a user's mistake ends."""
    result = runner.invoke(app, [str(a) for a in arguments])
    assert isinstance(result.exception, KareusError), result.output
    message = str(result.exception)
    assert "\n" not in message
    return message


@pytest.fixture
def table(tmp_path: Path) -> Path:
    lines = ["stage,instruction,frequency,time,energy"]
    for cls, own in gpu(3).options.items():
        lines += [
            f"{cls.stage},{cls.kind.word},{o.setting.clock_mhz},{o.time_s},{o.energy_j}"
            for o in own
        ]
    path = tmp_path / "profile.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_frontier_in_json_and_in_a_file(table: Path, tmp_path: Path) -> None:
    output = tmp_path / "frontier.json"
    text = run(
        "plan", table, "--microbatches", "4", "--blocking-power", "60", "--points", "6", "--json",
        "-o", output,
    )  # fmt: skip
    report = json.loads(text)
    assert len(report["points"]) == 6
    assert set(report) >= {"points", "shortest_s", "longest_useful_s", "solve_s", "method"}
    for point in report["points"]:
        assert set(point) >= {"time_s", "energy_j", "bound_j", "gap", "switches"}
    assert report["points"][0]["time_s"] == pytest.approx(report["shortest_s"])
    times = [p.time_s for p in Frontier.load(output).plans]
    assert set(times) <= {p["time_s"] for p in report["points"]}


@pytest.mark.parametrize(
    "target",
    [
        ("--deadline", "1.9"),
        ("--slowdown", "5"),
        ("--energy-budget", "1300"),
        ("--power-cap", "700"),
        ("--objective", "energy"),
        ("--objective", "edp"),
        ("--straggler", "2.5"),
        ("--cost", "0.1,3.5"),
        ("--target", "fastest"),
    ],
)
def test_every_target_gives_a_plan_that_simulates_to_its_figures(
    table: Path, tmp_path: Path, target: tuple[str, str]
) -> None:
    output = tmp_path / "plan.json"
    common = ("--blocking-power", "60", "--json")
    report = json.loads(
        run("plan", table, "--microbatches", "4", *target, "-o", output, "--time-limit", "1",
            "--switch-delay", "0.01", "--switch-energy", "0.5", *common)
    )  # fmt: skip
    (point,) = report["points"]
    again = json.loads(run("simulate", output, "--profile", table, *common))
    assert (again["time_s"], again["energy_j"]) == (point["time_s"], point["energy_j"])
    assert again["switches"] == point["switches"]
    assert len(again["idle_s"]) == 3
    assert Plan.load(output).time_s == point["time_s"]


def test_simulating_a_plan_that_splits_half_a_microbatch_says_that_nothing_overlaps(
    tmp_path: Path,
) -> None:
    schedule = build_schedule("1f1b", 2, 2)
    split = Setting.parse("1410/mlp@1:0")
    options = {
        cls: tuple(Option(s, 0.01, 2.0) for s in (Setting(1410), split)) for cls in schedule.classes
    }
    profile, output = tmp_path / "profile.json", tmp_path / "plan.json"
    Profile(options, (60.0, 60.0)).save(profile)
    halves = {Instruction(1, Kind.FORWARD, 1), Instruction(0, Kind.BACKWARD, 1)}
    for chosen in (halves, {Instruction(0, kind, 1) for kind in (Kind.FORWARD, Kind.BACKWARD)}):
        settings = tuple(
            tuple(split if i in chosen else Setting(1410) for i in order)
            for order in schedule.order
        )
        Plan(schedule, settings).save(output)
        text = run("simulate", output, "--profile", profile)
        note = json.loads(run("simulate", output, "--profile", profile, "--json"))["note"]
        assert ("splits 0B1 and not the forward" in note) == (chosen is halves)
        assert ("neither overlaps" in note) == (chosen is halves)
        assert ("note: the plan splits 0B1" in text) == (chosen is halves)


def test_a_deadline_below_the_shortest_is_answered_with_the_shortest(table: Path) -> None:
    text = run("plan", table, "--microbatches", "2", "--blocking-power", "60", "--deadline", "0.01")
    assert "no plan takes 0.01 s: the shortest iteration takes" in " ".join(text.split())


@pytest.mark.parametrize("p2p", ["asynchronous", "overlapped", "blocking"])
def test_waits_for_messages_are_planned_with(table: Path, tmp_path: Path, p2p: str) -> None:
    output = tmp_path / "plan.json"
    run(
        "plan", table, "--schedule", "interleaved", "--microbatches", "3", "--chunks", "2",
        "--blocking-power", "60", "--objective", "fastest", "--p2p", p2p, "-o", output,
    )  # fmt: skip
    plan = Plan.load(output)
    built = build_schedule("interleaved", 3, 3, 2, p2p)
    assert plan.schedule.waits == built.waits
    assert plan.schedule.signature == built.signature


def test_split_backwards_and_chunks_are_derived_and_marked(table: Path, tmp_path: Path) -> None:
    from kareus_pp.profile_csv import fit_to_schedule
    from tests.planner.problems import SCHEDULES

    profile = load_any_profile(table, [60.0])
    split = next(s for s in SCHEDULES if any(c.kind is Kind.WEIGHT_GRADIENT for c in s.classes))
    fitted = fit_to_schedule(profile, split)
    for cls in split.classes:
        whole = profile.options[cls._replace(kind=Kind.FORWARD)]
        if cls.kind is not Kind.FORWARD:
            whole = profile.options[cls._replace(kind=Kind.BACKWARD)]
            assert fitted.options[cls][0].time_s == pytest.approx(whole[0].time_s / 2)
            assert {o.origin.value for o in fitted.options[cls]} == {"predicted"}
        else:
            assert fitted.options[cls] == whole
    chunked = next(s for s in SCHEDULES if s.chunks == 2)
    fitted = fit_to_schedule(profile, chunked)
    for cls in chunked.classes:
        whole = profile.options[cls._replace(chunk=0)]
        assert fitted.options[cls][0].energy_j == pytest.approx(whole[0].energy_j / 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--microbatches", "2"], "--blocking-power"),
        (["--blocking-power", "60,60"], "one for each stage"),
        (["--blocking-power", "many"], "numbers with commas"),
        (["--blocking-power", "-3"], "not allowed"),
        (["--blocking-power", "60", "--schedule", "none"], "unknown schedule"),
        (["--blocking-power", "60", "--p2p", "blocking"], "1f1b is planned without waits"),
        (["--blocking-power", "60", "--slowdown", "5", "--deadline", "2"], "several targets"),
        (["--blocking-power", "60", "--objective", "speed"], "speed"),
        (["--blocking-power", "60", "--energy-budget", "1"], "least energy of an iteration"),
        (["--blocking-power", "60", "--power-cap", "1"], "least average power"),
        (["--blocking-power", "60", "--clocks", "5"], "allowed clocks"),
        (["--blocking-power", "60", "--stage-clocks", "5"], "stage=clocks"),
        (["--blocking-power", "60", "--stage-clocks", "1="], "names no clock"),
        (["--blocking-power", "60", "--stage-clocks", "9=900"], "stages 0 to 2"),
        (["--blocking-power", "60", "--cost", "0,0"], "no price on energy or time"),
        (["--blocking-power", "60", "--slowdown", "-5"], "of 0 or more"),
        (["--blocking-power", "60", "--deadline", "0"], "above 0"),
        (["--blocking-power", "60", "--points", "2", "-o", "/dev/null/x.json"], "cannot write"),
        (["--blocking-power", "60", "--points", "2", "-o", "/"], "cannot write"),
        (["--blocking-power", "60", "--points", "0"], "at least 1"),
        (["--blocking-power", "60", "--solver", "none"], "solver"),
        (["--blocking-power", "60", "--deadline", "nan"], "finite"),
    ],
)
def test_mistakes_end_in_one_sentence(table: Path, arguments: list[str], message: str) -> None:
    assert message in refused("plan", table, *arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda options: options.append(options[0]), "more than once"),
        (lambda options: options[0].update(energy_j=-1.0), "energy_j"),
        (lambda options: options[0].update(setting="900/mlp@1:8,mlp@2:8"), "'mlp' twice"),
    ],
)
def test_malformed_profiles_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    gpu(3).save(path)
    document = json.loads(path.read_text())
    change(document["options"]["1F"])
    path.write_text(json.dumps(document))
    assert message in refused("plan", path)


def test_a_profile_has_a_blocking_power_for_every_stage(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    gpu(3).save(path)
    document = json.loads(path.read_text())
    document["blocking_power_w"].pop()
    path.write_text(json.dumps(document))
    assert "blocking power of 2 stages" in refused("plan", path)


@pytest.mark.parametrize(("delay", "unknown"), [(None, True), ("0", False), ("0.01", False)])
def test_free_switches_are_said_to_be_so_where_nobody_priced_them(
    table: Path, delay: str | None, unknown: bool
) -> None:
    price = [] if delay is None else ["--switch-delay", delay]
    text = run("plan", table, "--blocking-power", "60", "--deadline", "90", *price)
    assert ("their delay is not known" in text) == unknown
    assert "time [s]" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lacks the columns"),
        ("a,b\n1,2\n", "lacks the columns"),
        ("stage,instruction,frequency,time,energy\n", "no rows"),
        ("stage,instruction,frequency,time,energy\n0,forward,1000,nan,1\n", "finite"),
        ("stage,instruction,frequency,time,energy\n0,sideways,1000,1,1\n", "sideways"),
        ("stage,instruction,frequency,time,energy\n0,forward,1000,x,1\n", "line 2"),
        ("stage,instruction,frequency,time,energy\n0,forward,1000.5,1,1\n", "whole number"),
        ("stage,instruction,frequency,time,energy\n0,forward,1000,1,1\n", "0B"),
    ],
)
def test_malformed_tables_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    assert message in refused("plan", path, "--blocking-power", "60")
    assert "existing profile" in refused("plan", tmp_path / "absent.csv")


def test_repeated_lines_are_repeated_measurements(tmp_path: Path) -> None:
    path = tmp_path / "twice.csv"
    path.write_text(
        "stage,instruction,frequency,time,energy\n0,forward,1000,1,4\n0,forward,1000,2,8\n",
        encoding="utf-8",
    )
    (options,) = load_any_profile(path, [60.0]).options.values()
    assert [(o.time_s, o.energy_j) for o in options] == [(1.5, 6.0)]


def fresh_process(table: Path, *arguments: str, first: str = "pass") -> tuple[dict[str, Any], str]:
    """The JSON that `plan` prints in a process of its own, and what it says besides."""
    line = ["kareus-pp", "plan", str(table), "--blocking-power", "60", "--json", *arguments]
    program = f"import sys; {first}; from kareus_pp.cli.main import app; sys.argv = {line!r}; app()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report, done.stderr


def test_standard_output_of_a_fresh_process_is_json_alone(table: Path) -> None:
    report, _ = fresh_process(table, "--points", "2")
    assert len(report["points"]) == 2
    assert "HiGHS" in report["method"]


def test_cbc_plans_where_highspy_is_missing_and_one_line_says_so(table: Path) -> None:
    few = ("--slowdown", "5", "--microbatches", "2")
    usual, _ = fresh_process(table, *few)
    report, said = fresh_process(table, *few, first="sys.modules['highspy'] = None")
    assert "CBC" in report["method"]
    assert [line for line in said.splitlines() if "highspy is not installed" in line] == [
        "highspy is not installed: plans are made with CBC, which is slower; install highspy, or "
        "set the planner's solver to 'cbc' to silence this"
    ]
    energies = [r["points"][0]["energy_j"] for r in (usual, report)]
    assert energies[1] == pytest.approx(energies[0], rel=0.01)
    _, said = fresh_process(table, *few, "--solver", "cbc", first="sys.modules['highspy'] = None")
    assert "highspy" not in said


def test_each_plan_is_listed_once(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text(
        "stage,instruction,frequency,time,energy\n"
        "0,forward,1000,1,100\n0,backward,1000,2,200\n0,backward,900,2.5,150\n",
        encoding="utf-8",
    )
    arguments = ("plan", path, "--microbatches", "1", "--blocking-power", "10", "--points", "5")
    assert len(json.loads(run(*arguments, "--json"))["points"]) == 2
    assert "5 points were asked for; 2 plans differ" in run(*arguments)

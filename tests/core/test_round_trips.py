from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kareus_pp.errors import FormatError, PlanError, ScheduleError, TargetError
from kareus_pp.plan import Frontier, Plan, count_switches, default_settings, validate_frontier
from kareus_pp.profile import Profile
from kareus_pp.schedule import Instruction, InstructionClass, Kind, Schedule
from kareus_pp.setting import Setting
from kareus_pp.target import Cost, Deadline, Slowdown, format_target, parse_target
from tests.core.strategies import classes, instructions, profiles, schedules, settings_


@given(instructions)
def test_instruction_text(instruction: Instruction) -> None:
    assert Instruction.parse(str(instruction)) == instruction


def test_instruction_text_is_that_of_torch() -> None:
    assert str(Instruction(2, Kind.FORWARD, 0)) == "2F0"
    assert str(Instruction(2, Kind.INPUT_GRADIENT, 13, 1)) == "2I13.1"
    assert Instruction.parse("2W0") == Instruction(2, Kind.WEIGHT_GRADIENT, 0)


@given(classes)
def test_class_text(cls: InstructionClass) -> None:
    assert InstructionClass.parse(str(cls)) == cls


@given(settings_)
def test_setting_text(setting: Setting) -> None:
    assert Setting.parse(str(setting)) == setting


@pytest.mark.parametrize("text", ["", "2F", "F2", "2X0", "2F0.", "-1F0", "2F0 ", "2f0"])
def test_malformed_instruction(text: str) -> None:
    with pytest.raises(FormatError, match="is not an instruction"):
        Instruction.parse(text)


@pytest.mark.parametrize("text", ["", "0", "fast", "1410/", "1410/attention", "-5", "1e3"])
def test_malformed_setting(text: str) -> None:
    with pytest.raises(FormatError, match=r"is not an? (overlap )?setting"):
        Setting.parse(text)


@given(schedules())
def test_schedule_file_form(schedule: Schedule) -> None:
    again = Schedule.from_dict(json.loads(json.dumps(schedule.to_dict())))
    assert again == schedule
    assert again.signature == schedule.signature


@given(profiles())
def test_profile_file_form(profile: Profile) -> None:
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


@given(schedules(), st.data())
def test_plan_file_form(schedule: Schedule, data: st.DataObject) -> None:
    rows = tuple(tuple(data.draw(settings_) for _ in row) for row in schedule.order)
    plan = Plan(schedule, rows, 1.5, 2.5, 2.0, 0.25, "slowdown:5.0")
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    for row, settings in zip(schedule.order, rows, strict=True):
        for instruction, setting in zip(row, settings, strict=True):
            assert again.setting(instruction) == setting


def test_files(tmp_path: Path) -> None:
    schedule = Schedule.from_dict(
        {"order": ["0F0 0B0", "1F0 1B0"], "model_order": ["0.0", "1.0"], "name": "mine"}
    )
    plan = Plan(schedule, default_settings(schedule), 1.0, 2.0)
    for document in (schedule, plan, Frontier((plan,))):
        path = tmp_path / "deep" / "file.json"
        document.save(path)
        assert type(document).load(path) == document
        assert [p.name for p in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON"),
        ("[]", "its format is None"),
        ('{"format": "kareus-pp/profile", "version": 1}', "must be 'kareus-pp/plan'"),
        ('{"format": "kareus-pp/plan", "version": 99}', "has plan version 99"),
        ('{"format": "kareus-pp/plan", "version": 1}', "missing or malformed part"),
        ('{"format": "kareus-pp/plan", "version": 1, "time_s": NaN}', "NaN is not allowed"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_malformed_plan_file(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=reason) as caught:
        Plan.load(path)
    assert "\n" not in str(caught.value)


def test_absent_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot read the plan file"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="not a text file"):
        Plan.load(tmp_path / "binary")


def test_plan_that_names_another_instruction() -> None:
    schedule = Schedule.from_dict({"order": ["0F0 0B0"], "model_order": ["0.0"]})
    body = Plan(schedule, default_settings(schedule)).to_dict()
    body["settings"] = [["0F0 1410", "0B1 1410"]]
    with pytest.raises(PlanError, match="stage 0, step 1, microbatch 0"):
        Plan.from_dict(body)
    body["settings"] = [["0F0 1410"]]
    with pytest.raises(PlanError, match="1 settings and the schedule 2"):
        Plan.from_dict(body)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (["0B0 0F0"], "stage 0, step 0, microbatch 0 .* forward has not been executed"),
        (["0F0 0F0"], "step 1, .* already executed at step 0"),
        (["1F0"], "belongs to stage 1"),
        (["0F0.3"], "chunk 3 is not in the model order"),
        (["0F0 0W0"], "its input-gradient has not been executed"),
        ([], "is empty"),
    ],
)
def test_inconsistent_schedules(rows: list[str], reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        Schedule.from_dict({"order": rows, "model_order": ["0.0"]})


def test_deadlock_is_named() -> None:
    body = {"order": ["0F0 0F1 0B1 0B0", "1F1 1F0 1B0 1B1"], "model_order": ["0.0", "1.0"]}
    assert Schedule.from_dict(body).stages == 2
    body["order"] = ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]
    with pytest.raises(ScheduleError, match=r"microbatch 0 .*can never start"):
        Schedule.from_dict(body)


def test_switches_count_the_wrap() -> None:
    assert count_switches([]) == 0
    assert count_switches([5, 5, 5]) == 0
    assert count_switches([5, 7, 7]) == 2


def test_dominated_frontier() -> None:
    schedule = Schedule.from_dict({"order": ["0F0"], "model_order": ["0.0"]})
    rows = default_settings(schedule)
    with pytest.raises(PlanError, match="dominated"):
        validate_frontier(
            Frontier((Plan(schedule, rows, 1.0, 2.0), Plan(schedule, rows, 2.0, 2.0)))
        )


@given(st.one_of(st.builds(Deadline, st.floats(1e-9, 1e9)), st.builds(Slowdown, st.floats(0, 1e3))))
def test_target_text(target: Deadline | Slowdown) -> None:
    assert parse_target(format_target(target)) == target


@pytest.mark.parametrize(
    "text", ["", "slow", "deadline", "deadline:x", "deadline:-1", "deadline:nan", "edp:1", "cost:1"]
)
def test_malformed_target(text: str) -> None:
    with pytest.raises(TargetError):
        parse_target(text)


def test_cost_target() -> None:
    assert parse_target("cost:3e-8,2.5") == Cost(3e-8, 2.5)

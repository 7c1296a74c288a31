from __future__ import annotations

import json
from pathlib import Path

import pytest

from kareus_pp.config import load_config, parse_config
from kareus_pp.errors import ConfigError


def test_defaults() -> None:
    config = parse_config({})
    assert (config.mode, config.device, config.target) == ("auto", "auto", "fastest")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"moed": "auto"}, "unknown key 'moed'; did you mean 'mode'"),
        ({"profiling": {"plan": 3}}, r"unknown key 'profiling.plan'; did you mean 'plans'"),
        ({"mode": "fast"}, "mode = 'fast', which is not allowed"),
        ({"target": "slow:5"}, "unknown target 'slow:5'"),
        ({"profiling": {"plans": 0}}, r"profiling.plans = 0"),
        ({"profiling": 5}, "profiling = 5"),
        ({"enabled": "maybe"}, "enabled = 'maybe'"),
        ({"planner": {"time_limit_s": float("nan")}}, "time_limit_s = nan"),
        ([1], "must be an object"),
    ],
)
def test_mistakes_are_one_sentence(values: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_config(values)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_files(tmp_path: Path) -> None:
    yaml = tmp_path / "kareus.yaml"
    yaml.write_text("target: slowdown:5\nprofiling:\n  plans: 4\n")
    assert load_config(yaml).profiling.plans == 4
    deepspeed = tmp_path / "ds.json"
    deepspeed.write_text(json.dumps({"train_batch_size": 4, "kareus": {"mode": "observe"}}))
    assert load_config(deepspeed).mode == "observe"
    for text, reason in (
        ("{", "not valid"),
        ("- 1\n", "must hold an object"),
        ("a: [", "not valid"),
    ):
        yaml.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            load_config(yaml)
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.yaml")

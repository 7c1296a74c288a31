"""Which device a configuration opens."""

from __future__ import annotations

import logging

import pytest

from kareus_pp.config import parse_config
from kareus_pp.device import select
from kareus_pp.device.select import open_controller
from kareus_pp.errors import ConfigError, DeviceError
from kareus_pp.profile import Source
from kareus_pp.schedule import InstructionClass, Kind
from kareus_pp.simulate.gpu_model import Work

WORK = {InstructionClass(1, Kind.FORWARD): Work(1e12, 1e9)}


def test_emulated_opens_controller_and_pacer() -> None:
    config = parse_config({"device": "emulated", "emulated": {"gpu_model": "a40"}})
    opened = open_controller(config, stage=1, local_rank=1, work=WORK)
    assert opened.pacer is not None
    assert opened.facts.source is Source.EMULATED
    assert opened.facts.name == opened.identity.name == "NVIDIA A40 (emulated)"
    assert opened.facts.clocks_mhz[-1] == 1740
    assert opened.facts.switch_latency_s is not None
    opened.controller.request(1200)
    assert opened.controller.applied().mhz == 1200
    opened.controller.close()


@pytest.mark.parametrize("work", [None, {}])
def test_emulated_needs_the_work_of_the_stage(work: dict | None) -> None:
    with pytest.raises(DeviceError, match="needs the work of its stage"):
        open_controller(parse_config({"device": "emulated"}), stage=0, local_rank=0, work=work)


def test_an_unknown_gpu_model_is_a_config_error() -> None:
    config = parse_config({"device": "emulated", "emulated": {"gpu_model": "a1000"}})
    with pytest.raises(ConfigError, match="'a1000'"):
        open_controller(config, stage=0, local_rank=0, work=WORK)


def test_auto_without_a_gpu_is_dry_run_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "_has_nvidia_gpu", lambda: False)
    with caplog.at_level(logging.WARNING):
        for rank in range(4):
            opened = open_controller(parse_config({}), stage=rank, local_rank=rank)
            opened.controller.close()
    assert [r.message for r in caplog.records] == [
        "no NVIDIA GPU found: dry-run, no clock is set and nothing is measured; "
        "set device to 'emulated' for an emulated GPU"
    ]
    assert opened.pacer is None
    assert opened.identity.name == "dry-run"


def test_auto_never_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_has_nvidia_gpu", lambda: False)
    opened = open_controller(parse_config({}), stage=0, local_rank=0, work=WORK)
    assert opened.pacer is None
    assert opened.facts.source is not Source.EMULATED
    opened.controller.close()

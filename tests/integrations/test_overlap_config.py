"""Overlap in the configuration of a framework whose blocks are not known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kareus_pp.integrations._start import start_session

from kareus_pp.config import parse_config
from kareus_pp.errors import ConfigError
from kareus_pp.runtime.topology import Topology


def test_it_is_refused_with_what_to_do(tmp_path: Path) -> None:
    config = parse_config({"output": str(tmp_path), "overlap": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"overlap\.generic and hand the executor to .*follow_ov"):
        start_session(config, Topology(0, 1, ((0, 0),)), {}, torch.device("cpu"), lambda _: {})
    assert not list(tmp_path.iterdir())

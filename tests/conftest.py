"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more about what else runs than about the code.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of measured data, `KAREUS_PP_DATA` or `../shared/data`; skips where absent."""
    folder = Path(os.environ.get("KAREUS_PP_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"the measured data folder {folder} is absent; set KAREUS_PP_DATA")
    return folder

"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more about what else runs than about the code.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def torch_extensions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of this run's own for what DeepSpeed compiles.

    A compilation that was killed leaves a lock, for which every later job would wait for ever.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("torch-extensions")))
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of measured data, `KAREUS_PP_DATA` or `../shared/data`; skips where absent."""
    folder = Path(os.environ.get("KAREUS_PP_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"the measured data folder {folder} is absent; set KAREUS_PP_DATA")
    return folder

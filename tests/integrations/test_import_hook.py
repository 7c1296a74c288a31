from __future__ import annotations

import importlib
import inspect
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
from kareus_pp.integrations._import_hook import on_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a submodule that nobody has imported yet; gone again afterwards."""
    name = f"hooked_{tmp_path.name}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "engine.py").write_text("class Engine:\n    'An engine.'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[module]


def test_calls_back_once_after_the_module_has_run_and_not_before(package: str) -> None:
    seen: list[ModuleType] = []
    on_import(f"{package}.engine", seen.append)
    assert f"{package}.engine" not in sys.modules
    importlib.import_module(package)
    assert seen == []
    module = importlib.import_module(f"{package}.engine")
    assert seen == [module]
    assert seen[0].Engine.__doc__ == "An engine."
    importlib.import_module(f"{package}.engine")
    assert seen == [module]


def test_several_hooks_on_one_module_all_run_in_order(package: str) -> None:
    order: list[int] = []
    for number in range(3):
        on_import(f"{package}.engine", lambda _, number=number: order.append(number))
    importlib.import_module(f"{package}.engine")
    assert order == [0, 1, 2]


def test_a_module_that_is_already_there_is_hooked_at_once(package: str) -> None:
    module = importlib.import_module(f"{package}.engine")
    seen: list[ModuleType] = []
    on_import(f"{package}.engine", seen.append)
    assert seen == [module]


def test_the_module_keeps_its_loader_and_source(package: str) -> None:
    on_import(f"{package}.engine", lambda _: None)
    module = importlib.import_module(f"{package}.engine")
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert "An engine." in inspect.getsource(module.Engine)


def test_a_hook_that_fails_is_told_once_and_the_import_succeeds(
    package: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(module: ModuleType) -> None:
        raise AttributeError("no PipelineEngine")

    on_import(f"{package}.engine", fail)
    with caplog.at_level(logging.WARNING, logger="kareus_pp"):
        module = importlib.import_module(f"{package}.engine")
    assert module.Engine is not None
    assert [r.getMessage() for r in caplog.records] == [
        f"kareus-pp: cannot hook {package}.engine (AttributeError: no PipelineEngine); "
        f"training goes on without it"
    ]


def test_a_module_that_does_not_exist_fails_as_ever(package: str) -> None:
    on_import(f"{package}.absent", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="absent"):
        importlib.import_module(f"{package}.absent")

"""A stub machine for each test, seen by this process and by its children."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kareus_pp.device.guard import GuardController
from kareus_pp.device.lease import RUNTIME_VARIABLE
from tests.stub.nvml import StubMachine, compiler


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubMachine:
    """Two stub GPUs and a runtime folder of their own."""
    if compiler() is None:
        pytest.skip("no C compiler: the stub NVML cannot be built")
    stub = StubMachine(tmp_path / "machine", 2)
    for key, value in stub.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path / "run"))
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    return stub


@pytest.fixture
def open_guard(machine: StubMachine) -> Iterator[Callable[..., GuardController]]:
    """Opens guard controllers and closes them at the end of the test."""
    opened: list[GuardController] = []

    def start(device: int = 0, **options: object) -> GuardController:
        opened.append(GuardController(machine.uuid(device), **options))  # type: ignore[arg-type]
        return opened[-1]

    yield start
    for controller in opened:
        controller.close()


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    """True as soon as the condition holds; False after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True

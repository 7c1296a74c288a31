"""Zeus' own monitor and our device read the same counter, in one run."""

from __future__ import annotations

import time
import warnings

import pytest

from kareus_pp.device.nvml import NvmlDevice
from tests.stub.nvml import StubMachine


def test_zeus_monitor_reads_the_same_energy(
    machine: StubMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("ZEUSD_SOCK_PATH", "ZEUSD_HOST_PORT"):
        monkeypatch.delenv(variable, raising=False)
    energy = pytest.importorskip("zeus.monitor.energy")
    gpu = pytest.importorskip("zeus.device.gpu")
    monkeypatch.setattr(gpu, "_gpus", None)  # Zeus keeps the GPUs of the first machine it saw
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitor = energy.ZeusMonitor(gpu_indices=[0, 1], cpu_indices=[])
    devices = [NvmlDevice(machine.uuid(number)) for number in (0, 1)]
    machine.set(1, load=0.4)
    outer = [_joules(device) for device in devices]
    monitor.begin_window("run", sync_execution=False)
    begin = [_joules(device) for device in devices]
    for mhz in (900, 1410, 1200):
        devices[0].lock_clock(mhz)
        time.sleep(0.25)
    end = [_joules(device) for device in devices]
    measured = monitor.end_window("run", sync_execution=False).gpu_energy
    outer_end = [_joules(device) for device in devices]
    for number in (0, 1):
        # The readings enclose Zeus' from both sides; they differ where a tick fell in between.
        least, most = end[number] - begin[number], outer_end[number] - outer[number]
        assert least - 1e-6 <= measured[number] <= most + 1e-6
        assert least > 0
    assert measured[0] > 1.2 * measured[1], "each GPU has a counter of its own"
    devices[0].unlock_clock()
    for device in devices:
        device.close()


def _joules(device: NvmlDevice) -> float:
    energy_j = device.sample().energy_j
    assert energy_j is not None
    return energy_j

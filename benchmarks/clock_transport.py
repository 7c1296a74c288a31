"""What it costs a trainer to set a clock, and how soon it is set: the guard's word and its peers.

`python -m benchmarks.clock_transport [--json]`. All transports in one run, against the stub NVML
whose clock call takes 5 ms. A fixed piece of work is timed with and without each transport, so
that what the transport takes from the trainer (its interpreter lock, its cores) shows too.

The queue is what Zeus and Perseus do: a process fed by a `multiprocessing.Queue`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from kareus_pp.device.guard import GuardController
from kareus_pp.device.lease import RUNTIME_VARIABLE
from kareus_pp.device.nvml import NvmlDevice
from tests.stub.nvml import LOCK, StubMachine

CALL_US = 5000
SENDS = 1501
PERIOD_S = 0.002
CLOCKS_MHZ = tuple(range(900, 1411, 15))


@dataclass(frozen=True)
class Row:
    """One transport.

    Attributes:
        transport: Its name.
        send_median_us: Median cost of a send on the training thread.
        send_p99_us: 99th percentile of the same.
        single_applied_ms: From one send on an idle transport until the driver has it, median.
        newest_applied_ms: From the last of many sends until the driver has it.
        calls: Driver calls for `sends` sends.
        sends: How often the value was changed, every 2 ms.
        work_slowdown: Time of the trainer's fixed work between sends, relative to no transport.
    """

    transport: str
    send_median_us: float
    send_p99_us: float
    single_applied_ms: float
    newest_applied_ms: float
    calls: int
    sends: int
    work_slowdown: float


class Transport(Protocol):
    """Anything that takes a clock from the training thread to the driver."""

    def request(self, mhz: int) -> None:
        """Ask for a clock; called on the training thread."""

    def close(self) -> None:
        """Default clocks, and the end."""


class Inline:
    """The driver is called on the training thread."""

    def __init__(self, uuid: str) -> None:
        self._device = NvmlDevice(uuid)

    def request(self, mhz: int) -> None:
        """Lock the clock here and now."""
        self._device.lock_clock(mhz)

    def close(self) -> None:
        """Default clocks, and the end."""
        self._device.unlock_clock()
        self._device.close()


class ThreadQueue:
    """A thread of the trainer, fed by a queue; it takes the newest value."""

    def __init__(self, uuid: str) -> None:
        self._device = NvmlDevice(uuid)
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.request = self._queue.put

    def _run(self) -> None:
        while mhz := self._queue.get():
            while not self._queue.empty():
                mhz = self._queue.get()
            if not mhz:
                break
            self._device.lock_clock(mhz)

    def close(self) -> None:
        """Default clocks, and the end."""
        self._queue.put(0)
        self._thread.join()
        self._device.unlock_clock()
        self._device.close()


class ProcessQueue:
    """A process fed by a multiprocessing queue; every value is applied, in order."""

    def __init__(self, uuid: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._queue: Any = context.Queue()
        self._ready: Any = context.Event()
        self._process = context.Process(target=_serve, args=(uuid, self._queue, self._ready))
        self._process.start()
        self._ready.wait()
        self.request = self._queue.put

    def close(self) -> None:
        """Default clocks, and the end."""
        self._queue.put(0)
        self._process.join()


def _serve(uuid: str, values: Any, ready: Any) -> None:
    device = NvmlDevice(uuid)
    ready.set()
    while mhz := values.get():
        device.lock_clock(mhz)
    device.unlock_clock()


def work(rounds: int = 400) -> float:
    """A piece of a trainer's Python: how long it takes now, in seconds."""
    begin = time.perf_counter()
    total = 0
    for number in range(rounds):
        total += number * number % 7
    return time.perf_counter() - begin


def train(request: Callable[[int], None], clocks_mhz: list[int]) -> tuple[list[float], float]:
    """Send the clocks, one every 2 ms with work between; cost of each send, mean of the works."""
    costs, works = [], []
    due = time.perf_counter()
    for mhz in clocks_mhz:
        begin = time.perf_counter()
        request(mhz)
        costs.append(time.perf_counter() - begin)
        works.append(work())
        due = max(due + PERIOD_S, time.perf_counter())
        while time.perf_counter() < due:  # a trainer that launches kernels does not sleep
            pass
    return costs, statistics.mean(works)


def measure(name: str, make: Callable[[str], Transport], machine: StubMachine) -> Row:
    """Send many values through one transport and look at the driver's event ring."""
    _, idle_work_s = train(lambda mhz: None, [0] * (SENDS // 2))
    transport = make(machine.uuid(0))
    try:
        singles = []
        for number in range(15):
            mhz = CLOCKS_MHZ[number]
            sent_s = time.monotonic()
            transport.request(mhz)
            singles.append(_applied(machine, mhz, 30.0) - sent_s)
            time.sleep(0.01)
        mark = machine.mark()
        clocks = [CLOCKS_MHZ[number * 7 % (len(CLOCKS_MHZ) - 1)] for number in range(SENDS - 1)]
        costs, work_s = train(transport.request, clocks)
        last_s = time.monotonic()
        transport.request(CLOCKS_MHZ[-1])
        newest_s = _applied(machine, CLOCKS_MHZ[-1], 60.0) - last_s
        calls = len(machine.events(mark, LOCK))
    finally:
        transport.close()
    costs.sort()
    return Row(
        transport=name,
        send_median_us=statistics.median(costs) * 1e6,
        send_p99_us=costs[int(0.99 * len(costs))] * 1e6,
        single_applied_ms=statistics.median(singles) * 1e3,
        newest_applied_ms=newest_s * 1e3,
        calls=calls,
        sends=SENDS,
        work_slowdown=work_s / idle_work_s,
    )


def _applied(machine: StubMachine, mhz: int, patience_s: float) -> float:
    """When the driver had the clock, on the scale of `time.monotonic()`."""
    deadline = time.monotonic() + patience_s
    while machine.lock_mhz(0) != mhz:
        if time.monotonic() > deadline:
            return float("nan")
        time.sleep(0.0005)
    return machine.events(operation=LOCK)[-1].at_s


TRANSPORTS: dict[str, Callable[[str], Transport]] = {
    "guard (one shared word)": GuardController,
    "process, multiprocessing queue": ProcessQueue,
    "thread, queue": ThreadQueue,
    "inline": Inline,
}


def run() -> list[Row]:
    """Measure every transport on a stub machine of its own folder."""
    with tempfile.TemporaryDirectory(prefix="kareus-pp-transport-") as folder:
        machine = StubMachine(Path(folder) / "machine", 1)
        os.environ.update(machine.environment())
        os.environ[RUNTIME_VARIABLE] = f"{folder}/run"
        machine.faults(f"{LOCK}@0=0,{CALL_US},-1")
        return [measure(name, make, machine) for name, make in TRANSPORTS.items()]


def main() -> None:
    """Run and print; ratios are to the guard."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON rows")
    options = parser.parse_args()
    rows = run()
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table(
        "transport",
        "send, median / p99 (us)",
        "one applied after (ms)",
        "newest of many applied after (ms)",
        f"driver calls for {SENDS} sends",
        "trainer's work",
    )
    for row in rows:
        table.add_row(
            row.transport,
            f"{row.send_median_us:.2f} / {row.send_p99_us:.1f}",
            f"{row.single_applied_ms:.1f}",
            f"{row.newest_applied_ms:.1f}",
            str(row.calls),
            f"x {row.work_slowdown:.2f}",
        )
    Console(width=120).print(table)
    word, peer = rows[0], rows[1]
    print(
        f"queue / guard: send x {peer.send_median_us / word.send_median_us:.1f}, newest applied "
        f"x {peer.newest_applied_ms / word.newest_applied_ms:.0f}, driver calls "
        f"x {peer.calls / word.calls:.1f}; stub NVML with calls of {CALL_US / 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()

"""Boundaries of a device that is several instructions behind the host."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import pytest

from kareus_pp.builders import build_1f1b
from kareus_pp.runtime.boundaries import StreamBoundaries
from kareus_pp.runtime.messages import APPLY, Assignment
from kareus_pp.runtime.steps import StageAssignment, StepTracker

CLOCKS = (1410, 1200, 1005, 1305)


class FakeStream:
    """A device stream: work and events are executed in order, as far as the test lets it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: deque[float | FakeEvent] = deque()

    def enqueue(self, work: float | FakeEvent) -> None:
        self._queue.append(work)

    def execute(self, pieces: int) -> None:
        """Execute up to and including so many pieces of work, and the events right after them."""
        while self._queue:
            if not isinstance(self._queue[0], FakeEvent):
                pieces -= 1
                if pieces < 0:
                    return
            first = self._queue.popleft()
            if isinstance(first, FakeEvent):
                first.at_s = self.now_s
                first.reached.set()
            else:
                self.now_s += first


class FakeEvent:
    """As `torch.cuda.Event(enable_timing=True)`."""

    def __init__(self, stream: FakeStream) -> None:
        self.reached = threading.Event()
        self.at_s = 0.0
        self._stream = stream

    def record(self) -> None:
        self._stream.enqueue(self)

    def synchronize(self) -> None:
        assert self.reached.wait(10.0)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return (end_event.at_s - self.at_s) * 1e3


def until(ready: Callable[[], bool]) -> None:
    """Wait for the waiter thread."""
    end_s = time.monotonic() + 10.0
    while not ready():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.fixture
def stream() -> FakeStream:
    return FakeStream()


def test_clocks_are_requested_when_the_device_gets_there(stream: FakeStream) -> None:
    """The host has enqueued the whole step before the device has begun."""
    (order,) = build_1f1b(1, 2).order
    settings = (" ".join(map(str, CLOCKS)),)
    assignment = Assignment(0, APPLY, "2:", "given", 0, settings)
    requests: list[int] = []
    row = StageAssignment.prepare(assignment, 0, order)
    tracker = StepTracker(0, "2:", row, requests.append)
    errors: list[BaseException] = []
    boundaries = StreamBoundaries(lambda: FakeEvent(stream), errors.append)
    # Whatever else is on the stream keeps the step from beginning.
    stream.enqueue(1.0)
    boundaries.mark(tracker.on_start)
    for number, instruction in enumerate(order):
        setting = tracker.expect(instruction.kind, instruction.microbatch, 0, False)
        assert setting is not None
        assert setting.clock_mhz == CLOCKS[number]
        boundaries.mark(tracker.on_begin)
        stream.enqueue(0.01 * (number + 1))
        boundaries.mark(tracker.on_end)
    time.sleep(0.02)
    assert requests == []
    for done in range(5):
        stream.execute(1)
        until(lambda count=done + 1: len(requests) == min(count, 4))  # type: ignore[misc]
        time.sleep(0.005)
        assert tuple(requests) == CLOCKS[: done + 1]
    boundaries.close()
    assert tracker.durations_s == pytest.approx((0.01, 0.02, 0.03, 0.04))
    assert tracker.clocks_mhz == list(CLOCKS)
    assert not errors


def test_an_error_is_told_once_and_ends_the_actions(stream: FakeStream) -> None:
    errors: list[BaseException] = []
    done: list[float] = []
    boundaries = StreamBoundaries(lambda: FakeEvent(stream), errors.append)

    def broken(_: float) -> None:
        raise RuntimeError("the action broke")

    boundaries.mark(done.append)
    boundaries.mark(broken)
    boundaries.mark(done.append)
    boundaries.mark(broken)
    stream.execute(0)
    boundaries.close()
    assert [str(error) for error in errors] == ["the action broke"]
    assert len(done) == 1

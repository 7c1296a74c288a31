"""When the device reaches a point of the program, which is later than when Python does.

On a GPU the host runs several instructions ahead. A boundary is enqueued like any other work; its
action runs when the device gets there, on a waiter thread, never on the training thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

Action = Callable[[float], None]
"""Called with the time of the boundary, on the scale of `time.monotonic()`, in seconds."""


class Boundaries(Protocol):
    """Enqueues actions that run when the device reaches them, in order."""

    def mark(self, action: Action) -> None:
        """Run `action` when the device has done all that was enqueued before."""
        ...

    def close(self) -> None:
        """Run what is still enqueued, as far as the device gets, and end."""
        ...


class InlineBoundaries:
    """For a host that executes the work itself: the boundary is now."""

    def mark(self, action: Action) -> None:
        """Run `action` at once."""
        action(time.monotonic())

    def close(self) -> None:
        """Nothing is ever left over."""


class DeviceEvent(Protocol):
    """An event of a device stream, as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> Any:
        """Enqueue the event on the current stream."""
        ...

    def synchronize(self) -> Any:
        """Wait until the device has reached the event."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another, both reached."""
        ...


class StreamBoundaries:
    """For a device that executes asynchronously: events, and a thread that waits for them.

    Args:
        new_event: Makes an event with timing, as `lambda: torch.cuda.Event(enable_timing=True)`.
        on_error: Called once with the first exception of an action or of the device.
    """

    def __init__(
        self, new_event: Callable[[], DeviceEvent], on_error: Callable[[BaseException], None]
    ) -> None:
        self._new_event = new_event
        self._on_error = on_error
        self._waiting: queue.SimpleQueue[tuple[DeviceEvent, Action] | None] = queue.SimpleQueue()
        self._origin: DeviceEvent | None = None
        self._origin_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kareus-boundaries", daemon=True)
        self._thread.start()

    def mark(self, action: Action) -> None:
        """Enqueue an event on the current stream; `action` runs when the device reaches it."""
        event = self._new_event()
        event.record()
        self._waiting.put((event, action))

    def close(self) -> None:
        """Wait a little for what is enqueued, then end the thread."""
        self._waiting.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        failed = False
        while (entry := self._waiting.get()) is not None:
            event, action = entry
            if failed:
                continue
            try:
                event.synchronize()
                action(self._time_s(event))
            except BaseException as error:
                failed = True
                self._on_error(error)

    def _time_s(self, event: DeviceEvent) -> float:
        """Time of an event: the device's own clock, tied to the host's at the first event."""
        if self._origin is None:
            self._origin, self._origin_s = event, time.monotonic()
        return self._origin_s + self._origin.elapsed_time(event) / 1e3

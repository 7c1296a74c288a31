"""The event log of a rank: one JSON object a line, written off the training thread."""

from __future__ import annotations

import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1


class EventLog:
    """Appends events to `events-rankN.jsonl` in the output folder.

    A log that cannot be written never stops training: the first failure is kept in `error`.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"events-rank{rank}.jsonl"
        self.error = ""
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kareus-events", daemon=True)
        self._thread.start()
        self.write("start", format_version=FORMAT_VERSION, rank=rank)

    def write(self, event: str, **values: Any) -> None:
        """Append one event with the present time; returns at once."""
        self._queue.put({"event": event, "at": round(time.time(), 6), **values})

    def close(self) -> None:
        """Write what is left and end."""
        self._queue.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w", encoding="utf-8") as stream:
                while (event := self._queue.get()) is not None:
                    stream.write(json.dumps(event, default=str) + "\n")
                    if self._queue.empty():
                        stream.flush()
        except OSError as error:
            self.error = f"cannot write {self.path} ({error.strerror})"
            while self._queue.get() is not None:
                pass


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a log file, in order; a last line cut short by a crash is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            break
    return events

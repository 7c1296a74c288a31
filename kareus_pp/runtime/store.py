"""The key-value store through which ranks agree, off the training thread."""

from __future__ import annotations

import threading
from typing import Protocol


class Store(Protocol):
    """A shared key-value store. Calls may take milliseconds, never wait for another rank."""

    def set(self, key: str, value: str) -> None:
        """Store a value under a key."""
        ...

    def get(self, key: str) -> str | None:
        """The value of a key; None where it is not set."""
        ...

    def delete(self, key: str) -> None:
        """Forget a key; nothing happens where it is not set."""
        ...


class LocalStore:
    """A store within one process: for jobs of one rank, and for several sessions in tests."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        """Store a value under a key."""
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> str | None:
        """The value of a key; None where it is not set."""
        with self._lock:
            return self._values.get(key)

    def delete(self, key: str) -> None:
        """Forget a key; nothing happens where it is not set."""
        with self._lock:
            self._values.pop(key, None)

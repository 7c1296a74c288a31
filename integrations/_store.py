"""The key-value store of a job, over torch's TCPStore."""

from __future__ import annotations

import datetime
import itertools
import os

import torch.distributed as dist
from torch.distributed import Store as ProcessStore  # type: ignore[attr-defined]
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kareus_pp.runtime.store import LocalStore, Store

_TIMEOUT = datetime.timedelta(seconds=30)
_numbers = itertools.count()
_served: list[TCPStore] = []
"""Stores that this process serves, kept to its end: other ranks may still have to connect."""


class TorchStore:
    """A store of its own, apart from the process group's.

    A client of a TCPStore serves one call at a time, so a wait in our thread would hold up a
    process group that is being made on the training thread.
    """

    def __init__(self, store: ProcessStore) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Store a value under a key."""
        self._store.set(key, value)

    def get(self, key: str) -> str | None:
        """The value of a key; None where it is not set."""
        if not self._store.check([key]):
            return None
        return str(self._store.get(key), "utf-8")

    def delete(self, key: str) -> None:
        """Forget a key; nothing happens where it is not set."""
        self._store.delete_key(key)


def open_store(rank: int, world_size: int) -> Store:
    """Open the store that the ranks of this job share; rank 0 serves it on a free port.

    Every rank calls this equally often, in the same order. The address goes through the default
    process group's store; there is no collective.

    Raises:
        RuntimeError: Rank 0 did not open it in time.
    """
    if world_size == 1:
        return LocalStore()
    default = dist.distributed_c10d._get_default_store()
    key = f"kareus-pp/store/{next(_numbers)}"
    if rank == 0:
        host = os.environ.get("MASTER_ADDR", "localhost")
        served = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        _served.append(served)
        default.set(key, f"{host} {served.port}")
        return TorchStore(served)
    default.wait([key], _TIMEOUT)
    host, port = default.get(key).decode().rsplit(" ", 1)
    return TorchStore(
        TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    )

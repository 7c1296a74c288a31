"""Processes with a gloo group that stay alive between tests: starting them costs seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection
from typing import Any

from torch.distributed import TCPStore

from examples.demo import remove_shared_memory

TIMEOUT_S = 240.0


class Ranks:
    """A group of processes that all call the same functions.

    Args:
        size: Number of ranks.
        path: Folder put first on the import path, such as another version of a framework.
        timeout_s: Longest time for one call.
    """

    def __init__(self, size: int, path: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self.size = size
        self._path = path
        self._timeout_s = timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._store: TCPStore | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function of a module on every rank; returns its results in order of ranks.

        An exception of any rank is raised here; a rank that does not answer ends all of them.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers: dict[int, tuple[str, Any]] = {}
        limit = time.monotonic() + self._timeout_s
        while len(answers) < self.size:
            waiting = {pipe: r for r, pipe in enumerate(self._pipes) if r not in answers}
            ready = connection.wait(waiting, limit - time.monotonic())
            for pipe in ready:
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except EOFError:
                    answers[waiting[pipe]] = ("the process died", None)
            failed = [(rank, text) for rank, (text, _) in answers.items() if text]
            if failed or not ready:
                # The others may wait for the one that failed: it is that one's error that counts.
                self.close()
                silent = f"no answer within {self._timeout_s:g} s"
                failed = failed or [(rank, silent) for rank in waiting.values()]
                raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in failed))
        return [answers[rank][1] for rank in range(self.size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        # Bound here and kept: a port that is only looked up may be another's by the time of use.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.size, port, self._path), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        if self._store is not None:
            remove_shared_memory(self._store.port)
        self._processes, self._pipes, self._store = [], [], None


def _serve(pipe: Any, rank: int, size: int, port: int, path: str) -> None:
    # Frameworks print; standard output belongs to the caller, who may print JSON there.
    os.dup2(2, 1)
    if path:
        sys.path.insert(0, path)
    os.environ.update(
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    while True:
        order = pipe.recv()
        if order is None:
            os._exit(0)
        function, args, kwargs = order
        try:
            pipe.send(("", function(*args, **kwargs)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


@contextlib.contextmanager
def ranks(size: int, path: str = "", timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """A group of processes for the time of a `with` block."""
    group = Ranks(size, path, timeout_s)
    try:
        yield group
    finally:
        group.close()

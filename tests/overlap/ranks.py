"""Processes with a gloo group that stay alive between tests: starting them costs seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

TIMEOUT_S = 120.0


class Ranks:
    """A group of processes that all call the same functions.

    Args:
        size: Number of ranks.
        path: Folder put first on the import path, such as another version of a framework.
    """

    def __init__(self, size: int, path: str = "") -> None:
        self.size = size
        self._path = path
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function of a module on every rank; returns its results in order of ranks.

        An exception of any rank is raised here; a rank that does not answer ends all of them.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer within {TIMEOUT_S:g} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                self.close()
                raise RuntimeError(f"rank {rank} died") from None
        for rank, (text, _) in enumerate(answers):
            if text:
                self.close()
                raise AssertionError(f"rank {rank}: {text}")
        return [result for _, result in answers]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
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
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []


def _serve(pipe: Any, rank: int, size: int, port: int, path: str) -> None:
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
        init_method=f"tcp://127.0.0.1:{port}",
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
def ranks(size: int, path: str = "") -> Iterator[Ranks]:
    """A group of processes for the time of a `with` block."""
    group = Ranks(size, path)
    try:
        yield group
    finally:
        group.close()

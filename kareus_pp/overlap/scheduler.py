"""Two nanobatches on two threads, exactly one of which runs at a time.

A nanobatch runs until it needs the result of a tensor-parallel collective. There it leaves the
collective pending and hands over to its peer, which launches it at the launch slot that the setting
names, in the midst of its own compute. So the order of all launches is the same on every rank that
runs the same block with the same setting, and at most one pending collective is in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

from kareus_pp.errors import OverlapError
from kareus_pp.overlap import interception
from kareus_pp.overlap.interception import Collective
from kareus_pp.overlap.run import Run, Swap, Task
from kareus_pp.overlap.thread_context import ThreadContext


class _Abandoned(BaseException):
    """Unwinds a nanobatch whose peer has failed. No `except Exception` may catch it."""


class Deferred:
    """Stands for the work handle of a collective that may not have been launched yet."""

    __slots__ = ("_nanobatch", "_waited", "collective", "work")

    def __init__(self, collective: Collective, nanobatch: _Nanobatch) -> None:
        self.collective = collective
        self.work: Any = None
        self._nanobatch = nanobatch
        self._waited = False

    @property
    def is_launched(self) -> bool:
        """True once the collective was handed to its communicator."""
        return self.work is not None

    def launch(self, group: ProcessGroup) -> None:
        """Hand the collective to a communicator; it starts after all work queued so far."""
        self.work = self.collective.call(group)

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Run the peer until the result is needed, then wait for it; arguments as `Work.wait`."""
        if not self._waited:
            self._waited = True
            self._nanobatch.complete(self, args, kwargs)
        return True

    def is_completed(self) -> bool:
        """As `torch.distributed.Work`; launches, for who polls does not wait."""
        if not self.is_launched:
            self._nanobatch.launch_now(self)
        return self._waited or bool(self.work.is_completed())

    def __getattr__(self, name: str) -> Any:
        # Rarely used parts of the handle, such as get_future: launch now, and let c10d answer.
        if not self.is_launched:
            self._nanobatch.launch_now(self)
        return getattr(self.work, name)


class _Nanobatch:
    """One of the two persistent threads and what it is at."""

    def __init__(self, index: int, scheduler: Scheduler) -> None:
        self.index = index
        self.peer: _Nanobatch = self
        self._scheduler = scheduler
        self._baton = threading.Lock()
        self._baton.acquire()
        self.thread = threading.Thread(
            target=self._work, name=f"kareus-nanobatch-{index}", daemon=True
        )
        self.reset(None)

    def reset(self, task: Task | None) -> None:
        self.task = task
        self.finished = task is None
        self.result: Any = None
        self.pending: Deferred | None = None
        self.issued: list[Deferred] = []
        self.position = -1
        self.launch_at: str | None = None
        self.launch_key = ("", -1)
        self.launch_sms = 0

    def resume(self) -> None:
        self._baton.release()

    def _work(self) -> None:
        scheduler = self._scheduler
        _current.nanobatch = self
        interception.set_thread_handler(self._intercept)
        while True:
            self._baton.acquire()
            if scheduler.closing:
                return
            try:
                with scheduler.context.applied():
                    self._run_task()
            except BaseException as error:
                scheduler.fail(error)
            scheduler.on_finished(self)

    def _run_task(self) -> None:
        if self._scheduler.failure is not None or self.task is None:
            return
        self._begin_partition()
        self.result = self.task()
        for deferred in list(self.issued):
            deferred.wait()

    # What happens inside the task.

    def _intercept(self, collective: Collective) -> Any:
        run = self._scheduler.current_run
        if not any(collective.group is group for group in run.groups):
            return collective.original(collective.group, *collective.args)
        deferred = Deferred(collective, self)
        if not run.overlaps:
            deferred.launch(collective.group)
        elif collective.is_asynchronous_gather:
            # Sequence parallelism gathers the input again for the weight gradient, while it
            # computes the input gradient: it overlaps already, and waits before it yields.
            self._scheduler.launch_beside(deferred, collective.group)
            return deferred.work
        self.issued.append(deferred)
        return deferred

    def complete(self, deferred: Deferred, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scheduler = self._scheduler
        run = scheduler.current_run
        self.issued.remove(deferred)
        if run.listener is not None and not deferred.collective.is_asynchronous_gather:
            run.listener.on_collective(deferred.collective)
        if run.overlaps and not deferred.is_launched:
            self.pending = deferred
            self._launch_pending_of_peer(*self._at_end())
            if not self.peer.finished:
                scheduler.switch(self, self.peer)
            self.pending = None
        if not deferred.is_launched:
            self.launch_now(deferred)
        deferred.work.wait(*args, **kwargs)
        if run.overlaps:
            self._begin_partition()

    def launch_now(self, deferred: Deferred) -> None:
        deferred.launch(deferred.collective.group)
        run = self._scheduler.current_run
        if run.overlaps:
            kind, slot, _ = self._at_end()
            run.launches[run.phase, kind, slot] += 1

    def on_boundary(self, event: str) -> None:
        if event == self.launch_at:
            self.launch_at = None
            self._launch_pending_of_peer(*self.launch_key, self.launch_sms)

    def _begin_partition(self) -> None:
        """Look up where in the partition that begins the peer's collective is to be launched."""
        run = self._scheduler.current_run
        self.launch_at = None
        if not run.overlaps:
            return
        self.position += 1
        kind = run.program.kind_at(self.position) if run.program else None
        if run.program is None or kind is None:
            # Past the last collective there is too little compute to choose a slot in.
            self._launch_pending_of_peer("tail", 0, 0)
            return
        for launch in run.setting.launches:
            if launch.partition == kind:
                self.launch_key, self.launch_sms = (kind, launch.slot), launch.sms
                self.launch_at = run.program.event_at(self.position, launch.slot)
                if launch.slot == 0:
                    self._launch_pending_of_peer(kind, 0, launch.sms)
                return

    def _at_end(self) -> tuple[str, int, int]:
        program = self._scheduler.current_run.program
        kind = program.kind_at(self.position) if program else None
        return kind or "tail", -1, 0

    def _launch_pending_of_peer(self, kind: str, slot: int, sms: int) -> None:
        deferred = self.peer.pending
        if deferred is None or deferred.is_launched:
            return
        run = self._scheduler.current_run
        deferred.launch(run.select(deferred.collective.group, sms))
        run.launches[run.phase, kind, slot] += 1


class _Current(threading.local):
    nanobatch: _Nanobatch | None = None


_current = _Current()


def is_nanobatch_thread() -> bool:
    """True on the thread of a nanobatch."""
    return _current.nanobatch is not None


def at_boundary(event: str) -> None:
    """Called by the hooks at every submodule boundary; does nothing on other threads."""
    nanobatch = _current.nanobatch
    if nanobatch is None:
        return
    listener = nanobatch._scheduler.current_run.listener
    if listener is not None:
        listener.on_boundary(event)
    else:
        nanobatch.on_boundary(event)


@dataclass
class Scheduler:
    """Runs two tasks alternately; one run at a time, from one thread at a time.

    Attributes:
        swaps: State to exchange on every switch between the nanobatches.
    """

    swaps: Sequence[Swap] = ()
    closing: bool = False
    failure: BaseException | None = None
    context: ThreadContext = field(default_factory=ThreadContext.capture)

    def __post_init__(self) -> None:
        self._run: Run | None = None
        self._done = threading.Lock()
        self._done.acquire()
        self._side_stream: Any = None
        first, second = _Nanobatch(0, self), _Nanobatch(1, self)
        first.peer, second.peer = second, first
        self._nanobatches = (first, second)
        interception.install()
        for nanobatch in self._nanobatches:
            nanobatch.thread.start()

    @property
    def current_run(self) -> Run:
        """The run in progress."""
        assert self._run is not None
        return self._run

    @property
    def is_running(self) -> bool:
        """True between the start and the end of a run."""
        return self._run is not None

    def run(self, run: Run, tasks: Sequence[Task]) -> list[Any]:
        """Run one or two tasks and return their results; raises what the first to fail raised."""
        assert self._run is None, "nanobatches cannot be nested"
        if self.closing:
            raise OverlapError(
                "the overlap executor was closed between this backward and its forward; close it "
                "between two steps"
            )
        self._run, self.failure = run, None
        self.context = ThreadContext.capture()
        for nanobatch in self._nanobatches:
            nanobatch.reset(tasks[nanobatch.index] if nanobatch.index < len(tasks) else None)
        try:
            for swap in self.swaps:
                swap.start(run.phase)
            self._enter(0)
            self._nanobatches[0].resume()
            self._wait_for_both()
        finally:
            try:
                for swap in self.swaps:
                    swap.finish(run.phase)
            finally:
                results = [n.result for n in self._nanobatches[: len(tasks)]]
                failure, self.failure, self._run = self.failure, None, None
                for nanobatch in self._nanobatches:
                    nanobatch.reset(None)
        if failure is not None:
            raise failure
        return results

    def _wait_for_both(self) -> None:
        try:
            self._done.acquire()
        except BaseException as error:
            # An interrupt of the caller: both threads must be idle before it goes on.
            self.fail(error)
            self._done.acquire()

    def fail(self, error: BaseException) -> None:
        """Keep the first failure; the other nanobatch unwinds when it is resumed."""
        if self.failure is None and not isinstance(error, _Abandoned):
            self.failure = error

    def switch(self, away: _Nanobatch, to: _Nanobatch) -> None:
        """Hand over to the peer and return when it hands back."""
        self._leave(away.index)
        self._enter(to.index)
        to.resume()
        away._baton.acquire()
        if self.failure is not None:
            raise _Abandoned

    def on_finished(self, nanobatch: _Nanobatch) -> None:
        """A nanobatch's task is over: its peer goes on, or the run ends."""
        nanobatch.finished = True
        peer = nanobatch.peer
        try:
            self._leave(nanobatch.index)
            if not peer.finished:
                if self.failure is None:
                    nanobatch._launch_pending_of_peer("tail", -1, 0)
                self._enter(peer.index)
        except BaseException as error:
            self.fail(error)
        if peer.finished:
            self._done.release()
        else:
            peer.resume()

    def launch_beside(self, deferred: Deferred, group: ProcessGroup) -> None:
        """Launch at once a collective that may find another one in flight.

        Two communicators whose kernels wait for each other's SMs can deadlock: on a GPU the second
        is issued from a side stream that first waits for the one in flight.
        """
        in_flight = [
            n.pending.work
            for n in self._nanobatches
            if n.pending is not None and n.pending.is_launched
        ]
        if self.context.device is None or not in_flight:
            deferred.launch(group)
            return
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            for work in in_flight:
                work.wait()
            deferred.launch(group)

    def _leave(self, nanobatch: int) -> None:
        for swap in self.swaps:
            swap.leave(nanobatch)

    def _enter(self, nanobatch: int) -> None:
        for swap in self.swaps:
            swap.enter(nanobatch)

    def close(self) -> None:
        """End the threads and let go of c10d; nothing happens the second time."""
        if self.closing:
            return
        self.closing = True
        for nanobatch in self._nanobatches:
            nanobatch.resume()
            nanobatch.thread.join()
        interception.uninstall()

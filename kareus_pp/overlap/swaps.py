"""State of the process that each nanobatch must see as its own.

The scheduler exchanges it on every switch. What a framework keeps in its own globals is swapped by
the framework's integration with the classes below.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from kareus_pp.overlap.thread_context import gpu_in_use


def derived_state(state: torch.Tensor, device: str | torch.device = "cpu") -> torch.Tensor:
    """The random state of nanobatch 1, from that of nanobatch 0.

    A pure function of the state: ranks that have the same state, as those of a tensor-parallel
    group do outside of its parallel regions, derive the same one.

    Args:
        state: State of a generator, as `torch.Generator.get_state` gives it.
        device: Device of the generator.
    """
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
    seed = int.from_bytes(digest, "big") & (2**63 - 1)
    return torch.Generator(device).manual_seed(seed).get_state()


class RandomState:
    """Swaps the default random generators of the CPU and of the current GPU.

    Forward: nanobatch 0 goes on from the present state, nanobatch 1 from a derived one, and what
    follows goes on after nanobatch 0. Backward: both begin with the present state, which is there
    again afterwards; recomputation sets and restores its own.
    """

    def __init__(self) -> None:
        self._states: list[Any] = [None, None]
        self._entry: Any = None

    def start(self, phase: str) -> None:
        """A forward or backward begins."""
        self._entry = self._get()
        self._states = [self._entry, self._entry]
        if phase == "forward":
            cpu, gpu = self._entry
            self._states[1] = (
                derived_state(cpu),
                None if gpu is None else derived_state(gpu, "cuda"),
            )

    def leave(self, nanobatch: int) -> None:
        """Keep the state of a nanobatch that stops running."""
        self._states[nanobatch] = self._get()

    def enter(self, nanobatch: int) -> None:
        """Install the state of a nanobatch that goes on running."""
        self._set(self._states[nanobatch])

    def finish(self, phase: str) -> None:
        """Install the state with which the caller goes on."""
        if self._entry is not None:
            self._set(self._states[0] if phase == "forward" else self._entry)
        self._entry, self._states = None, [None, None]

    @staticmethod
    def _get() -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.get_rng_state(), torch.cuda.get_rng_state() if gpu_in_use() else None

    @staticmethod
    def _set(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        cpu, gpu = state
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)


class Variable:
    """Swaps one variable.

    After a forward nanobatch 0's value stays, after a backward the value at its beginning comes
    back, as for random state.

    Args:
        get: Reads the variable.
        put: Writes it.
        begin: Gives the two nanobatches' first values from the present one.
        phases: Phases in which it is swapped.
    """

    def __init__(
        self,
        get: Callable[[], Any],
        put: Callable[[Any], None],
        begin: Callable[[Any], tuple[Any, Any]],
        phases: tuple[str, ...] = ("forward", "backward"),
    ) -> None:
        self._get, self._put, self._begin, self._phases = get, put, begin, phases
        self._active = False
        self._values: list[Any] = [None, None]
        self._entry: Any = None

    def start(self, phase: str) -> None:
        """A forward or backward begins."""
        self._active = phase in self._phases
        if self._active:
            self._entry = self._get()
            self._values = list(self._begin(self._entry))

    def leave(self, nanobatch: int) -> None:
        """Keep the value of a nanobatch that stops running."""
        if self._active:
            self._values[nanobatch] = self._get()

    def enter(self, nanobatch: int) -> None:
        """Install the value of a nanobatch that goes on running."""
        if self._active:
            self._put(self._values[nanobatch])

    def finish(self, phase: str) -> None:
        """Install the value with which the caller goes on."""
        if self._active:
            self._put(self._values[0] if phase == "forward" else self._entry)
        self._active, self._entry, self._values = False, None, [None, None]


def random_tracker(get_tracker: Callable[[], Any]) -> Variable:
    """Swaps the named random states of model-parallel regions, and which one is in use.

    Args:
        get_tracker: Gives the framework's tracker: a `CudaRNGStatesTracker` of Megatron's making,
            which DeepSpeed has too.
    """

    def get() -> Any:
        tracker = get_tracker()
        return dict(tracker.states_), getattr(tracker, "_current_state_name", None)

    def put(value: Any) -> None:
        tracker = get_tracker()
        tracker.states_ = dict(value[0])
        if value[1] is not None:
            tracker._current_state_name = value[1]

    def begin(value: Any) -> tuple[Any, Any]:
        states, current = value
        device = "cuda" if gpu_in_use() else "cpu"
        return value, (
            {name: derived_state(state, device) for name, state in states.items()},
            current,
        )

    return Variable(get, put, begin)

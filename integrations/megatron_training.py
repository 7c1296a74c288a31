"""Megatron's training loop: default clocks around evaluation and saving, energy in the log.

The functions hooked here are globals of the module `megatron.training.training`; a script that
brings its own loop does without them, as evaluation is seen at the schedules as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kareus_pp.integrations.megatron import pause, replace, session

TRAINING_MODULE = "megatron.training.training"
CHECKPOINTING_MODULE = "megatron.core.dist_checkpointing"
_TAG = "energy-per-gpu-per-iteration-joules"


def hook_training(module: ModuleType) -> None:
    """Hook the module `megatron.training.training`."""
    for name, reason in (("evaluate", "evaluation"), ("save_checkpoint_and_time", "checkpoint")):
        if hasattr(module, name):
            replace(module, name, _paused(reason))
    if hasattr(module, "training_log") and hasattr(module, "print_rank_last"):
        log = _EnergyLog(module)
        replace(module, "training_log", log.training_log)
        replace(module, "print_rank_last", log.print_rank_last)


def hook_checkpointing(module: ModuleType) -> None:
    """Hook `megatron.core.dist_checkpointing`, which scripts with a loop of their own save with."""
    replace(module, "save", _paused("checkpoint"))


def _paused(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*args: Any, **kwargs: Any) -> Any:
            pause(reason)
            return original(*args, **kwargs)

        return paused

    return wrap


class _EnergyLog:
    """Adds the energy of this rank's GPU to the line and the TensorBoard of Megatron's log."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._iteration: int | None = None
        self._before = (0.0, 0)

    def training_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `training_log`: while it runs, the iteration is known."""
        signature = inspect.signature(original)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            self._iteration = signature.bind(*args, **kwargs).arguments.get("iteration")
            try:
                return original(*args, **kwargs)
            finally:
                self._iteration = None

        return training_log

    def print_rank_last(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `print_rank_last`: the line of an iteration gets its energy."""

        def print_rank_last(message: Any, *args: Any, **kwargs: Any) -> Any:
            if self._iteration is not None and "elapsed time per iteration" in str(message):
                energy_j = self._mean_energy_j()
                if energy_j is not None:
                    message = f"{message} energy per GPU per iteration (J): {energy_j:.1f} |"
                    self._write(energy_j, self._iteration)
            return original(message, *args, **kwargs)

        return print_rank_last

    def _mean_energy_j(self) -> float | None:
        """Mean over the iterations since the last line; None where none was read."""
        found = session()
        if found is None:
            return None
        joules, steps = found.energy_read()
        before_joules, before_steps = self._before
        self._before = joules, steps
        return (joules - before_joules) / (steps - before_steps) if steps > before_steps else None

    def _write(self, energy_j: float, iteration: int) -> None:
        for name in ("get_tensorboard_writer", "get_wandb_writer"):
            writer: Any = getattr(self._module, name, lambda: None)()
            if hasattr(writer, "add_scalar"):
                writer.add_scalar(_TAG, energy_j, iteration)
            elif hasattr(writer, "log"):
                writer.log({_TAG: energy_j}, iteration)

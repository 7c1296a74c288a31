"""Which frameworks the launcher hooks when a training script imports them."""

from __future__ import annotations

import importlib
from types import ModuleType

from kareus_pp.integrations._import_hook import on_import

DOORS: list[tuple[str, str]] = [
    ("deepspeed.runtime.pipe.engine", "kareus_pp.integrations.deepspeed:install"),
    (
        "megatron.core.pipeline_parallel.schedules",
        "kareus_pp.integrations.megatron:hook_schedules",
    ),
    (
        "megatron.core.dist_checkpointing",
        "kareus_pp.integrations.megatron_training:hook_checkpointing",
    ),
    (
        "megatron.training.arguments",
        "kareus_pp.integrations.megatron_arguments:hook_arguments",
    ),
    (
        "megatron.training.training",
        "kareus_pp.integrations.megatron_training:hook_training",
    ),
]
"""Module of a framework, and what to call with it once it has been imported."""


def open_doors() -> None:
    """Hook every framework; nothing is imported before the training script does."""
    for module, callback in DOORS:
        on_import(module, _Lazy(callback))


class _Lazy:
    """A callable by its path, `package.module:name`, imported at the first call."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, module: ModuleType) -> None:
        place, name = self._path.split(":")
        getattr(importlib.import_module(place), name)(module)

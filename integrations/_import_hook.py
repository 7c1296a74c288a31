"""Run something right after a module has been imported, without importing it."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


def on_import(name: str, callback: Callback) -> None:
    """Call `callback(module)` once the module `name` has been imported; at once if it already is.

    A callback that raises is logged and never breaks the import.
    """
    module = sys.modules.get(name)
    if module is not None:
        _call(callback, module)
        return
    _FINDER.waiting.setdefault(name, []).append(callback)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder(MetaPathFinder):
    """Finds nothing itself: lets the others find, and has the loader call back."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callback]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        callbacks = self.waiting.pop(fullname, None)
        if callbacks is None:
            return None
        # With the entry taken out, this asks all other finders, whatever their order.
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self.waiting[fullname] = callbacks
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for callback in callbacks:
                _call(callback, module)

        # Each import has a loader of its own; replacing one method keeps all others, as
        # `get_source` for tracebacks.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def _call(callback: Callback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception as error:
        logging.getLogger("kareus_pp").warning(
            "kareus-pp: cannot hook %s (%s: %s); training goes on without it",
            module.__name__,
            type(error).__name__,
            error,
        )

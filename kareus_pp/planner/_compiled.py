"""Compilation of inner loops: cached on disk where that is possible, in memory otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def compiled(function: FunctionT) -> FunctionT:
    """Compile a function of numbers and arrays with numba on its first call.

    The machine code is cached beside the source or, where that is read-only, in numba's user
    cache; where neither can be written numba refuses to cache, and every process compiles anew.
    """
    try:
        return cast(FunctionT, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:
        return cast(FunctionT, numba.njit(nogil=True)(function))

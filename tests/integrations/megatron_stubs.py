"""Lets Megatron-LM be imported where CUDA-only packages that it imports are not installed."""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import typing
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest import mock

# Torch looks for triton itself, and must do so before the stub is there.
import torch._inductor.select_algorithm
import torch.utils.flop_counter  # noqa: F401
import typing_extensions


class _Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one package and everything below it, all of it inert."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == self._name or fullname.startswith(f"{self._name}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = mock.MagicMock(name=spec.name)
        module.__path__ = []
        module.__version__ = "0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to execute."""


def stub_missing(name: str) -> None:
    """Let imports of a CUDA-only package succeed where it is not installed."""
    if importlib.util.find_spec(name) is None:
        sys.meta_path.append(_Stub(name))


# Megatron-LM 0.20 imports kernels written in it, and runs none of them here.
stub_missing("triton")

# Megatron-LM 0.20 is written for Python 3.12.
if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]


_expand_help = argparse.HelpFormatter._expand_help


def _expand_or_leave(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    """Megatron-LM 0.20 has a bare percent sign in a help text, on which its `--help` fails."""
    try:
        return _expand_help(formatter, action)
    except ValueError:
        return str(action.help)


argparse.HelpFormatter._expand_help = _expand_or_leave  # type: ignore[method-assign]

"""Steps that overlap, for tests without a session."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from kareus_pp.overlap.executor import OverlapExecutor
from kareus_pp.setting import OverlapSetting

# Ranks call the same functions, so that they count alike.
_numbers = itertools.count()


def begin_step(executor: OverlapExecutor, settings: Mapping[str, OverlapSetting]) -> None:
    """Agree on a step in which every forward has one setting, and every backward one."""
    assert executor.begin_step(next(_numbers), settings.values())
    for phase, setting in settings.items():
        executor.set_next(phase, setting)

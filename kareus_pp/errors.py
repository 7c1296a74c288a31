"""Errors that a user can act on.

Every message is one sentence that names the value, what is allowed and what to do. Entry points
(command line, launcher, integrations) print the message and no traceback.
"""

from __future__ import annotations


class KareusError(Exception):
    """Base of every error that kareus-pp raises on purpose."""


class ConfigError(KareusError):
    """A configuration value is unknown, misspelt or out of range."""


class FormatError(KareusError):
    """A file is not what it claims to be: wrong format, version or content."""


class ScheduleError(KareusError):
    """A schedule is inconsistent; the message names stage, step and microbatch."""


class ProfileError(KareusError):
    """A profile misses, or contradicts, something that is needed."""


class PlanError(KareusError):
    """A plan does not fit its schedule or profile."""


class TargetError(KareusError):
    """A target is malformed or cannot be met; the message says what can."""


class OverlapError(KareusError):
    """An overlap setting, or a block to overlap, is not what it must be."""


class DeviceError(KareusError):
    """A GPU could not be read or controlled.

    Args:
        cause: What happened, in one clause.
        remedy: What the user can do about it.
    """

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(f"{cause}; {remedy}" if remedy else cause)
        self.cause = cause
        self.remedy = remedy

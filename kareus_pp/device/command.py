"""Clocks through a site's own command, for sites that allow only a blessed one; reads by NVML."""

from __future__ import annotations

import shlex
import subprocess

from kareus_pp.device.errors import SiteCommandError
from kareus_pp.device.nvml import NvmlDevice

_TIMEOUT_S = 10.0


class CommandDevice(NvmlDevice):
    """A GPU whose clock a site command locks and unlocks.

    Args:
        uuid: As NVML reports it.
        lock: Command template with `{uuid}` and `{mhz}`, as in
            `sudo -n site-clocks lock {uuid} {mhz}`; split as a shell would, run without a shell.
        unlock: Command template with `{uuid}`.

    Raises:
        SiteCommandError: A template lacks a part.
        DeviceError: As of `NvmlDevice`.
    """

    def __init__(self, uuid: str, lock: str, unlock: str) -> None:
        self._lock = _template(lock, "lock", ("{uuid}", "{mhz}"))
        self._unlock = _template(unlock, "unlock", ("{uuid}",))
        super().__init__(uuid)

    def lock_clock(self, mhz: int) -> None:
        """Run the lock command; raises `SiteCommandError` with the command's last words."""
        self._check_clock(mhz)
        self._run(self._lock, mhz)

    def unlock_clock(self) -> None:
        """Run the unlock command; raises `SiteCommandError` with the command's last words."""
        self._run(self._unlock, 0)

    def _run(self, template: list[str], mhz: int) -> None:
        words = [
            word.replace("{uuid}", self.identity.uuid).replace("{mhz}", str(mhz))
            for word in template
        ]
        shown = shlex.join(words)
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SiteCommandError(
                f"the site command {shown!r} could not be run ({error})",
                "correct command.lock and command.unlock, and try the command by hand",
            ) from None
        if done.returncode != 0:
            words_said = (done.stderr or done.stdout).decode(errors="replace").split()
            raise SiteCommandError(
                f"the site command {shown!r} ended with status {done.returncode}: "
                f"{' '.join(words_said)[-200:] or 'no message'}",
                "try the command by hand, and ask the site for permission",
            )


def _template(text: str, name: str, needed: tuple[str, ...]) -> list[str]:
    missing = [part for part in needed if part not in text]
    if missing:
        raise SiteCommandError(
            f"command.{name} is {text!r} and lacks {' and '.join(missing)}",
            "write it as in 'sudo -n site-clocks lock {uuid} {mhz}'",
        )
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SiteCommandError(f"command.{name} is {text!r}: {error}", "correct it") from None

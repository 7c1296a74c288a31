"""Leases: one owner for each GPU, and a note of every lock that outlives a kill of everything.

A clock lock is state of the driver and outlives the process, and NVML cannot read it back. So the
guard of a GPU holds `<uuid>.lock` (flock: the kernel frees it whatever kills the guard) and, before
its first lock, writes `<uuid>.json` beside it. A lease whose lock is free is stale: its GPU may
still be locked and is reset at the next start, or by `kareus-pp unlock`.

Light on purpose: the guard process imports it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kareus_pp.device.errors import GuardError, OwnedError

RUNTIME_VARIABLE = "KAREUS_PP_RUNTIME_DIR"
_FORMAT, _VERSION = "kareus-pp/lease", 1
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,95}")
_ACQUIRE_S = 1.0


@dataclass(frozen=True)
class Lease:
    """Who holds the clocks of one GPU.

    Attributes:
        uuid: The GPU.
        guard_pid: The guard process.
        trainer_pid: The process it guards.
        since_s: Unix time of the lease.
        backend: How the clock is set and reset, as `backend.open_backend` reads it.
        problem: Why the last owner could not reset the clock; empty for no problem.
    """

    uuid: str
    guard_pid: int
    trainer_pid: int
    since_s: float
    backend: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def runtime_folder() -> Path:
    """The folder for leases of this user on this host; made where absent.

    `KAREUS_PP_RUNTIME_DIR` decides; else `XDG_RUNTIME_DIR/kareus-pp`, else `/tmp/kareus-pp-UID`.

    Raises:
        GuardError: It cannot be made, or belongs to somebody else.
    """
    folder = _own_folders()[0]
    try:
        folder.mkdir(mode=0o755, parents=RUNTIME_VARIABLE in os.environ, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise GuardError(
            f"the runtime folder {str(folder)!r} cannot be made ({error.strerror})",
            f"set {RUNTIME_VARIABLE} to a folder on this host that you may write",
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise GuardError(
            f"the runtime folder {str(folder)!r} is not a folder of this user",
            f"set {RUNTIME_VARIABLE} to a folder on this host that you may write",
        )
    return folder


def known_folders() -> tuple[Path, ...]:
    """Every folder where a lease of this host may lie, those of other users included."""
    if RUNTIME_VARIABLE in os.environ:
        return tuple(path for path in _own_folders() if path.is_dir())
    others = [*Path("/tmp").glob("kareus-pp-*"), *_glob_run_user()]
    found = dict.fromkeys(path for path in (*_own_folders(), *others) if _is_lease_folder(path))
    return tuple(found)


def _own_folders() -> list[Path]:
    if chosen := os.environ.get(RUNTIME_VARIABLE):
        return [Path(chosen)]
    fallback = Path(f"/tmp/kareus-pp-{os.geteuid()}")
    session = os.environ.get("XDG_RUNTIME_DIR")
    usable = session and os.access(session, os.W_OK)
    return [Path(str(session), "kareus-pp"), fallback] if usable else [fallback]


def _glob_run_user() -> list[Path]:
    with contextlib.suppress(OSError):
        return [path / "kareus-pp" for path in Path("/run/user").iterdir()]
    return []


def _is_lease_folder(path: Path) -> bool:
    """A real folder of its user; a link in a shared /tmp is not followed."""
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(path.lstat().st_mode)
    return False


class Ownership:
    """The lock of one GPU, held until `release`; acquired at construction.

    Raises:
        OwnedError: Somebody holds it.
        GuardError: The folder cannot be written.
    """

    def __init__(self, uuid: str, folder: Path, patience_s: float = _ACQUIRE_S) -> None:
        if not _UUID.fullmatch(uuid):
            raise GuardError(f"{uuid!r} is not the UUID of a GPU", "nvidia-smi -L lists them")
        self.uuid = uuid
        self._path = folder / f"{uuid}.json"
        self._lock_path = folder / f"{uuid}.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._handle = os.open(self._lock_path, flags, 0o644)
        except OSError as error:
            raise GuardError(
                f"the lock file {str(self._lock_path)!r} cannot be opened ({error.strerror})",
                f"set {RUNTIME_VARIABLE} to a folder on this host that you may write",
            ) from None
        # A clean-up or a look from elsewhere holds the lock for a moment: have patience.
        deadline = time.monotonic() + patience_s
        while not self._try():
            if time.monotonic() > deadline:
                os.close(self._handle)
                raise _owned(uuid, read_lease(self._path))
            time.sleep(0.02)
        for other in known_folders():
            lease = read_lease(other / f"{uuid}.json")
            if other != folder and lease is not None and is_live(other / f"{uuid}.lock"):
                os.close(self._handle)
                raise _owned(uuid, lease)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def stale(self) -> Lease | None:
        """The lease that an earlier owner left behind, or None."""
        return read_lease(self._path)

    def write(self, lease: Lease) -> None:
        """Write the lease so that a reader sees the old one or the new one; raises `OSError`."""
        scratch = self._path.with_suffix(f".{os.getpid()}")
        text = json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(lease)})
        with open(scratch, "w", encoding="utf-8") as stream:
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(scratch, self._path)

    def clear(self) -> None:
        """Remove the lease: the clock is known to be at default."""
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let go of the lock; a lease that was not cleared stays, stale."""
        os.close(self._handle)


def _owned(uuid: str, lease: Lease | None) -> OwnedError:
    holder = f"process {lease.trainer_pid} (guard {lease.guard_pid})" if lease else "a process"
    return OwnedError(
        f"the clocks of GPU {uuid} belong to {holder} of another kareus-pp session",
        "give each rank a GPU of its own, or end that process",
    )


def is_live(lock_path: Path) -> bool:
    """True where somebody holds the lock."""
    try:
        handle = os.open(lock_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def read_lease(path: Path) -> Lease | None:
    """The lease in a file; None where there is none. A damaged one still names its GPU."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError:
        text = ""
    if not _UUID.fullmatch(path.stem):
        return None
    try:
        found: dict[str, Any] = json.loads(text)
        if (found.pop("format"), found.pop("version")) != (_FORMAT, _VERSION):
            raise ValueError(path)
        backend = {str(key): str(value) for key, value in found.pop("backend").items()}
        lease = Lease(**found, backend=backend)
    except (ValueError, TypeError, KeyError, AttributeError):
        return Lease(path.stem, 0, 0, 0.0, problem="the lease file is damaged")
    # The name of the file decides; what it says inside could be anything.
    return lease if lease.uuid == path.stem else None


def leases() -> Iterator[tuple[Path, Lease, bool]]:
    """Every lease on this host as (file, lease, True where its owner lives)."""
    for folder in known_folders():
        for path in sorted(folder.glob("*.json")):
            lease = read_lease(path)
            if lease is not None:
                yield path, lease, is_live(path.with_suffix(".lock"))

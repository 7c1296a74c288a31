"""`kareus-pp unlock`: reset what killed sessions left locked."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import typer

from kareus_pp.device.errors import GpuNotFoundError
from kareus_pp.device.guard_process import reset_stale
from kareus_pp.device.lease import Ownership, leases, runtime_folder
from kareus_pp.device.nvml import GpuEntry, NvmlDevice, inventory
from kareus_pp.errors import DeviceError

_PATIENCE_S = 8.0


def unlock(
    gpu: list[str] = typer.Option(
        [], "--gpu", help="Also reset this GPU (UUID or NVML index), leased or not; repeatable."
    ),
    all_gpus: bool = typer.Option(
        False, "--all", help="Also reset every GPU that no live session holds."
    ),
    force: bool = typer.Option(
        False, "--force", help="End the guards of live sessions first; their training goes on."
    ),
) -> None:
    """Return GPUs to default clocks: those of stale leases, and those that are named.

    NVML cannot read a lock back, so a GPU without a lease is reset only where it is named. Exit
    status 1 where a GPU could not be reset.
    """
    failed = False
    if force:
        _end_guards(set(_resolve(gpu)) if gpu else None)
    done: set[str] = set()
    for path, lease, live in leases():
        if live:
            typer.echo(f"{lease.uuid}: held by process {lease.trainer_pid}; left alone")
            done.add(lease.uuid)
            continue
        if os.geteuid() not in (0, path.stat().st_uid):
            typer.echo(f"{lease.uuid}: a lease of another user; root can reset it")
            continue
        try:
            reset_stale(lease, path)
            typer.echo(f"{lease.uuid}: default clocks; the lease of a killed session is removed")
            done.add(lease.uuid)
        except DeviceError as error:
            typer.echo(f"{lease.uuid}: {error}", err=True)
            failed = True
    wanted = [entry.uuid for entry in inventory() if not entry.mig] if all_gpus else _resolve(gpu)
    for uuid in wanted:
        if uuid not in done:
            failed |= not _reset(uuid)
    if not done and not wanted and not failed:
        typer.echo("no lease of a killed session on this host; name a GPU with --gpu to reset it")
    if failed:
        raise typer.Exit(1)


def _resolve(names: list[str]) -> list[str]:
    if not names:
        return []
    return [_find(inventory(), name).uuid for name in names]


def _find(gpus: tuple[GpuEntry, ...], name: str) -> GpuEntry:
    found = [gpu for gpu in gpus if name in (gpu.uuid, str(gpu.index))]
    if not found:
        raise GpuNotFoundError(
            f"no GPU is called {name!r}",
            "use one of " + ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus),
        )
    return found[0]


def _reset(uuid: str) -> bool:
    try:
        ownership = Ownership(uuid, runtime_folder())
        try:
            device = NvmlDevice(uuid)
            try:
                device.unlock_clock()
            finally:
                device.close()
        finally:
            ownership.release()
    except DeviceError as error:
        typer.echo(f"{uuid}: {error}", err=True)
        return False
    typer.echo(f"{uuid}: default clocks")
    return True


def _end_guards(only: set[str] | None) -> None:
    """A guard that is told to end resets its GPU itself; wait until it has."""
    ended = [
        (path, lease)
        for path, lease, live in leases()
        if live and lease.guard_pid and (only is None or lease.uuid in only)
    ]
    for _, lease in ended:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(lease.guard_pid, signal.SIGTERM)
            typer.echo(f"{lease.uuid}: ended the guard of process {lease.trainer_pid}")
    deadline = time.monotonic() + _PATIENCE_S
    while any(path.exists() for path, _ in ended) and time.monotonic() < deadline:
        time.sleep(0.02)

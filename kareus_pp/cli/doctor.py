"""`kareus-pp doctor`: what can be controlled and trusted on the GPUs of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from kareus_pp.config import KareusConfig, load_config, parse_config
from kareus_pp.device.guard import GuardController
from kareus_pp.device.nvml import NvmlDevice, inventory
from kareus_pp.device.preflight import Finding, preflight, try_clock
from kareus_pp.device.select import backend_of
from kareus_pp.device.visible import visible_gpus
from kareus_pp.errors import DeviceError

_MARKS = {"ok": "[green]ok[/]     ", "warning": "[yellow]warning[/]", "error": "[red]error[/]  "}


def doctor(
    device: str = typer.Option(
        "", "--device", help="nvml, zeusd or command; default: the config's."
    ),
    config: Path | None = typer.Option(None, "--config", help="Configuration file."),
    set_clock: bool = typer.Option(
        False, "--set", help="Lock each GPU at its highest clock and unlock it at once."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check the visible GPUs: driver, permission, clocks, counter, leases, other processes.

    Reads only, unless `--set` is given. Exit status 1 where a check failed.
    """
    chosen = load_config(config) if config is not None else KareusConfig()
    if device:
        chosen = parse_config({**chosen.model_dump(mode="json"), "device": device}, "--device")
    name = chosen.device if chosen.device in ("nvml", "zeusd", "command") else "nvml"
    backend = backend_of(chosen, name)
    report: dict[str, tuple[Finding, ...]] = {}
    try:
        gpus = visible_gpus(inventory(), os.environ)
    except DeviceError as error:
        report["this process"] = (Finding("GPUs", "error", error.cause, error.remedy, error),)
    else:
        report = {gpu.uuid: preflight(gpu.uuid, backend) for gpu in gpus}
        if set_clock:
            report = {uuid: (*found, _try(uuid, backend)) for uuid, found in report.items()}
        if not gpus:
            report["this process"] = (
                Finding("GPUs", "error", "no GPU is visible to this process"),
            )
    _print(report, as_json)
    if any(finding.level == "error" for found in report.values() for finding in found):
        raise typer.Exit(1)


def _try(uuid: str, backend: dict[str, str]) -> Finding:
    try:
        gpu = NvmlDevice(uuid)
        highest = gpu.supported_clocks_mhz()[-1]
        gpu.close()
        controller = GuardController(uuid, backend)
        try:
            took_s = try_clock(controller, highest)
        finally:
            controller.close()
    except DeviceError as error:
        return Finding("set a clock", "error", error.cause, error.remedy, error)
    took = "" if took_s is None else f" in {took_s * 1e3:.1f} ms"
    return Finding("set a clock", "ok", f"locked and unlocked{took}")


def _print(report: dict[str, tuple[Finding, ...]], as_json: bool) -> None:
    if as_json:
        rows: dict[str, list[dict[str, Any]]] = {
            subject: [
                {
                    "check": finding.check,
                    "level": finding.level,
                    "text": finding.text,
                    "remedy": finding.remedy,
                }
                for finding in found
            ]
            for subject, found in report.items()
        }
        typer.echo(json.dumps(rows, indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    for subject, found in report.items():
        console.print(f"[bold]{subject}[/]")
        for finding in found:
            console.print(f"  {_MARKS[finding.level]} {finding.check}: {escape(finding.text)}")
            if finding.remedy:
                console.print(f"          -> {escape(finding.remedy)}")

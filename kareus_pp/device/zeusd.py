"""Clocks through zeusd, Zeus' privileged daemon, over its unix socket; reads by NVML.

The daemon's HTTP interface is at https://ml.energy/zeus/zeusd/http_api/. It is spoken here with
the standard library, not with Zeus' client, because GPUs are matched by PCI address (the daemon's
indices are those of its own view) and that client drops the address; and because the guard process
must start fast.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from typing import Any
from urllib.parse import urlencode

from kareus_pp.device.errors import (
    DaemonError,
    GpuNotFoundError,
    NoPermissionError,
)
from kareus_pp.device.nvml import NvmlDevice

DEFAULT_SOCKET = "/run/zeusd/zeusd.sock"
SOCKET_VARIABLE = "ZEUSD_SOCK_PATH"
TOKEN_VARIABLE = "ZEUSD_TOKEN"
_TIMEOUT_S = 5.0
_REMEDY = f"start zeusd, and set {SOCKET_VARIABLE} to its socket"


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket; `host` is only what the request names."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)


class ZeusdDevice(NvmlDevice):
    """A GPU whose clock zeusd locks and unlocks.

    Args:
        uuid: As NVML reports it.
        path: The daemon's unix socket.

    Raises:
        DaemonError: The daemon does not answer, or offers no GPU control.
        DeviceError: As of `NvmlDevice`.
    """

    def __init__(self, uuid: str, path: str) -> None:
        super().__init__(uuid)
        self._socket = path
        self._connection: _UnixConnection | None = None
        try:
            self._index = self._discover()
        except BaseException:
            self.close()
            raise

    def lock_clock(self, mhz: int) -> None:
        """Ask the daemon to lock the SM clock, and wait until it has; raises `DeviceError`."""
        self._check_clock(mhz)
        self._post("/gpu/set_gpu_locked_clocks", min_clock_mhz=mhz, max_clock_mhz=mhz)

    def unlock_clock(self) -> None:
        """Ask the daemon to reset the SM clock, and wait until it has; raises `DeviceError`."""
        self._post("/gpu/reset_gpu_locked_clocks")

    def close(self) -> None:
        """Close the connection and let go of NVML; safe to call twice."""
        if self._connection is not None:
            self._connection.close()
        super().close()

    def _discover(self) -> int:
        found = self._request("GET", "/discover")
        if "gpu-control" not in found.get("enabled_api_groups", []):
            raise DaemonError(
                f"zeusd at {self._socket} does not offer GPU control",
                "start it with the API group gpu-control enabled",
            )
        gpus = found.get("gpus", [])
        wanted = _pci(self.identity.pci_bus_id)
        for gpu in gpus:
            if wanted is not None and _pci(str(gpu.get("pci_address", ""))) == wanted:
                return int(gpu["id"])
        raise GpuNotFoundError(
            f"zeusd at {self._socket} lists no GPU at PCI address {self.identity.pci_bus_id}",
            "let zeusd see all GPUs of the node (zeusd 0.5 and newer tell PCI addresses)",
        )

    def _post(self, path: str, **parameters: int) -> None:
        query = urlencode({"gpu_ids": self._index, **parameters, "block": "true"})
        self._request("POST", f"{path}?{query}")

    def _request(self, method: str, path: str) -> Any:
        """One request; an idle connection that the daemon closed is opened once more."""
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        for attempt in (0, 1):
            if self._connection is None:
                self._connection = _UnixConnection(self._socket)
            try:
                self._connection.request(method, path, headers=headers)
                answer = self._connection.getresponse()
                text = answer.read().decode(errors="replace")
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                self._connection = None
                if attempt:
                    raise DaemonError(
                        f"zeusd at {self._socket} does not answer ({error})", _REMEDY
                    ) from None
            else:
                return self._read(answer.status, path, text)
        raise AssertionError("unreachable")

    def _read(self, status: int, path: str, text: str) -> Any:
        where = path.partition("?")[0]
        if status in (401, 403):
            raise NoPermissionError(
                f"zeusd at {self._socket} refused {where} (status {status}): {text[:200]}",
                f"run zeusd as root, and set {TOKEN_VARIABLE} where it asks for a token",
            )
        if status != 200:
            raise DaemonError(
                f"zeusd at {self._socket} failed at {where} (status {status}): {text[:200]}",
                "see the daemon's log",
            )
        return json.loads(text) if text.strip() else {}


def _pci(text: str) -> tuple[int, ...] | None:
    """Domain, bus, device and function; NVML writes a longer domain than `lspci` does."""
    parts = text.replace(".", ":").split(":")
    try:
        return tuple(int(part, 16) for part in parts) if len(parts) == 4 else None
    except ValueError:
        return None

"""zeusd and site commands: the unprivileged ways to set a clock."""

from __future__ import annotations

import json
import socketserver
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
from zeus.utils.zeusd import ZeusdClient, ZeusdConfig

from kareus_pp.config import parse_config
from kareus_pp.device import errors
from kareus_pp.device.backend import open_backend
from kareus_pp.device.guard import GuardController
from kareus_pp.device.select import open_controller
from kareus_pp.device.zeusd import ZeusdDevice
from tests.device.conftest import wait_until
from tests.stub.nvml import StubMachine


class Daemon(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Speaks zeusd's HTTP interface over a unix socket and sets the stub's clocks, as root would.

    Its indices are its own: GPU 1 of the machine is its GPU 0.
    """

    daemon_threads = True

    def __init__(self, path: Path, machine: StubMachine) -> None:
        super().__init__(str(path), _Handler)
        self.machine = machine
        self.groups = ["gpu-control", "gpu-read"]
        self.status = 200
        self.token = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Daemon

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        gpus = [
            {"id": 1 - device, "name": "Stub", "pci_address": f"0000:{16 * (device + 1):02x}:00.0"}
            for device in (1, 0)
        ]
        body = {"gpus": gpus, "cpus": [], "auth_required": False}
        self.answer(200, {**body, "enabled_api_groups": self.server.groups})

    def do_POST(self) -> None:
        url = urlparse(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if self.server.token and self.headers["Authorization"] != f"Bearer {self.server.token}":
            self.answer(401, {"error": "missing token"})
            return
        if self.server.status != 200:
            self.answer(self.server.status, {"errors": {"0": "no"}})
            return
        clock = {
            "/gpu/set_gpu_locked_clocks": lambda: int(query["max_clock_mhz"]),
            "/gpu/reset_gpu_locked_clocks": lambda: 0,
        }[url.path]()
        self.server.machine.set(1 - int(query["gpu_ids"]), lock_mhz=clock)
        self.answer(200, {})


@pytest.fixture
def daemon(
    machine: StubMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Daemon]:
    machine.set(0, restricted=1)
    machine.set(1, restricted=1)
    monkeypatch.delenv("ZEUSD_TOKEN", raising=False)
    monkeypatch.setenv("ZEUSD_SOCK_PATH", str(tmp_path / "z.sock"))
    with serve(tmp_path / "z.sock", machine) as server:
        yield server


@contextmanager
def serve(path: Path, machine: StubMachine) -> Iterator[Daemon]:
    server = Daemon(path, machine)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def test_zeus_own_client_understands_the_daemon_of_these_tests(daemon: Daemon) -> None:
    """The double is only worth what the real client makes of it."""
    client = ZeusdClient(ZeusdConfig.uds(str(daemon.server_address)))
    assert client.can_control_gpu
    client.set_gpu_locked_clocks([0], 900, 900, True)
    assert daemon.machine.lock_mhz(1) == 900
    client.reset_gpu_locked_clocks([0], True)
    assert daemon.machine.lock_mhz(1) == 0


def test_zeusd_sets_the_gpu_of_the_pci_address(daemon: Daemon, machine: StubMachine) -> None:
    config = parse_config({"device": "zeusd"})
    opened = open_controller(config, stage=0, local_rank=0)
    assert opened.identity.uuid == machine.uuid(0)
    opened.controller.request(900)
    assert wait_until(lambda: opened.controller.applied().mhz == 900)
    assert (machine.lock_mhz(0), machine.lock_mhz(1)) == (900, 0)
    opened.controller.close()
    assert machine.lock_mhz(0) == 0


def test_zeusd_reconnects_after_the_daemon_restarted(
    daemon: Daemon, machine: StubMachine, tmp_path: Path
) -> None:
    device = ZeusdDevice(machine.uuid(0), str(tmp_path / "z.sock"))
    assert device._connection is not None
    assert device._connection.sock is not None
    device._connection.sock.close()
    device.lock_clock(900)
    assert machine.lock_mhz(0) == 900
    device.unlock_clock()
    device.close()


def test_zeusd_refusals_name_the_remedy(
    daemon: Daemon, machine: StubMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "z.sock")
    device = ZeusdDevice(machine.uuid(0), path)
    for status, error in ((403, errors.NoPermissionError), (500, errors.DaemonError)):
        daemon.status = status
        with pytest.raises(error, match=str(status)):
            device.lock_clock(900)
    daemon.status, daemon.token = 200, "secret"
    with pytest.raises(errors.NoPermissionError, match="ZEUSD_TOKEN"):
        device.lock_clock(900)
    monkeypatch.setenv("ZEUSD_TOKEN", "secret")
    device.lock_clock(900)
    device.close()
    daemon.groups = ["gpu-read"]
    with pytest.raises(errors.DaemonError, match="gpu-control"):
        ZeusdDevice(machine.uuid(0), path)
    with pytest.raises(errors.DaemonError, match="ZEUSD_SOCK_PATH"):
        ZeusdDevice(machine.uuid(0), str(tmp_path / "nowhere.sock"))


@pytest.fixture
def site(machine: StubMachine, tmp_path: Path) -> dict[str, str]:
    """A blessed command, privileged where this process is not, that notes how it was called."""
    machine.set(0, restricted=1)
    program = tmp_path / "site-clocks"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "if os.path.exists(sys.argv[0] + '.broken'):\n"
        "    sys.exit('site policy says no')\n"
        "os.environ['KAREUS_STUB_PRIVILEGED'] = '1'\n"
        "from kareus_pp.device.nvml import NvmlDevice\n"
        "gpu = NvmlDevice(sys.argv[2])\n"
        "gpu.lock_clock(int(sys.argv[3])) if sys.argv[1] == 'lock' else gpu.unlock_clock()\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"lock": f"{program} lock {{uuid}} {{mhz}}", "unlock": f"{program} unlock {{uuid}}"}


def test_a_site_command_sets_and_resets(
    machine: StubMachine, site: dict[str, str], tmp_path: Path
) -> None:
    config = parse_config({"device": "command", "command": site})
    opened = open_controller(config, stage=0, local_rank=0)
    opened.controller.request(900)
    assert wait_until(lambda: machine.lock_mhz(0) == 900)
    opened.controller.close()
    assert machine.lock_mhz(0) == 0
    uuid = machine.uuid(0)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"lock {uuid} 1410", f"unlock {uuid}", f"lock {uuid} 900", f"unlock {uuid}"]


def test_a_site_command_that_fails_is_quoted(
    machine: StubMachine, site: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "site-clocks.broken").touch()
    controller = GuardController(machine.uuid(0), {"device": "command", **site})
    controller.request(900)
    assert wait_until(lambda: controller.applied().error != "")
    assert "status 1: site policy says no" in controller.applied().error
    controller.close()


def test_a_template_or_program_that_cannot_work_is_told_at_once(machine: StubMachine) -> None:
    good = {"device": "command", "lock": "x {uuid} {mhz}", "unlock": "x {uuid}"}
    for changed in ({"lock": "x {mhz}"}, {"unlock": ""}, {"lock": "x '{uuid} {mhz}"}):
        with pytest.raises(errors.SiteCommandError, match=r"command\."):
            open_backend({**good, **changed}, machine.uuid(0))
    missing = {"lock": "/no/such {uuid} {mhz}", "unlock": "/no/such {uuid}"}
    with pytest.raises(errors.NoPermissionError, match="/no/such"):
        open_controller(
            parse_config({"device": "command", "command": missing}), stage=0, local_rank=0
        )
    with pytest.raises(errors.GuardError, match="not a backend"):
        open_backend({"device": "magic"}, machine.uuid(0))

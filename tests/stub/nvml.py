"""The stub NVML: compiled on demand, and the machine behind it as tests see and change it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("nvml_stub.c")
SONAME = "libnvidia-ml.so.1"

COUNTER_OK, COUNTER_STUCK, COUNTER_ABSENT = 0, 1, 2
NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST = 3, 4, 15
LOCK = "nvmlDeviceSetGpuLockedClocks"
RESET = "nvmlDeviceResetGpuLockedClocks"


class Event(NamedTuple):
    """One entry of the event ring; `at_s` is on the scale of `time.monotonic()`."""

    at_s: float
    pid: int
    device: int
    operation: str
    first: int
    second: int
    result: int


class _RawEvent(ctypes.Structure):
    _fields_ = [
        ("at_ns", ctypes.c_uint64),
        ("pid", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("result", ctypes.c_int32),
        ("first", ctypes.c_uint32),
        ("second", ctypes.c_uint32),
        ("operation", ctypes.c_char * 52),
    ]


def compiler() -> str | None:
    """The system C compiler, or None."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build() -> Path:
    """The folder that holds the compiled library; compiled once for each content of the source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"kareus-pp-stub-{os.getuid()}-{digest}"
    library = folder / SONAME
    if not library.exists():
        folder.mkdir(exist_ok=True)
        scratch = folder / f"{SONAME}.{os.getpid()}"
        program = compiler()
        if program is None:
            raise RuntimeError("no C compiler: the stub NVML cannot be built")
        flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run(
            [program, *flags, f"-Wl,-soname,{SONAME}", "-o", scratch, SOURCE, "-lm", "-lpthread"],
            check=True,
        )
        scratch.replace(library)
    return folder


class StubMachine:
    """A machine with stub GPUs, shared by every process that gets `environment()`."""

    def __init__(self, path: Path, devices: int = 2) -> None:
        self.folder = build()
        # By absolute path: the loader then answers pynvml's own CDLL(SONAME) with this library.
        self._library = ctypes.CDLL(str(self.folder / SONAME))
        self._library.stub_get.restype = ctypes.c_double
        self._path = os.fsencode(path)
        self.path = path
        self.devices = devices
        if self._library.stub_create(self._path, devices) != 0:
            raise RuntimeError(f"cannot create the stub machine {path}")

    def environment(self) -> dict[str, str]:
        """Environment variables that make a child process see this machine."""
        search = os.environ.get("LD_LIBRARY_PATH", "")
        return {
            "KAREUS_STUB_NVML": str(self.path),
            "LD_LIBRARY_PATH": f"{self.folder}:{search}" if search else str(self.folder),
        }

    def set(self, device: int, **values: float) -> None:
        """Change what the model of one GPU holds, as in `set(0, load=0.5, counter_mode=1)`."""
        for key, value in values.items():
            if self._library.stub_set(self._path, device, key.encode(), ctypes.c_double(value)):
                raise KeyError(key)

    def get(self, device: int, key: str) -> float:
        """One value of the model, as in `get(0, "lock_mhz")`."""
        return float(self._library.stub_get(self._path, device, key.encode()))

    def set_name(self, device: int, name: str) -> None:
        self._library.stub_set_text(self._path, device, b"name", name.encode())

    def set_uuid(self, device: int, uuid: str) -> None:
        self._library.stub_set_text(self._path, device, b"uuid", uuid.encode())

    def faults(self, *faults: str) -> None:
        """Replace all faults; each is `function-or-prefix*@device=result,delay_us,count`."""
        self._library.stub_set_text(self._path, 0, b"faults", ";".join(faults).encode())

    def uuid(self, device: int) -> str:
        """The UUID that the model gives a device at creation."""
        return f"GPU-{0x57AB0000 + device * 0x1111:08x}-{device:04x}-4000-8000-{device:012x}"

    def lock_mhz(self, device: int) -> int:
        """The locked clock, 0 for none: what no NVML getter tells."""
        return int(self.get(device, "lock_mhz"))

    def mark(self) -> int:
        """Number of events so far; pass it to `events`."""
        return int(self.get(0, "events"))

    def events(self, since: int = 0, operation: str = "", device: int | None = None) -> list[Event]:
        """Events from number `since` on, filtered."""
        most = 65536
        buffer = (_RawEvent * most)()
        count = self._library.stub_events(self._path, ctypes.c_uint64(since), buffer, most)
        found = [
            Event(
                raw.at_ns / 1e9,
                raw.pid,
                raw.device,
                raw.operation.decode(),
                raw.first,
                raw.second,
                raw.result,
            )
            for raw in buffer[:count]
        ]
        return [
            event
            for event in found
            if event.operation.startswith(operation) and device in (None, event.device)
        ]

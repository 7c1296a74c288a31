"""A background process that designs, learns and plans while training goes on.

The parent half. One request at a time, one JSON line each way; files carry the bulk. The process
ends with its parent. It runs at a lower priority and without torch.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from typing import Any

from kareus_pp.errors import KareusError


class BackgroundSolver:
    """Requests to `python -m kareus_pp.runtime.solver_process`; started at the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.busy = False

    def submit(self, request: str, **values: Any) -> None:
        """Send a request; `poll` returns its answer later."""
        process = self._process or self._start()
        assert process.stdin is not None
        self.busy = True
        try:
            process.stdin.write(json.dumps({"request": request, **values}) + "\n")
            process.stdin.flush()
        except OSError as error:
            raise KareusError(f"the background solver ended unexpectedly ({error})") from None

    def poll(self) -> dict[str, Any] | None:
        """The answer to the request under way; None while there is none.

        Raises:
            KareusError: The request failed, or the process died.
        """
        try:
            line = self._answers.get_nowait()
        except queue.Empty:
            return None
        self.busy = False
        if line is None:
            raise KareusError("the background solver ended unexpectedly; see its messages above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KareusError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=5.0)

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "kareus_pp.runtime.solver_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._answers.put(line)
        self._answers.put(None)

"""The guard process: sets the clocks of one GPU, and resets them however its trainer ends.

Run as a script by `guard.GuardController`, by a small interpreter without site packages; the one
argument is JSON. It leaves the trainer's process group and parentage at once (launchers kill
those), so nothing but its own end, the end of the trainer or a request stops it.
"""

from __future__ import annotations

import os
import sys


def _detach() -> None:
    """Fork again and lead a session of one's own, before anything slow is imported."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")


if __name__ == "__main__":
    _detach()
    import json

    _order = json.loads(sys.argv[1])
    sys.path.extend(_order["path"])
    from kareus_pp.device.guard_process import main

    sys.exit(main(_order))

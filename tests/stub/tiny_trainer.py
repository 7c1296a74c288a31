"""A trainer in miniature: requests a clock around each of its pretended instructions.

Started by the real launchers; what ends it is chosen by arguments. Prints one line for each step
with `--verbose`; writes what it is to `--folder/rank-N.json` once its GPU is locked.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import sys
import time
from pathlib import Path

from kareus_pp.config import KareusConfig
from kareus_pp.device.base import ClockController
from kareus_pp.device.select import open_controller
from kareus_pp.errors import DeviceError

_LOG = logging.getLogger("trainer")
CLOCKS_MHZ = (900, 1200)


def controller_of(config: KareusConfig, rank: int) -> ClockController | None:
    try:
        return open_controller(config, stage=rank, local_rank=rank).controller
    except DeviceError as error:
        _LOG.warning("kareus-pp: training goes on at default clocks: %s", error)
        return None


def die(manner: str) -> None:
    if manner == "raise":
        raise RuntimeError("a fault of the user's script")
    if manner == "sys.exit":
        sys.exit(3)
    if manner == "os._exit":
        os._exit(3)
    if manner == "segfault":
        ctypes.string_at(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--instruction-s", type=float, default=0.01)
    parser.add_argument("--device", default="nvml")
    parser.add_argument("--die", default="", help="manner, once the file `go` is there")
    parser.add_argument("--dying-rank", type=int, default=1)
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--workers", action="store_true", help="fork a child as data loaders do")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    rank = int(os.environ.get("LOCAL_RANK", max(options.local_rank, 0)))
    controller = controller_of(KareusConfig(device=options.device), rank)
    if controller is not None and options.sample:
        controller.start_sampling(0.02)
    if options.workers and os.fork() == 0:
        time.sleep(5)
        os._exit(0)
    told = False
    for step in range(options.steps):
        for mhz in CLOCKS_MHZ:
            if controller is not None:
                controller.request(mhz)
            time.sleep(options.instruction_s)
        if controller is not None and controller.applied().error and not told:
            told = True
            _LOG.warning(
                "kareus-pp: training goes on at default clocks: %s", controller.applied().error
            )
        if step == 1:
            note = {"pid": os.getpid(), "rank": rank, "controlled": controller is not None}
            scratch = options.folder / f".rank-{rank}"
            scratch.write_text(json.dumps(note))
            scratch.rename(options.folder / f"rank-{rank}.json")
        if options.die and rank == options.dying_rank and (options.folder / "go").exists():
            die(options.die)
    if controller is not None:
        controller.close()
    print("trained", options.steps, "steps", flush=True)


if __name__ == "__main__":
    main()

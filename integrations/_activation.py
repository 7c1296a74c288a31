"""What every framework door shares: the config file of the launcher, the log, the way to stop."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from kareus_pp.config import KareusConfig, parse_config, read_config_file
from kareus_pp.errors import KareusError

EXIT_STATUS = 2
_RANK_0_HEAD_START_S = 5.0
_from_file: dict[str, Any] = {}
_file_name = ""


def use_config_file(path: Path) -> None:
    """Read the config file of the launcher; its values override those of every other door.

    Raises:
        ConfigError: The file is absent or malformed, or a value is not allowed.
    """
    global _file_name
    values = read_config_file(path)
    parse_config(values, origin=f"the config file {str(path)!r}")
    _from_file.clear()
    _from_file.update(values)
    _file_name = str(path)


def effective_config(values: Any, origin: str) -> KareusConfig:
    """The configuration of a door, with the launcher's config file laid over it key by key.

    Raises:
        ConfigError: A key is unknown or a value is not allowed.
    """
    config = parse_config(values, origin)
    if not _from_file:
        return config
    return parse_config(_merged(values or {}, _from_file), f"{origin} with {_file_name!r}")


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(inner, value) if both else value  # type: ignore[arg-type]
    return merged


def rank_logger(rank: int) -> logging.Logger:
    """The logger `kareus_pp`; where the user has set up none, it writes to stderr.

    Rank 0 tells what happens, the others only what goes wrong.
    """
    logger = logging.getLogger("kareus_pp")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    return logger


def stop_for_user(error: KareusError, rank: int) -> NoReturn:
    """End the process for a user's mistake: one sentence from rank 0, no traceback.

    The launcher kills all ranks when the first one fails; the others give rank 0 time to speak.
    """
    if rank == 0:
        print(f"kareus-pp: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(_RANK_0_HEAD_START_S)
    raise SystemExit(EXIT_STATUS)

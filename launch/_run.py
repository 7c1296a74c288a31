"""The command line of the launcher, and running a script as if Python had been given it."""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

from kareus_pp.integrations._activation import stop_for_user, use_config_file
from kareus_pp.launch._doors import open_doors

from kareus_pp.errors import KareusError

USAGE = """usage: [deepspeed --module | torchrun -m | python -m] kareus_pp.launch
           [--kareus-config FILE] (SCRIPT | -m MODULE) [argument ...]

Runs an unmodified training script with kareus-pp hooked into DeepSpeed or Megatron.
FILE, YAML or JSON, overrides the `kareus` object of the DeepSpeed config key by key."""
_OWN = "--kareus-config"


class UsageError(KareusError):
    """The launcher's own command line is wrong."""


@dataclass(frozen=True)
class Command:
    """What to run.

    Attributes:
        target: Path of a script, or name of a module.
        is_module: True where `target` is the name of a module.
        arguments: Arguments of the script.
        config: The config file; None where none is named.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    config: Path | None = None


def parse_command(arguments: list[str]) -> Command:
    """Read the launcher's command line.

    The DeepSpeed launcher puts `--local_rank=N` before the script's name: it belongs to the script.

    Raises:
        UsageError: An option is unknown or has no value, or there is no script.
    """
    config: Path | None = None
    moved: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith(("--local_rank=", "--local-rank=")):
            moved.append(word)
        elif word == _OWN or word.startswith(f"{_OWN}="):
            value = word.partition("=")[2] if "=" in word else (rest.pop(0) if rest else "")
            if not value:
                raise UsageError(f"{_OWN} needs the path of a file; {_summary()}")
            config = Path(value)
        elif word == "-m":
            if not rest:
                raise UsageError(f"-m needs the name of a module; {_summary()}")
            return Command(rest[0], True, (*moved, *rest[1:]), config)
        elif word.startswith("-"):
            raise UsageError(f"unknown option {word!r} before the script's name; {_summary()}")
        else:
            return Command(word, False, (*moved, *rest), config)
    raise UsageError(f"no training script was named; {_summary()}")


def _summary() -> str:
    return " ".join(USAGE.partition("\n\n")[0].split())


def main() -> None:
    """Hook the frameworks, then run the training script as `__main__`."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(USAGE)
        return
    try:
        command = parse_command(sys.argv[1:])
        if command.config is not None:
            use_config_file(command.config)
        if not command.is_module and not Path(command.target).is_file():
            raise UsageError(f"there is no script {command.target!r}; {_summary()}")
    except KareusError as error:
        stop_for_user(error, int(os.environ.get("RANK", "0")))
    open_doors()
    if command.is_module:
        _run_module(command)
    else:
        _run_script(command)


def _present(command: Command, folder: str) -> None:
    """Show the script the arguments and the import path that Python would have given it."""
    sys.argv = [command.target, *command.arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _run_module(command: Command) -> None:
    _present(command, os.getcwd())
    runpy.run_module(command.target, run_name="__main__", alter_sys=True)


def _run_script(command: Command) -> None:
    """Run a script in the real `__main__`, so that processes it spawns find its functions."""
    path = os.path.abspath(command.target)
    with open(path, "rb") as stream:
        code = compile(stream.read(), path, "exec")
    _present(command, os.path.dirname(path))
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace.update(
        __name__="__main__",
        __file__=path,
        __spec__=None,
        __loader__=None,
        __package__=None,
        __doc__=None,
        __cached__=None,
        __builtins__=sys.modules["builtins"],
    )
    exec(code, namespace)

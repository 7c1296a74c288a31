"""`--kareus-*` among Megatron's own arguments, and the configuration that they make.

`hook_arguments` wraps `add_megatron_arguments`, which every entry point calls, so that an
unmodified `pretrain_gpt.py` accepts the flags and lists them in its `--help`. Every value is
checked while Megatron parses. An old Megatron without that function gets them taken out of
`sys.argv`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kareus_pp.integrations._activation import effective_config

from kareus_pp.config import KareusConfig, load_config, parse_config, read_config_file
from kareus_pp.errors import ConfigError
from kareus_pp.target import TARGET_HELP

ARGUMENTS_MODULE = "megatron.training.arguments"
_FLAGS = ("mode", "target", "device", "plan", "profile", "output")
_METAVARS = {"mode": "MODE", "target": "TARGET", "device": "NAME", "output": "FOLDER"}
_MORE_HELP = {"target": f": {TARGET_HELP}"}
_taken: list[argparse.Namespace] = []


def add_kareus_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--kareus-*` arguments to a parser, as Megatron's `_add_*_args` do."""
    group = parser.add_argument_group(title="kareus-pp")
    group.add_argument(
        "--kareus-config",
        type=_checked(load_config),
        default=None,
        metavar="FILE",
        help="YAML or JSON file with the configuration of kareus-pp; "
        "the other --kareus-* arguments override its values",
    )
    for name in _FLAGS:
        field = KareusConfig.model_fields[name]
        group.add_argument(
            f"--kareus-{name}",
            type=_checked(functools.partial(_check_value, name)),
            default=None,
            metavar=_METAVARS.get(name, "FILE"),
            help=(
                f"{field.description}{_MORE_HELP.get(name, '')} (default: {field.default})"
            ).replace("%", "%%"),
        )
    return parser


def _check_value(name: str, text: str) -> KareusConfig:
    return parse_config({name: text}, "the command line")


def _checked(check: Callable[[str], Any]) -> Callable[[str], str]:
    """A type for argparse: the text as it is, once `check` has accepted it."""

    def accept(text: str) -> str:
        try:
            check(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return accept


def hook_arguments(module: ModuleType) -> None:
    """Have the module `megatron.training.arguments` take the `--kareus-*` arguments."""
    original = getattr(module, "add_megatron_arguments", None)
    if original is None:
        _take_from_command_line()
        return
    if getattr(original, "_kareus", False):
        return

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_kareus_arguments(original(parser))

    add_megatron_arguments._kareus = True  # type: ignore[attr-defined]
    module.add_megatron_arguments = add_megatron_arguments  # type: ignore[attr-defined]


def _take_from_command_line() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    found, sys.argv[1:] = add_kareus_arguments(parser).parse_known_args()
    _taken[:] = [found]


def config_of_arguments() -> KareusConfig:
    """The configuration from Megatron's arguments, with the launcher's config file laid over it.

    Raises:
        ConfigError: A file has changed since the arguments were parsed.
    """
    arguments = _taken[0] if _taken else _megatron_arguments()
    name = getattr(arguments, "kareus_config", None)
    values: dict[str, Any] = dict(read_config_file(name)) if name is not None else {}
    for key in _FLAGS:
        text = getattr(arguments, f"kareus_{key}", None)
        if text is not None:
            values[key] = text
    return effective_config(values, "the --kareus-* arguments")


def _megatron_arguments() -> Any:
    """Megatron's parsed arguments; None where Megatron's training package is not in use."""
    variables = sys.modules.get("megatron.training.global_vars")
    return getattr(variables, "_GLOBAL_ARGS", None)

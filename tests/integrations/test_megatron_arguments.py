"""`--kareus-*` among Megatron's arguments, and energy in its log."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kareus_pp.integrations import megatron, megatron_arguments, megatron_training


@pytest.fixture
def arguments_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module as `megatron.training.arguments`."""
    monkeypatch.setattr(megatron_arguments, "_taken", [])
    module = ModuleType("megatron.training.arguments")

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--num-layers", type=int)
        return parser

    module.add_megatron_arguments = add_megatron_arguments  # type: ignore[attr-defined]
    return module


def parse(module: Any, *line: str) -> argparse.Namespace:
    parser: argparse.ArgumentParser = module.add_megatron_arguments(argparse.ArgumentParser())
    return parser.parse_args(line)


def configured(monkeypatch: pytest.MonkeyPatch, arguments: Any) -> Any:
    variables = SimpleNamespace(_GLOBAL_ARGS=arguments)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
    return megatron_arguments.config_of_arguments()


def test_flags_override_the_file(
    arguments_module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kareus.yaml"
    file.write_text("target: edp\nmode: observe\nprofiling:\n  plans: 3\n")
    megatron_arguments.hook_arguments(arguments_module)
    megatron_arguments.hook_arguments(arguments_module)
    line = ("--num-layers", "2", "--kareus-config", str(file), "--kareus-target", "slowdown:5")
    config = configured(monkeypatch, parse(arguments_module, *line))
    assert (config.target, config.mode, config.profiling.plans) == ("slowdown:5", "observe", 3)


def test_without_flags_the_defaults_hold(
    arguments_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron_arguments.hook_arguments(arguments_module)
    assert configured(monkeypatch, parse(arguments_module)).mode == "auto"
    assert configured(monkeypatch, None).mode == "auto"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--kareus-target", "slowdwn:5"], "unknown target 'slowdwn:5'"),
        (["--kareus-mode", "applay"], "mode = 'applay'"),
        (["--kareus-config", "absent.yaml"], "cannot read the config file 'absent.yaml'"),
    ],
)
def test_a_wrong_value_ends_the_parsing_in_one_sentence(
    arguments_module: ModuleType,
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    message: str,
) -> None:
    megatron_arguments.hook_arguments(arguments_module)
    with pytest.raises(SystemExit):
        parse(arguments_module, *line)
    assert message in capsys.readouterr().err


def test_help_lists_every_flag(arguments_module: ModuleType) -> None:
    megatron_arguments.hook_arguments(arguments_module)
    parser = arguments_module.add_megatron_arguments(argparse.ArgumentParser())
    text = parser.format_help()
    flags = ("config", "mode", "target", "device", "plan", "profile", "output")
    assert all(f"--kareus-{name} " in text for name in flags)


def test_a_megatron_without_the_function_gets_its_command_line_cleaned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(megatron_arguments, "_taken", [])
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1", "--kareus-mode", "observe", "x"])
    megatron_arguments.hook_arguments(ModuleType("megatron.training.arguments"))
    assert sys.argv == ["train.py", "--lr", "1", "x"]
    assert megatron_arguments.config_of_arguments().mode == "observe"


def test_the_log_shows_energy_where_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    scalars: list[tuple[str, float, int]] = []
    module = ModuleType("megatron.training.training")

    def training_log(loss: float, iteration: int) -> None:
        module.print_rank_last(f" iteration {iteration} | elapsed time per iteration (ms): 1.0 |")

    module.print_rank_last = printed.append  # type: ignore[attr-defined]
    module.training_log = training_log  # type: ignore[attr-defined]
    module.get_tensorboard_writer = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        add_scalar=lambda *scalar: scalars.append(scalar)
    )
    read = [(0.0, 0), (300.0, 3), (300.0, 3), (420.0, 4)]
    session = SimpleNamespace(energy_read=lambda: read.pop(0))
    monkeypatch.setattr(megatron_training, "session", lambda: session)
    megatron_training.hook_training(module)
    try:
        for iteration in range(4):
            module.training_log(0.5, iteration)
        module.print_rank_last("done")
    finally:
        megatron.detach()
    found = [line.partition("energy per GPU per iteration (J): ")[2] for line in printed]
    assert found == ["", "100.0 |", "", "120.0 |", ""]
    assert [(value, iteration) for _, value, iteration in scalars] == [(100.0, 1), (120.0, 3)]

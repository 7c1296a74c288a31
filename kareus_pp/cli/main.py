"""Entry point of `kareus-pp`: registers the commands and turns user errors into one sentence."""

from __future__ import annotations

import sys

import typer

from kareus_pp import __version__
from kareus_pp.cli import plan, simulate
from kareus_pp.cli.doctor import doctor
from kareus_pp.cli.learn import learn_command
from kareus_pp.cli.unlock import unlock
from kareus_pp.errors import KareusError

app = typer.Typer(
    name="kareus-pp",
    help="Energy-aware pipeline-parallel training: plan, learn, simulate and inspect.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kareus-pp {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and exit.",
        callback=_print_version,
        is_eager=True,
    ),
) -> None:
    """Energy-aware pipeline-parallel training: plan, learn, simulate and inspect."""


app.command("learn")(learn_command)
app.command()(doctor)
app.command()(unlock)
app.command()(plan.plan)
app.command()(simulate.simulate)


def main() -> None:
    """Run the command line; a `KareusError` becomes one line on stderr and exit status 2."""
    try:
        app()
    except KareusError as error:
        print(f"kareus-pp: {error}", file=sys.stderr)
        sys.exit(2)

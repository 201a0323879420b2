"""The `ditto` command: one thin file for each subcommand."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from ditto_core.errors import DittoError
from ditto_core.visible import visible

COMMANDS = (
    *("init", "sites", "build", "align", "run", "compare", "localize", "report", "inspect", "fuzz", "answers"),
    *("calibrate", "doctor", "docs"),
)
INTERRUPTED = 130
GROUPS = ("debug", "gate", "cache")
HELP = "Does an inference engine still compute what the model computes? Build it with extra outputs, step it, compare."


def application() -> typer.Typer:
    """Put the subcommands together."""
    app = typer.Typer(
        name="ditto",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # it would take what stands in brackets, [default: …], for markup
        help=HELP,
    )

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        """Take the options that come before a subcommand."""

    for name in COMMANDS:
        app.command(name)(importlib.import_module(f"ditto_core.cli.{name}").command)
    for name in GROUPS:
        app.add_typer(importlib.import_module(f"ditto_core.cli.{name}").app, name=name)
    return app


def show_version(wanted: bool) -> None:
    """Print the version and end, where it is ``wanted``."""
    if wanted:
        print(f"pytest-ditto-engine {metadata.version('pytest-ditto-engine')}")
        raise typer.Exit


def main() -> None:
    """Run the command line. An error of ours, or of a file, is one line on stderr and exit code 2; Ctrl-C is 130."""
    # One thread: torch's default of one a core is many times slower when anything else runs on the machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    atexit.register(gc.freeze)  # else Python looks through all of torch's objects before it ends: 2 s
    try:
        application()()
    except DittoError as error:
        print(f"ditto: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(
            visible(f"ditto: {error.strerror or error}{f': {error.filename}' * bool(error.filename)}"), file=sys.stderr
        )
        sys.exit(2)
    except (KeyboardInterrupt, SystemExit) as end:  # Typer makes an exit of Ctrl-C, without a word
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:
            raise
        print("ditto: interrupted; what was finished is kept, and the same command goes on", file=sys.stderr)
        sys.exit(INTERRUPTED)

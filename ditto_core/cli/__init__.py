"""The `ditto` command: one file a subcommand."""

from __future__ import annotations

import sys

from ditto_core.errors import DittoError


def main() -> None:
    """Run the command line. An error of ours is one line on stderr and exit code 2."""
    import typer

    from ditto_core.cli import cache

    app = typer.Typer(name="ditto", no_args_is_help=True, add_completion=False, help=__doc__)
    app.callback()(lambda: None)
    app.add_typer(cache.app, name="cache")
    try:
        app()
    except DittoError as error:
        print(f"ditto: {error}", file=sys.stderr)
        sys.exit(2)

"""The ``ditto`` command in this process, without the seconds in which a process imports torch."""

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from ditto_core.cli import main


def ditto(*arguments: object, columns: int = 200, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command with these environment variables; return its exit code and what it prints, as a process's."""
    words = ["ditto", *map(str, arguments)]
    out, err, code = io.StringIO(), io.StringIO(), 0
    environment = {"COLUMNS": str(columns), **variables}
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

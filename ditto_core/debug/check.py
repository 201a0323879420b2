"""One check of one iteration: a command whose exit status or output says good or bad, as Polygraphy's users know it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any, Protocol

from ditto_core.errors import UsageError

TAIL_LINES = 12
PLACE = "{}"
"""Where the value goes in a command that judges several."""


@dataclass(frozen=True)
class Verdict:
    """What an iteration came to. ``reason`` is one line; ``seconds`` is wall time; ``facts`` is JSON-ready."""

    good: bool
    reason: str = ""
    returncode: int | None = None
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def word(self) -> str:
        """``good`` or ``bad``: also the name of the artifacts' folder."""
        return "good" if self.good else "bad"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {**self.__dict__, "facts": dict(self.facts)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """Inverse of :meth:`to_json`."""
        return cls(**data)


class Check(Protocol):
    """Judges an iteration: a command, or a person."""

    def run(self, environment: Mapping[str, str] | None = None, what: str = "") -> tuple[Verdict, str]:
        """Judge what is there now, ``what`` in words; return the verdict, and an output that was not shown yet."""
        ...

    def about(self, value: str) -> Check:
        """Return the check of one of several values. Raises :class:`UsageError` when it has no place for it."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return what decides the verdicts, for the fingerprint of a search."""
        ...


@dataclass(frozen=True)
class CommandCheck:
    """A command, and what counts as its failure; the rules are those of ``polygraphy debug``.

    - Nothing given: any exit status but 0 fails. ``fail_codes``: these fail, every other passes.
    - ``ignore_fail_codes``: these pass, regardless of the other options.
    - ``fail_regex``: the iteration fails only when one matches in stdout or stderr (and, with ``fail_codes``, the
      status is one of them too); a match fails even at status 0.
    """

    command: tuple[str, ...]
    fail_codes: tuple[int, ...] = ()
    ignore_fail_codes: tuple[int, ...] = ()
    fail_regex: tuple[str, ...] = ()
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("--check got no command")
        if self.fail_codes and self.ignore_fail_codes:
            raise UsageError("--fail-code and --ignore-fail-code exclude each other, expected one of them")
        for pattern in self.fail_regex:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(f"--fail-regex {pattern!r} is not a regular expression: {error}") from error

    def run(self, environment: Mapping[str, str] | None = None, what: str = "") -> tuple[Verdict, str]:
        """Run the command once; return the verdict and everything it printed.

        A command that cannot be started raises :class:`UsageError`: that is a mistake, and no failing model. One that
        runs longer than ``timeout`` seconds fails; it and what it started are killed then, and on Ctrl-C.
        """
        start = time.perf_counter()
        with tempfile.TemporaryFile() as printed:  # a pipe would stay open in what the command leaves running
            child = self._start(printed, environment or {})
            late = False
            with child:
                try:
                    child.wait(self.timeout)
                except subprocess.TimeoutExpired:
                    late = True
                finally:
                    kill_group(child)
            printed.seek(0)
            output = printed.read().decode(errors="replace")
        if late:
            good, reason = False, f"still running after {self.timeout:g} s, killed"
        else:
            good, reason = self.judge(child.returncode, output)
        return Verdict(good, reason, child.returncode, elapsed(start)), output

    def _start(self, output: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"the check {self.command[0]!r} cannot be started: {error.strerror}") from error

    def judge(self, code: int, output: str) -> tuple[bool, str]:
        """Return whether a status and an output are good, and why in one line."""
        if code in self.ignore_fail_codes:
            return True, f"exit status {code} is ignored"
        found = next((m for p in self.fail_regex if (m := re.search(p, output))), None)
        matched = f"output matches {found.re.pattern!r}" if found else "no --fail-regex matches"
        if self.fail_codes:
            failed = code in self.fail_codes and (found is not None or not self.fail_regex)
            return not failed, f"exit status {code}" + (f", {matched}" if self.fail_regex else "")
        if self.fail_regex:
            return found is None, f"exit status {code}, {matched}"
        return code == 0, f"exit status {code}"

    def about(self, value: str) -> CommandCheck:
        """Put a value into its place in the command. Raises :class:`UsageError` where there is none."""
        if not any(PLACE in word for word in self.command):
            raise UsageError("give --check COMMAND with {} where the value goes, such as 'pytest --ditto-backend {}'")
        return replace(self, command=tuple(word.replace(PLACE, value) for word in self.command))

    def to_json(self) -> dict[str, Any]:
        """Return what decides the verdicts, for the fingerprint of a search."""
        return dict(self.__dict__)


def elapsed(start: float) -> float:
    """Return the seconds since ``start``, to the millisecond."""
    return round(time.perf_counter() - start, 3)


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """End a child and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def tail(output: str, lines: int = TAIL_LINES) -> str:
    """Return the last lines of an output, each behind a bar."""
    return "".join(f"\n  | {line}" for line in output.splitlines()[-lines:])


def parse_command(words: Sequence[str]) -> tuple[str, ...]:
    """Split a check that came as one string (``"polygraphy run x.onnx"``); words that came apart stay as they are."""
    import shlex

    if len(words) != 1:
        return tuple(words)
    try:
        return tuple(shlex.split(words[0]))
    except ValueError as error:
        raise UsageError(f"--check {words[0]!r} cannot be split into words: {error}") from error

"""A check by a person: for what only the eye can judge, or only a hand can try."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ditto_core.debug.check import CommandCheck, Verdict, elapsed
from ditto_core.errors import UsageError

SKIPPED = 125
"""The status of what a person cannot judge; that of git bisect, too."""
ANSWERS = {"g": True, "p": True, "b": False, "f": False}
"""The first letters of good and bad, and of Polygraphy's pass and fail."""


@dataclass(frozen=True)
class PersonCheck:
    """Asks on the terminal whether an iteration is good or bad, after the ``command``, if any, has run.

    ``subject`` is what to look at. Where ``skips`` is set a person may also answer that it cannot be judged.
    """

    command: CommandCheck | None = None
    subject: str = ""
    skips: bool = False

    def run(self, environment: Mapping[str, str] | None = None, what: str = "") -> tuple[Verdict, str]:
        """Show the output of the command in full and ask. Raises :class:`UsageError` when nobody answers."""
        start = time.perf_counter()
        if self.command is not None:
            verdict, output = self.command.run(environment)
            sys.stderr.write(f"{output.rstrip()}\n{verdict.reason}\n".lstrip())
        good = self.ask(f"Is {self.subject or 'this iteration'} good?{f' ({what})' if what else ''}")
        if good is None:
            return Verdict(False, "you cannot tell", SKIPPED, elapsed(start)), ""
        return Verdict(good, f"you say {'good' if good else 'bad'}", None, elapsed(start)), ""

    def ask(self, question: str) -> bool | None:
        """Ask until the answer is one; None: it cannot be judged."""
        choices = "[g]ood, [b]ad" + (", [s]kip" if self.skips else "")
        while True:
            sys.stderr.write(f"{question} {choices}: ")
            sys.stderr.flush()
            line = sys.stdin.readline()
            if not line:
                raise UsageError("--interactive asks on the terminal, and its input is at the end: answer good or bad")
            answer = line.strip().lower()[:1]
            if answer in ANSWERS:
                return ANSWERS[answer]
            if answer == "s" and self.skips:
                return None

    def about(self, value: str) -> PersonCheck:
        """Return the question about one of several values."""
        return replace(self, command=self.command and self.command.about(value), subject=value)

    def to_json(self) -> dict[str, Any]:
        """Return what decides the verdicts, for the fingerprint of a search."""
        return {"person": True, "command": self.command and self.command.to_json()}

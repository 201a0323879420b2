"""The first of a row of versions, commits or flags with which a command fails."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ditto_core.debug.check import Check, Verdict
from ditto_core.debug.iterations import IterationOptions, Iterations, Say
from ditto_core.errors import UsageError
from ditto_core.system.fingerprint import fingerprint

SKIP = (125,)
"""Exit statuses that say that a value cannot be judged; git bisect has the same."""


@dataclass(frozen=True)
class Found:
    """``good`` is the last value that passes, ``bad`` the first that fails; ``unjudged`` are values between them."""

    good: str
    bad: str
    unjudged: tuple[str, ...]
    judged: int
    seconds: float

    @property
    def summary(self) -> str:
        """The result in one line."""
        between = f"; between them, not judged: {', '.join(self.unjudged)}" if self.unjudged else ""
        counts = f"{self.judged} checks, {self.seconds:.1f} s"
        return f"first bad: {self.bad}, last good: {self.good} ({counts}){between}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


def bisect(values: Sequence[str], options: IterationOptions, say: Say, skip: Collection[int] = SKIP) -> Found:
    """Find where a check, in whose command ``{}`` is the value, begins to fail in a row of values.

    A value whose check ends with a status of ``skip`` is not judged, and its neighbours are asked. Raises
    :class:`UsageError` where the first value fails or the last passes, and for a check without ``{}``.
    """
    check = options.check
    if check is None:
        raise UsageError("give --check COMMAND with {} where the value goes, or --interactive to judge by yourself")
    if len(set(values)) < max(2, len(values)):
        raise UsageError(f"there are {len(set(values))} different values of {len(values)}, expected two or more")
    check.about(values[0])
    with Iterations(options, fingerprint("bisect", check.to_json()), say) as iterations:
        return Search(values, check, iterations, skip).run()


class Search:
    """One bisection: the values, and what each was found to be (None: not judged)."""

    def __init__(self, values: Sequence[str], check: Check, iterations: Iterations, skip: Collection[int]) -> None:
        self.values, self.check, self.iterations, self.skip = values, check, iterations, skip
        self.known: dict[int, bool | None] = {}

    def run(self) -> Found:
        """Ask both ends, then the middle of what is left."""
        low, high = 0, len(self.values) - 1
        for at, wanted, word in ((low, True, "first"), (high, False, "last")):
            if self.passes(at) is not wanted:
                state = {True: "passes", False: "fails", None: "cannot be judged"}[self.known[at]]
                due = "pass" if wanted else "fail"
                raise self.iterations.pointless(
                    f"the {word} value, {self.values[at]}, {state}: the check must {due} with it"
                )
        while left := [i for i in range(low + 1, high) if i not in self.known]:
            middle = min(left, key=lambda i: abs(2 * i - low - high))
            passed = self.passes(middle)
            low, high = (middle if passed else low), (middle if passed is False else high)
        between = tuple(self.values[low + 1 : high])
        seconds = round(self.iterations.seconds, 3)
        return Found(self.values[low], self.values[high], between, self.iterations.judged, seconds)

    def passes(self, at: int) -> bool | None:
        """Judge one value; None where it cannot be."""
        value = self.values[at]
        verdict = self.iterations.run(value, lambda: self.judge(value), value, {"value": value})
        self.known[at] = None if verdict.returncode in self.skip else verdict.good
        return self.known[at]

    def judge(self, value: str) -> Verdict:
        """Run the check with a value."""
        verdict = self.iterations.judge(self.check.about(value), {"DITTO_VALUE": value})
        skipped = verdict.returncode in self.skip
        return replace(verdict, reason=f"{verdict.reason}, not judged") if skipped else verdict

"""`ditto debug build` and `ditto debug repeat`: the same thing many times, good and bad sorted, and how they spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ditto_core.debug.builds import Builder, sign_tactics, tactics_file
from ditto_core.debug.check import Check, Verdict
from ditto_core.debug.iterations import IterationOptions, Iterations, Made, Say, Until
from ditto_core.debug.oracle import digest, distance, model_digest
from ditto_core.errors import UsageError
from ditto_core.graphs.graph import Arrays, Graph
from ditto_core.system.fingerprint import fingerprint, hash_file

FIRST_OUTPUTS = "first_outputs.npz"


@dataclass(frozen=True)
class Tally:
    """How a loop ended: verdicts in order, and for builds how far they are from each other.

    ``spread``: largest rel-L2 between the outputs of any build and those of the first, by output name; empty where
    nothing was run. ``distinct``: number of engine files with different bytes (0 when none was built).
    """

    verdicts: tuple[Verdict, ...]
    spread: Mapping[str, float] = field(default_factory=dict)
    distinct: int = 0

    @property
    def good(self) -> int:
        """Number of good iterations."""
        return sum(v.good for v in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "iterations": len(self.verdicts),
            "good": self.good,
            "bad": len(self.verdicts) - self.good,
            "seconds": self.seconds(),
            "spread": {name: str(value) for name, value in self.spread.items()},
            "distinct": self.distinct,
            "verdicts": [v.to_json() for v in self.verdicts],
        }

    def seconds(self) -> dict[str, float]:
        """Return the least, median and most seconds of an iteration."""
        times = [v.seconds for v in self.verdicts]
        return {"min": min(times), "median": statistics.median(times), "max": max(times)}

    def summary(self) -> str:
        """Return one line for people."""
        times = self.seconds()
        text = f"{self.good} good, {len(self.verdicts) - self.good} bad of {len(self.verdicts)}"
        text += f"; {times['min']:.2f} to {times['max']:.2f} s, median {times['median']:.2f} s"
        if self.distinct:
            text += f"; {self.distinct} different engine files"
        if self.spread:
            worst = max(self.spread, key=lambda name: self.spread[name])
            text += f"; spread between builds: rel_l2 {self.spread[worst]:.1e} at {worst}"
        return text


def repeat(check: Check, until: Until, iteration: IterationOptions, say: Say) -> Tally:
    """Run a check until it was good or bad, or a number of times, and sort the artifacts that it writes."""
    options = replace(iteration, check=check)
    with Iterations(options, fingerprint("repeat", check.to_json()), say) as iterations:
        return Tally(loop(iterations, until, lambda index: {}, "repeat"))


def loop(iterations: Iterations, until: Until, make: Callable[[int], Made], what: str) -> tuple[Verdict, ...]:
    """Run numbered iterations until the end is reached."""
    verdicts: list[Verdict] = []
    while not verdicts or not until.reached(len(verdicts), verdicts[-1]):
        index = len(verdicts)
        verdicts.append(iterations.run(str(index), partial(make, index), what))
    return tuple(verdicts)


@dataclass(frozen=True)
class BuildLoop:
    """Builds one model many times. Without a check command each build's outputs are compared with ``expected``."""

    model: Path
    builder: Builder
    feed: Arrays
    expected: Arrays
    tolerance: float
    iteration: IterationOptions

    def run(self, until: Until, say: Say) -> Tally:
        """Build until the end is reached. Engines and tactics are sorted into good and bad.

        Raises :class:`UsageError` when nothing could judge a build.
        """
        if self.iteration.check is None and not (self.feed and self.expected):
            raise UsageError("nothing judges the builds: give --check, --interactive, or --inputs with a reference")
        path = self.path
        tactics = tactics_file(path)
        artifacts = (path, tactics, *self.iteration.artifacts)
        options = replace(self.iteration, iter_artifact=path, artifacts=artifacts)
        with Iterations(options, search := self.identity(), say, (tactics,)) as iterations:
            verdicts = loop(iterations, until, partial(self.build, search), f"{self.builder.name} build")
        (self.iteration.art_dir / FIRST_OUTPUTS).unlink(missing_ok=True)
        return Tally(verdicts, spread(verdicts), len({v.facts["digest"] for v in verdicts if "digest" in v.facts}))

    @property
    def path(self) -> Path:
        """The file that each build writes."""
        return self.iteration.iter_artifact or Path(f"polygraphy_debug{self.builder.suffix}")

    def build(self, search: str, index: int) -> Made:
        """Build once and judge it."""
        values = self.builder.build(self.path, self.feed, tuple(Graph.load(self.model).outputs))
        sign_tactics(self.path, search)
        facts: dict[str, Any] = {"digest": hash_file(self.path)}
        if values is not None:
            facts["from_first"] = self._from_first(index, values)
        if self.iteration.check is not None:
            return facts
        if values is None:
            raise UsageError(f"the {self.builder.name} engine cannot run here: give --check COMMAND or --interactive")
        errors = {name: distance(values[name], self.expected[name]) for name in self.expected if name in values}
        if not errors:
            raise UsageError(f"no output of the engine is among the expected: {', '.join(self.expected)}")
        worst = max(errors, key=lambda name: errors[name])
        good = errors[worst] <= self.tolerance
        reason = f"rel_l2 {errors[worst]:.1e} {'<=' if good else '>'} {self.tolerance:.1e} at {worst}"
        return Verdict(good, reason, facts={**facts, "errors": {n: str(e) for n, e in errors.items()}})

    def identity(self) -> str:
        """Return the fingerprint of everything that decides the verdicts."""
        check = self.iteration.check
        feed, good = ({name: digest(array) for name, array in sorted(v.items())} for v in (self.feed, self.expected))
        how = check.to_json() if check else [self.tolerance, good]
        return fingerprint("build", model_digest(self.model), self.builder.name, vars(self.builder), feed, how)

    def _from_first(self, index: int, values: Arrays) -> dict[str, str]:
        path = self.iteration.art_dir / FIRST_OUTPUTS
        if index == 0 or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, *values.values())
        with np.load(path, allow_pickle=False) as first:
            return {name: str(distance(v, first[f"arr_{i}"])) for i, (name, v) in enumerate(values.items())}


def spread(verdicts: tuple[Verdict, ...]) -> dict[str, float]:
    """Return the largest distance of any build's outputs from the first build's."""
    found: dict[str, float] = {}
    for verdict in verdicts:
        for name, value in verdict.facts.get("from_first", {}).items():
            found[name] = max(found.get(name, 0.0), float(value))
    return found

"""Search for the prompt at which an engine diverges, and shrink it. What was learned stays in a corpus on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from ditto_core.compare.tolerance import Tolerance
from ditto_core.errors import BackendError, UsageError
from ditto_core.stepping.lockstep import lockstep
from ditto_core.stepping.sides import Sides
from ditto_core.system.atomic import write_atomic
from ditto_core.system.files import parse_json, read_text
from ditto_core.system.threads import torch_threads

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.pair.pair import Pair

ROUND = 50
"""Prompts between two writes of the corpus."""

HARDEST = 20
"""Prompts with the largest margins, kept in the corpus and tried first in each run."""

STATE_FILE, FAILURE_FILE, EXAMPLES = "fuzz.json", "failure.json", "examples"

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Limits:
    """What is tried: up to ``rows`` prompts of up to ``length`` tokens, then ``steps`` steps in all."""

    rows: int = 2
    length: int = 32
    steps: int = 3


@dataclass(frozen=True)
class Failure:
    """A batch for which the engine diverges: ``shrunk`` when nothing smaller was found to."""

    rows: Rows
    steps: int
    message: str
    shrunk: bool = False


@dataclass
class State:
    """What a corpus remembers of a search: rounds that are through, prompts tried, the closest calls by margin."""

    seed: int
    rounds: int = 0
    tried: int = 0
    hardest: list[tuple[float, Rows]] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """How a search ended: the failure if any, prompts tried in this run, and the largest margin seen."""

    failure: Failure | None
    tried: int
    margin: float


class Corpus:
    """A directory that belongs to one model and engine: state, the failure in hand, and hypothesis's own examples."""

    def __init__(self, directory: Path, seed: int, identity: str) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        data = read(directory / STATE_FILE, ("identity", "seed", "rounds", "tried", "hardest"))
        if data is not None and data.get("identity") != identity:
            theirs = data.get("identity")
            raise UsageError(f"corpus {directory} belongs to {theirs}, not to {identity}; choose another --corpus")
        self._identity = identity
        self.state = State(seed)
        if data is not None and data["seed"] == seed:
            self.state.rounds = data["rounds"]
        if data is not None:
            self.state.tried = data["tried"]
            self.state.hardest = [(margin, as_rows(rows)) for margin, rows in data["hardest"]]

    @property
    def failure(self) -> Failure | None:
        """The failure that an earlier run has left."""
        data = read(self.directory / FAILURE_FILE, ("rows", "steps", "message", "shrunk"))
        return None if data is None else Failure(**{**data, "rows": as_rows(data["rows"])})

    @failure.setter
    def failure(self, found: Failure | None) -> None:
        if found is None:
            (self.directory / FAILURE_FILE).unlink(missing_ok=True)
        else:
            write(self.directory / FAILURE_FILE, dict(found.__dict__))

    def note(self, rows: Rows, margin: float) -> None:
        """Count a prompt, and keep it when it came closer to its bound than others."""
        self.state.tried += 1
        others = [(m, r) for m, r in self.state.hardest if r != rows]
        self.state.hardest = sorted([*others, (margin, rows)], reverse=True)[:HARDEST]

    def save(self) -> None:
        """Write the state."""
        write(self.directory / STATE_FILE, {"identity": self._identity, **self.state.__dict__})


class Fuzzer:
    """One search. ``on_prompt(tried, margin)`` is called after each prompt."""

    def __init__(
        self, pair: Pair, corpus: Corpus, limits: Limits, on_prompt: Callable[[int, float], None] | None = None
    ) -> None:
        self._pair = pair
        self._corpus = corpus
        self._limits = limits
        self._on_prompt = on_prompt or (lambda tried, margin: None)
        self._verdicts: dict[Rows, bool] = {}
        self._stop = float("inf")
        self._tried = 0
        self._margin = 0.0

    def search(self, seconds: float) -> Outcome:
        """Try what the corpus holds, then new prompts until ``seconds`` are over or one is found and shrunk.

        The time begins when both sides are built and open. Raises :class:`UsageError` when it allows no prompt.
        """
        sides(self._pair)
        self._stop = time.monotonic() + seconds
        try:
            found = self._known() or self._new()
        finally:
            self._corpus.save()
        if not self._tried:
            raise UsageError(f"no batch was tried in {seconds:g} s: nothing is known of this engine; give it more time")
        return Outcome(found, self._tried, self._margin)

    def _known(self) -> Failure | None:
        """Run the failure in hand and the closest calls of earlier runs."""
        left = self._corpus.failure
        if left is not None:
            if self.fails(left.rows):
                now = self._corpus.failure
                return now if now and now.shrunk else self._shrink(0)
            self._corpus.failure = None  # it was repaired since
        for _, rows in self._corpus.state.hardest.copy():
            if not self._over() and self.fails(rows):
                return self._shrink(0)
        return None

    def _new(self) -> Failure | None:
        while not self._over():
            found = self._shrink(ROUND)
            self._corpus.state.rounds += 1
            self._corpus.save()
            if found is not None:
                return found
        return None

    def _shrink(self, prompts: int) -> Failure | None:
        """Let hypothesis try ``prompts`` new prompts and shrink what fails; 0: only shrink the failure in hand."""
        from hypothesis import HealthCheck, Phase, find, settings
        from hypothesis.database import DirectoryBasedExampleDatabase
        from hypothesis.errors import NoSuchExample

        from ditto_core.strategies import token_batches

        limits, state = self._limits, self._corpus.state
        batches = token_batches(self._pair.vocab_size, max_rows=limits.rows, max_length=limits.length)
        rules = settings(
            max_examples=prompts or ROUND,
            deadline=None,
            database=DirectoryBasedExampleDatabase(self._corpus.directory / EXAMPLES),
            suppress_health_check=list(HealthCheck),
            phases=(Phase.reuse, Phase.generate, Phase.target, Phase.shrink),
        )
        random = Random(f"{state.seed}/{state.rounds}")
        in_hand = self._corpus.failure
        try:
            find(batches, lambda rows: self.fails(as_rows(rows)), settings=rules, random=random, database_key=b"fuzz")
        except NoSuchExample:
            if in_hand is None:
                return None
        smallest = self._corpus.failure
        assert smallest is not None
        done = replace(smallest, shrunk=not self._over())
        self._corpus.failure = done
        return done

    def fails(self, rows: Rows) -> bool:
        """Tell whether the engine diverges for a batch; after the deadline no new batch is run."""
        if rows not in self._verdicts:
            if self._over():
                return False
            self._verdicts[rows] = self._run(rows)
        return self._verdicts[rows]

    def _run(self, rows: Rows) -> bool:
        comparison = compare(self._pair, rows, self._limits.steps)
        margin = comparison.worst.verdict.margin if comparison.worst else 0.0
        failed = not comparison or any(token.flips for token in comparison.tokens)
        self._tried += 1
        self._margin = max(self._margin, margin)
        self._on_prompt(self._tried, margin)
        if not failed:
            self._corpus.note(rows, margin)
            return False
        best, found = self._corpus.failure, Failure(rows, self._limits.steps, message(comparison))
        smaller = best is None or order(rows) < order(best.rows)
        if smaller or (best and rows == best.rows and found != replace(best, shrunk=False)):  # it fails otherwise now
            self._corpus.failure = found
        return True

    def _over(self) -> bool:
        return time.monotonic() >= self._stop


def compare(pair: Pair, rows: Sequence[Sequence[int]], steps: int) -> Comparison:
    """Run a batch in lockstep; unlike ``Pair.generate`` it keeps neither the comparison nor the noise floor."""
    with torch_threads(pair.options.threads):
        return lockstep(sides(pair), pair.encode(rows), steps=steps, tolerance=Tolerance.of(pair.options.tolerance))[0]


def sides(pair: Pair) -> Sides:
    """Return the engine, the reference and its rounding, built and opened."""
    return Sides(pair.sessions.engine, pair.sessions.reference, pair.sessions.low_precision)


def check_hypothesis() -> None:
    """Raise :class:`BackendError` when hypothesis is not installed."""
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise BackendError("hypothesis is not installed: pip install 'pytest-ditto-engine[hypothesis]'") from error


def message(comparison: Comparison) -> str:
    """Return what diverged, in one line."""
    bad = comparison.first_bad
    if bad is not None:
        return f"engine diverges at {bad.site}, step {bad.step}: {bad.verdict}"
    flips = [(row, token.flips[0]) for row, token in enumerate(comparison.tokens) if token.flips]
    if flips:
        return f"engine prefers another token in row {flips[0][0]} at step {flips[0][1]}"
    return next((f"{site}: {why}" for site, why in comparison.missing.items()), "the logits diverge")


def order(rows: Rows) -> tuple[int, int, Rows]:
    """Return what makes one batch smaller than another: tokens, then rows, then the ids."""
    return sum(map(len, rows)), len(rows), rows


def as_rows(rows: Sequence[Sequence[int]]) -> Rows:
    """Return a batch in hashable form."""
    return tuple(tuple(row) for row in rows)


def read(path: Path, keys: Sequence[str]) -> dict[str, Any] | None:
    """Read a JSON file of a corpus with these keys; None when there is none. Raises :class:`UsageError` otherwise."""
    try:
        data: dict[str, Any] = parse_json(read_text(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON; remove it to start over") from error
    if not isinstance(data, dict) or set(data) != set(keys):
        raise UsageError(f"{path} is not a corpus file; remove it to start over")
    return data


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file as a whole or not at all."""
    write_atomic(path, json.dumps(data) + "\n")

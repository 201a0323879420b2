"""Samples through the engine and the reference.

Alone in its batch a sample has the same bits whatever ran before it. Several in one batch, padded on the right, give
the same numbers but for the order of a few sums: far below the noise floor, and many times faster on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.compare import _record
from ditto_core.compare.tokens import Rows, add_divergence, chunks, matching_prefix, pick
from ditto_core.errors import RunError, UsageError
from ditto_core.gates.record import Record, Side
from ditto_core.gates.suite import CHOICE, MATCH, PROMPT, TEXT, Sample, Text
from ditto_core.stepping.prompts import Sequencer, TokenBatch, encode

if TYPE_CHECKING:
    from ditto_core.profile import ShapeProfile
    from ditto_core.session import Session

Logits = torch.Tensor

AHEAD = 1 << 28
"""Logits of a batch: 1 GiB of float32 a side."""


@dataclass(frozen=True)
class Scores:
    """The sides on one sequence: ``tokens`` scored, KL of engine and floor from the reference at each."""

    engine: Side
    reference: Side
    tokens: int
    kl: tuple[float, ...] = ()
    floor: Side | None = None
    floor_kl: tuple[float, ...] = ()


@dataclass(frozen=True)
class Known:
    """What a baseline knows of the reference and the floor on a sample, and how many tokens they sum over."""

    side: Side
    tokens: int
    floor: Side | None = None
    floor_kl: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON."""
        floor = {"floor": self.floor and self.floor.to_json(), "floor_kl": [*map(_record.encode, self.floor_kl)]}
        return {"tokens": self.tokens, **self.side.to_json(), **floor}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Known:
        """Inverse of :meth:`to_json`."""
        floor = Side.from_json(data["floor"]) if data["floor"] else None
        return cls(Side.from_json(data), data["tokens"], floor, tuple(map(_record.decode, data["floor_kl"])))


@dataclass
class Scorer:
    """Two open sessions and what turns text into their tokens.

    ``reference`` is None where its results are known from a baseline. ``floor``: the eager model in the engine's dtype,
    None where a budget decides. ``steps``: new tokens after a prompt.
    """

    engine: Session
    reference: Session | None
    tokenizer: Any
    vocab: int
    profile: ShapeProfile
    steps: int
    floor: Session | None = None
    _ahead: dict[tuple[int, tuple[int, ...]], Logits] = field(default_factory=dict)

    def score_all(self, samples: Sequence[tuple[Sample, Known | None]]) -> list[Record]:
        """Run samples, their texts and choices in one batch a side, as far as the engine's profile and memory allow."""
        try:
            rows = [ids for sample, _ in samples for ids in self._rows(sample)] if len(samples) > 1 else []
            for part in self._batches(rows):
                self._run_ahead(part)
            return [self.score(sample, known) for sample, known in samples]
        finally:
            self._ahead.clear()

    def _rows(self, sample: Sample) -> list[list[int]]:
        """Return the sequences of a sample that are known before it is run, as far as they fit the engine."""
        rows = [self._continued(sample.prompt, choice)[0] for choice in sample.choices]
        rows += [self._ids(sample.text)] if sample.kind == TEXT else []
        return [ids for ids in rows if len(ids) in self.profile.length]

    def _batches(self, rows: list[list[int]]) -> Iterator[list[list[int]]]:
        """Cut sequences into batches of like length, of at most ``AHEAD`` logits."""
        part: list[list[int]] = []
        for ids in sorted(rows, key=len):
            count = len(part) + 1
            if part and (count not in self.profile.batch or count * len(ids) * self.vocab > AHEAD):
                yield part
                part = []
            part.append(ids)
        if part:
            yield part

    def _run_ahead(self, rows: Sequence[Sequence[int]]) -> None:
        """Keep the logits of sequences, for :meth:`score` to find."""
        batch = encode(rows, vocab_size=self.vocab, left=False)
        for session in (self.engine, self.reference, self.floor):
            if session is not None:
                logits = step_logits(session, batch)
                for ids, each in zip(rows, logits, strict=True):
                    self._ahead[id(session), tuple(ids)] = each[: len(ids)]

    def score(self, sample: Sample, known: Known | None = None) -> Record:
        """Run one sample and return its numbers. Raises :class:`UsageError` when it does not fit the engine."""
        if self.reference is None and known is None:
            raise UsageError(f"no reference, and the baseline lacks sample {sample.id!r}")
        kinds: Mapping[str, Callable[[Sample, Known | None], Scores]] = {
            TEXT: self._text,
            CHOICE: self._choice,
            MATCH: self._continuation,
            PROMPT: self._continuation,
        }
        try:
            found = kinds[sample.kind](sample, known)
        except UsageError as error:
            raise UsageError(f"sample {sample.id!r}: {error}") from error
        if known is not None and (known.tokens != found.tokens or len(known.side.top) != len(found.engine.top)):
            raise UsageError(f"sample {sample.id!r} has {found.tokens} tokens here, and {known.tokens} in the baseline")
        return Record(id=sample.id, cluster=sample.cluster, **vars(found))

    def _text(self, sample: Sample, known: Known | None) -> Scores:
        ids = self._ids(sample.text)
        if len(ids) < 2:
            raise UsageError("a text of one token predicts nothing, expected at least two")
        return self._forced(ids, 1, known)

    def _choice(self, sample: Sample, known: Known | None) -> Scores:
        """Pick the choice with the least mean negative log-likelihood; agreement is measured on the right one."""
        rows = [self._continued(sample.prompt, choice) for choice in sample.choices]
        scores = [self._forced(ids, first, None if self.reference else Known(Side(), 0)) for ids, first in rows]
        lengths = [len(ids) - first for ids, first in rows]
        both = [score.engine for score in scores], [score.reference for score in scores]
        right = int(sample.answer)  # type: ignore[arg-type]
        won = [best([side.nll / n for side, n in zip(sides, lengths, strict=True)]) == right for sides in both]
        found = scores[right]
        engine, reference = (replace(s, correct=w) for s, w in zip((found.engine, found.reference), won, strict=True))
        if known is not None:
            return Scores(engine, known.side, found.tokens, (), known.floor, known.floor_kl)
        return replace(found, engine=engine, reference=reference)

    def _continuation(self, sample: Sample, known: Known | None) -> Scores:
        """Continue greedily on both sides; agreement is measured along the reference's tokens."""
        ids = self._ids(sample.prompt)
        theirs = list(known.side.generated) if known else greedy_tokens(self.reference, ids, self.steps, self._check)
        if len(theirs) != self.steps:
            raise UsageError(f"the baseline continues by {len(theirs)} tokens, expected {self.steps}")
        forced = self._forced([*ids, *theirs], len(ids), known)
        ours = theirs
        if matching_prefix(forced.engine.top, theirs) < self.steps:
            ours = greedy_tokens(self.engine, ids, self.steps, self._check)
        sides = [
            Side(0.0, top, tuple(tokens), self._right(sample, tokens))
            for top, tokens in ((forced.engine.top, ours), (forced.reference.top, theirs))
        ]
        return replace(forced, engine=sides[0], reference=known.side if known else sides[1], tokens=0)

    def _right(self, sample: Sample, tokens: Sequence[int]) -> bool | None:
        """Tell whether a continuation begins with the answer, white space at the ends aside."""
        if sample.answer is None:
            return None
        if isinstance(sample.answer, str):
            return bool(self.tokenizer.decode(list(tokens)).strip().startswith(sample.answer.strip()))
        wanted: Any = sample.answer
        return tuple(tokens[: len(wanted)]) == tuple(wanted)

    def _forced(self, ids: Sequence[int], first: int, known: Known | None) -> Scores:
        """Score the tokens from ``first`` on, each given all before it."""
        mine = self._logits(self.engine, ids)[first - 1 : -1]
        targets = torch.tensor(ids[first:])
        ours = side_of(mine, targets)
        if known is not None:
            return Scores(ours, known.side, len(targets), (), known.floor, known.floor_kl)
        theirs = self._logits(self.reference, ids)[first - 1 : -1]
        found = Scores(ours, side_of(theirs, targets), len(targets), divergences(mine, theirs))
        if self.floor is None:
            return found
        own = self._logits(self.floor, ids)[first - 1 : -1]
        return replace(found, floor=side_of(own, targets), floor_kl=divergences(own, theirs))

    def _logits(self, session: Session | None, ids: Sequence[int]) -> Logits:
        assert session is not None
        known = self._ahead.get((id(session), tuple(ids)))
        if known is not None:
            return known
        self._check(len(ids), 1)
        return step_logits(session, batch_of(ids))[0]

    def _check(self, length: int, steps: int) -> None:
        self.profile.check(1, length, 0)
        if steps > 1:
            self.profile.check(1, 1, length + steps - 2)

    def _ids(self, text: Text) -> list[int]:
        prompt: Any = text if isinstance(text, str) else [text]
        return [int(t) for t in encode(prompt, tokenizer=self.tokenizer, vocab_size=self.vocab).input_ids[0]]

    def _continued(self, prompt: Text, choice: Text) -> tuple[list[int], int]:
        """Return the tokens of both together, and where they part from the prompt's own."""
        start = self._ids(prompt)
        if isinstance(prompt, str) != isinstance(choice, str):
            raise UsageError("prompt and choices are to be all text or all token ids")
        whole = self._ids(prompt + choice)  # type: ignore[operator]
        return whole, max(1, min(matching_prefix(start, whole), len(whole) - 1))


def greedy_tokens(
    session: Session | None, ids: Sequence[int], steps: int, check: Callable[[int, int], None]
) -> list[int]:
    """Return a session's own greedy continuation."""
    from ditto_core.stepping.solo import run

    assert session is not None
    check(len(ids), steps)
    return run(session, batch_of(ids), steps=steps)[0]


def step_logits(session: Session, batch: TokenBatch) -> Logits:
    """Return the logits [rows, length, vocab] of a prefill. Raises :class:`RunError` where there are none."""
    session.start(batch.rows)
    outputs = session.step(Sequencer(batch).inputs(), drop)
    if "logits" not in outputs:
        raise RunError(f"{session.info.label} returned no logits: it has {', '.join(outputs) or 'no outputs'}")
    return outputs["logits"]


def batch_of(ids: Sequence[int]) -> TokenBatch:
    """Return a batch of one row."""
    row = torch.tensor([list(ids)])
    return TokenBatch(row, torch.ones_like(row))


def side_of(logits: Logits, targets: torch.Tensor) -> Side:
    """Return likelihood and likeliest tokens of logits [positions, vocab] whose next tokens are ``targets``."""
    nll = 0.0
    for part in chunks(logits, len(logits)):
        (rows,) = pick(part, logits)
        nll += float(torch.nn.functional.cross_entropy(rows, targets[part].to(rows.device), reduction="sum"))
    return Side(nll, tuple(logits.argmax(-1).tolist()))


def divergences(mine: Logits, theirs: Logits) -> tuple[float, ...]:
    """Return KL(reference || engine) at each position, in nats, to five digits."""
    found = Rows()
    for part in chunks(mine, len(mine)):
        add_divergence(found, pick(part, mine, theirs), 1)
    return tuple(float(f"{value:.4e}") for value in found.kl)


def best(values: Sequence[float]) -> int:
    """Return the index of the least value, -1 when any is NaN: a NaN is never right."""
    return -1 if any(map(math.isnan, values)) else min(range(len(values)), key=values.__getitem__)


def drop(site: str, tensor: torch.Tensor) -> None:
    """Let go of a tap."""

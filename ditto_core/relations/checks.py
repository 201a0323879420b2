"""The relations. Each feeds the same tokens into one session in two ways and compares every site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

from ditto_core.errors import UsageError
from ditto_core.relations.feed import Captured, Feed, capture, feed, stacked
from ditto_core.relations.result import Relation, Side, relate
from ditto_core.stepping.prompts import is_single

if TYPE_CHECKING:
    from ditto_core.compare.tolerance import Tolerance
    from ditto_core.profile import Range, ShapeProfile
    from ditto_core.session import Session

TAIL = 2
"""Tokens that are fed one by one after the prefill, so that a relation speaks of decoding too."""

ROWS = 4
"""Rows of a batch that is made of a single prompt."""

Ids = Sequence[int]


@dataclass(frozen=True)
class Terms:
    """How a relation is judged: ``floor`` is the noise floor by site (rel-L2) where it was measured, ``profile`` the
    sizes that the engine serves, ``pad`` the token id of padding."""

    tolerance: Tolerance | None = None
    floor: Mapping[str, float] | None = None
    profile: ShapeProfile | None = None
    pad: int = 0


def prefill_equals_steps(session: Session, ids: Ids, *, terms: Terms = Terms()) -> Relation:
    """Prefill of n tokens = n single steps."""
    steps = feed([ids], chunks=[1] * len(ids), label=f"{len(ids)} single steps")
    return compared("prefill = single steps", session, steps, feed([ids]), terms)


def chunked_prefill(session: Session, ids: Ids, *, chunk: int = 0, terms: Terms = Terms()) -> Relation:
    """Prefill in chunks of ``chunk`` tokens (default: a third of them, at least 2) = one prefill."""
    chunk = chunk or max(2, -(-len(ids) // 3))
    if not chunk < len(ids):
        raise UsageError(f"{len(ids)} tokens make one chunk of {chunk}, expected more tokens than that")
    chunks = pieces(len(ids), chunk)
    split = feed([ids], chunks=chunks, label=f"prefill in chunks of {', '.join(map(str, chunks))}")
    return compared("chunked prefill = one prefill", session, split, feed([ids]), terms)


def left_padding(session: Session, ids: Ids, *, columns: int = 3, terms: Terms = Terms()) -> Relation:
    """Pad columns before the prompt change nothing, in the prefill and in the decode steps after it."""
    padded = feed([ids], left=columns, tail=tail(ids), pad=terms.pad, label=f"{columns} pad columns before")
    return compared("left padding changes nothing", session, padded, feed([ids], tail=tail(ids)), terms)


def right_padding(
    session: Session, ids: Ids, *, columns: int = 3, decode: bool = True, terms: Terms = Terms()
) -> Relation:
    """Pad columns after the prompt change nothing.

    With ``decode``, tokens follow after the padding, which the mask alone can hide then. A model with a sliding window
    counts such columns as distance: check it with ``decode=False``.
    """
    last = tail(ids) if decode else 0
    padded = feed([ids], right=columns, tail=last, pad=terms.pad, label=f"{columns} pad columns after")
    return compared("right padding changes nothing", session, padded, feed([ids], tail=last), terms)


def row_in_batch(session: Session, rows: Ids | Sequence[Ids], *, terms: Terms = Terms()) -> Relation:
    """A row alone = the row in a batch of other rows.

    Rows are cut to the shortest one, so that padding plays no part. One prompt makes ``ROWS`` rows by rotation.
    """
    several = same_length(rows)
    tokens = tail(several[0])
    batch = feed(several, tail=tokens, label=f"in a batch of {len(several)}")
    return compared("row alone = row in batch", session, batch, feed(several, tail=tokens, label="alone"), terms)


def same_bits(session: Session, ids: Ids, *, terms: Terms = Terms()) -> Relation:
    """Twice the same run = the same bits."""
    fed = feed([ids], tail=tail(ids), label="the first time")
    expected = side(session, fed, terms)
    actual = side(session, relabelled(fed, "the second time"), terms)
    return relate("same run twice = same bits", actual, expected, session.taps, exact=True)


def warm_cache(session: Session, ids: Ids, *, other: Ids = (), terms: Terms = Terms()) -> Relation:
    """A run after another sequence = the run before it, to the bit: ``start()`` leaves nothing behind.

    ``other`` defaults to a sequence that shares its first half with ``ids``: what a prefix cache would take for it.
    """
    half = len(ids) // 2
    between = feed([tuple(other) or (*ids[:half], *reversed(ids[half:]), *ids[:1])], label="another sequence")
    fed = feed([ids], tail=tail(ids), label="cold")
    expected = side(session, fed, terms)
    side(session, between, terms)
    actual = side(session, relabelled(fed, "after another sequence"), terms)
    return relate("cold = warm cache", actual, expected, session.taps, exact=True)


def shapes(
    session: Session,
    ids: Ids,
    profile: ShapeProfile,
    *,
    reference: Session | None = None,
    longest: int = 0,
    terms: Terms = Terms(),
) -> Iterator[Relation]:
    """Steps of the smallest, typical, largest and off-grid sizes of a profile agree with the reference.

    Without a reference they agree with each row alone, in steps of the typical length. ``ids`` are repeated as often
    as it takes. ``longest`` limits past + length (a model's largest position); sizes are cut to it.
    """
    for batch, length, past in sizes(profile, longest):
        rows = [tuple(islice(cycle(rotated(ids, row)), past + length)) for row in range(batch)]
        label = f"{batch} x {length} after {past}"
        fed = feed(rows, chunks=steps_to(past, length, profile), label=label)
        if reference is not None:
            expected = side(reference, relabelled(fed, "reference"), terms)
        else:
            plain = feed(rows, chunks=steps_to(past, length, profile, whole=True), label="alone")
            expected = alone(session, plain, terms)
        actual = side(session, fed, terms)
        yield relate(f"shape {label}", actual, expected, session.taps, tolerance=terms.tolerance, floor=terms.floor)


def compared(name: str, session: Session, other: Feed, plain: Feed, terms: Terms) -> Relation:
    """Run a session both ways and judge the difference."""
    expected = alone(session, plain, terms)
    actual = side(session, other, terms)
    return relate(name, actual, expected, session.taps, tolerance=terms.tolerance, floor=terms.floor)


def side(session: Session, fed: Feed, terms: Terms) -> Side:
    """Run a feed. Raises :class:`UsageError` when it does not fit the engine's profile."""
    fed.check(terms.profile)
    return Side(session.info, capture(session, fed), fed)


def alone(session: Session, fed: Feed, terms: Terms) -> Side:
    """Run each row of a feed alone."""
    runs: list[Captured] = []
    for row in range(fed.ids.shape[0]):
        one = Feed(fed.ids[row : row + 1], fed.mask[row : row + 1], fed.chunks, fed.label)
        one.check(terms.profile)
        runs.append(capture(session, one))
    return Side(session.info, stacked(runs), fed)


def steps_to(past: int, length: int, profile: ShapeProfile, *, whole: bool = False) -> tuple[int, ...]:
    """Return chunks that a profile allows: ``past`` tokens in any, then a step of ``length``.

    ``whole``: as one sequence in typical lengths, where the profile allows that. Raises :class:`UsageError`.
    """
    total, sizes = past + length, (profile.length.opt, profile.length.max, max(1, profile.length.min))
    splits = [pieces(total, size) for size in sizes if whole] + [(*pieces(past, size), length) for size in sizes]
    for split in splits:
        starts = (sum(split[:i]) for i in range(len(split)))
        if all(size in profile.length and start in profile.past for size, start in zip(split, starts, strict=True)):
            return split
    raise UsageError(f"the profile has no steps to {length} tokens after {past}; lower the min of length")


def relabelled(fed: Feed, label: str) -> Feed:
    """Return the same feed under another label."""
    return Feed(fed.ids, fed.mask, fed.chunks, label)


def tail(ids: Ids) -> int:
    """Return how many of the tokens are decoded one by one: the prefill keeps at least one."""
    return max(0, min(TAIL, len(ids) - 1))


def pieces(total: int, size: int) -> tuple[int, ...]:
    """Cut ``total`` tokens into pieces of ``size``; the last one is what is left."""
    return tuple(min(size, total - start) for start in range(0, total, size))


def rotated(ids: Ids, by: int) -> Ids:
    """Return the tokens from the ``by``-th on, then those before it."""
    return (*ids[by % len(ids) :], *ids[: by % len(ids)])


def same_length(rows: Ids | Sequence[Ids]) -> list[Ids]:
    """Return rows of one length, made of one prompt or of several."""
    if is_single(rows):
        return [rotated(rows, row) for row in range(ROWS)]  # type: ignore[arg-type]
    shortest = min(len(row) for row in rows)  # type: ignore[arg-type]
    return [row[:shortest] for row in rows]  # type: ignore[index]


def sizes(profile: ShapeProfile, longest: int = 0) -> list[tuple[int, int, int]]:
    """Return (batch, length, past): all smallest, all typical, all largest, then one dimension varied at a time."""
    grids = [grid(profile.batch), grid(profile.length), grid(profile.past)]
    typical = tuple(g[1] for g in grids)
    found = [tuple(g[0] for g in grids), typical, tuple(g[2] for g in grids)]
    found += [(*typical[:d], size, *typical[d + 1 :]) for d, g in enumerate(grids) for size in g]
    return list(dict.fromkeys(fit(batch, length, past, longest) for batch, length, past in found))


def fit(batch: int, length: int, past: int, longest: int) -> tuple[int, int, int]:
    """Cut past and length so that they end at the model's largest position."""
    if not longest:
        return batch, length, past
    length = min(length, longest)
    return batch, length, min(past, longest - length)


def grid(size: Range) -> tuple[int, int, int, int]:
    """Return the smallest, typical, largest size, and an odd one between the last two that no kernel is tuned for."""
    between = min(size.max, (size.opt + size.max) // 2 | 1)
    return size.min, size.opt, size.max, between

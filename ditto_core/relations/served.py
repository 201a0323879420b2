"""Relations of a server: the ways in which it serves give the same logits.

A prefix that comes from the cache equals one that is computed, a prompt in chunks equals a whole one, a request alone
equals the request in a batch, log-probabilities of a prompt equal the reference's. These are what users report as "the
answer changed". What the same passes computed, with the same shapes, has the same bits, or its state is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from ditto_core.compare.metrics import measure
from ditto_core.errors import UsageError, nearest
from ditto_core.relations.checks import Ids, Terms, row_in_batch, side, tail
from ditto_core.relations.feed import Captured, capture, feed
from ditto_core.relations.result import Relation, Side, relate
from ditto_core.session import Pass, ScoresPrompts, Session, ShowsPasses
from ditto_core.sites import Tap

SCORES = Tap("logprobs", "logprobs", axes=("batch", "length", ""))


@dataclass(frozen=True)
class Serving:
    """A server: ``open_mode`` opens a session of the engine in a mode (``plain``, ``prefix_cache``,
    ``chunked_prefill``); the reference, and the same in the engine's dtype where there is one."""

    open_mode: Callable[[str], Session]
    reference: Session
    low_precision: Session | None = None


def prefix_cache(serving: Serving, ids: Ids, terms: Terms) -> Relation:
    """A prompt whose prefix is in the cache = the prompt when it is new, to the bit where the rest of it was computed
    in the same passes.

    Raises :class:`UsageError` when the cache gave nothing, so that nothing was checked.
    """
    with closing(serving.open_mode("prefix_cache")) as session:
        new = side(session, feed([ids], tail=tail(ids), label="the prefix is new"), terms)
        computed = passes_of(session)
        hit = side(session, feed([ids], tail=tail(ids), label="the prefix is in the cache"), terms)
        passes = passes_of(session)
    if not any(before for before, _ in passes[0]):
        raise UsageError(f"prefix_cache: no block of {len(ids)} tokens was reused, expected a prompt of several blocks")
    exact, name = computed[-len(passes) :] == passes, "prefix hit = new prefix"
    return relate(name, hit, new, session.taps, tolerance=terms.tolerance, floor=terms.floor, exact=exact)


def chunked_prefill(serving: Serving, ids: Ids, terms: Terms) -> Relation:
    """A prompt that is computed in chunks, as the server cuts it = the prompt at once.

    Raises :class:`UsageError` when it took one pass, so that nothing was checked.
    """
    with closing(serving.open_mode("plain")) as session:
        whole = side(session, feed([ids], tail=tail(ids), label="prompt at once"), terms)
    fed = feed([ids], tail=tail(ids), label="prompt in chunks")
    with closing(serving.open_mode("chunked_prefill")) as session:
        cut = side(session, fed, terms)
        passes = len(passes_of(session))
    if passes <= len(fed.chunks):
        raise UsageError(f"chunked_prefill: {len(ids)} tokens took one pass, expected a longer prompt")
    return relate("chunks = whole prompt", cut, whole, session.taps, tolerance=terms.tolerance, floor=terms.floor)


def batch(serving: Serving, ids: Ids, terms: Terms) -> Relation:
    """A request alone = the request in a batch of others (rotations of the prompt)."""
    with closing(serving.open_mode("plain")) as session:
        return row_in_batch(session, ids, terms=terms)


def prompt_logprobs(serving: Serving, ids: Ids, terms: Terms) -> Relation:
    """Log-probabilities that a server gives of a prompt's tokens, computed in chunks = log-softmax of the reference's
    logits on the same prompt.

    Raises :class:`UsageError` for a server that gives none.
    """
    fed = feed([ids], label="log-softmax")
    truth = scores(capture(serving.reference, fed).values["logits"][0])
    floor = {}
    if serving.low_precision is not None:
        rounded = scores(capture(serving.low_precision, fed).values["logits"][0])
        floor = {SCORES.site: measure(rounded, truth).rel_l2}
    with closing(serving.open_mode("chunked_prefill")) as session:
        if not isinstance(session, ScoresPrompts):
            raise UsageError(f"prompt_logprobs: {session.info.label} gives no log-probabilities of a prompt")
        given = session.prompt_logprobs(ids)
    actual, expected = (
        Side(info, Captured({SCORES.site: rows[None]}, {SCORES.site: SCORES.axes}), replace(fed, label=label))
        for info, rows, label in (
            (session.info, given, "log-probabilities of the prompt"),
            (serving.reference.info, truth, "log-softmax of the logits"),
        )
    )
    name = "prompt log-probabilities = the reference's"
    return relate(name, actual, expected, (), tolerance=terms.tolerance, floor=floor)


def scores(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the token behind each prefix but the whole, float64 [length - 1, vocabulary]: a
    server rounds its logits, and not what follows from them."""
    return logits[:-1].double().log_softmax(-1)


def passes_of(session: Session) -> list[Pass]:
    """Return the passes that computed a session's last sequence. Raises :class:`UsageError` when it does not tell."""
    if not isinstance(session, ShowsPasses) or not session.passes:
        raise UsageError(f"{session.info.label} does not tell its passes: what was reused or cut is not known")
    return list(session.passes)


SERVED: Mapping[str, Callable[[Serving, Ids, Terms], Relation]] = {
    "prefix_cache": prefix_cache,
    "chunked_prefill": chunked_prefill,
    "batch": batch,
    "prompt_logprobs": prompt_logprobs,
}


def check_served(serving: Serving, ids: Ids, terms: Terms, *names: str) -> Iterator[Relation]:
    """Check the named relations of a server (default: all) on one prompt. Raises :class:`UsageError` for any other."""
    for name in names or SERVED:
        if name not in SERVED:
            raise UsageError(f"unknown relation {name!r}, expected {', '.join(SERVED)}{nearest(name, SERVED)}")
        yield SERVED[name](serving, ids, terms)

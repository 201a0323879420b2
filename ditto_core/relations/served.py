"""Relations of a server: the ways in which it serves give the same logits.

A prefix that comes from the cache equals one that is computed, a prompt in chunks equals a whole one, a request alone
equals the request in a batch. These are what users report as "the answer changed".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

from ditto_core.errors import UsageError, nearest
from ditto_core.relations.checks import Ids, Terms, row_in_batch, side, tail
from ditto_core.relations.feed import feed
from ditto_core.relations.result import Relation, relate
from ditto_core.session import Session

Open = Callable[[str], Session]
"""Opens a session of the engine in a mode: ``plain``, ``prefix_cache``, ``chunked_prefill``."""


def prefix_cache(open_mode: Open, ids: Ids, terms: Terms) -> Relation:
    """A prompt whose prefix is in the cache = the prompt when it is new.

    Raises :class:`UsageError` when the cache gave nothing, so that nothing was checked.
    """
    with closing(open_mode("prefix_cache")) as session:
        new = side(session, feed([ids], tail=tail(ids), label="the prefix is new"), terms)
        hit = side(session, feed([ids], tail=tail(ids), label="the prefix is in the cache"), terms)
        reused = int(getattr(session, "reused", 0))
    if not reused:
        raise UsageError(f"prefix_cache: no block of {len(ids)} tokens was reused, expected a prompt of several blocks")
    return relate("prefix hit = new prefix", hit, new, session.taps, tolerance=terms.tolerance, floor=terms.floor)


def chunked_prefill(open_mode: Open, ids: Ids, terms: Terms) -> Relation:
    """A prompt that is computed in chunks, as the server cuts it = the prompt at once.

    Raises :class:`UsageError` when it took one pass, so that nothing was checked.
    """
    with closing(open_mode("plain")) as session:
        whole = side(session, feed([ids], tail=tail(ids), label="prompt at once"), terms)
    with closing(open_mode("chunked_prefill")) as session:
        cut = side(session, feed([ids], tail=tail(ids), label="prompt in chunks"), terms)
        passes = int(getattr(session, "passes", 0))
    if passes < 2:
        raise UsageError(f"chunked_prefill: {len(ids)} tokens took one pass, expected a longer prompt")
    return relate("chunks = whole prompt", cut, whole, session.taps, tolerance=terms.tolerance, floor=terms.floor)


def batch(open_mode: Open, ids: Ids, terms: Terms) -> Relation:
    """A request alone = the request in a batch of others (rotations of the prompt)."""
    with closing(open_mode("plain")) as session:
        return row_in_batch(session, ids, terms=terms)


SERVED: Mapping[str, Callable[[Open, Ids, Terms], Relation]] = {
    "prefix_cache": prefix_cache,
    "chunked_prefill": chunked_prefill,
    "batch": batch,
}


def check_served(open_mode: Open, ids: Ids, terms: Terms, *names: str) -> Iterator[Relation]:
    """Check the named relations of a server (default: all) on one prompt. Raises :class:`UsageError` for any other."""
    for name in names or SERVED:
        if name not in SERVED:
            raise UsageError(f"unknown relation {name!r}, expected {', '.join(SERVED)}{nearest(name, SERVED)}")
        yield SERVED[name](open_mode, ids, terms)

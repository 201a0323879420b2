"""A history of requests: whatever else a server does, each request gets what it would have got alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ditto_core.errors import UsageError
from ditto_core.relations.checks import Ids, Terms
from ditto_core.relations.feed import LOGITS, Captured
from ditto_core.relations.result import Relation, Side, relate
from ditto_core.session import TakesRequests, Trail

Event = tuple[str, int]
"""``("submit", i)``: prompt ``i`` is sent; ``("step", n)``: so many passes; ``("abort", i)``: the ``i``-th request is
ended."""

EVENTS = ("submit", "step", "abort")


@dataclass(frozen=True)
class Asked:
    """How a request was run, in words, with the number of its logits."""

    label: str
    count: int

    def steps(self) -> tuple[tuple[int, ...], ...]:
        """Return that each position is of a step of its own."""
        return (tuple(range(self.count)),)


@dataclass(frozen=True, eq=False)
class Got:
    """What a request got: ``logits`` [new tokens, vocabulary], and how they were computed."""

    logits: torch.Tensor
    trail: Trail

    @classmethod
    def of(cls, server: TakesRequests, name: str) -> Got:
        """Take it from a server."""
        return cls(server.logits(name), server.trail(name))

    def resumed(self) -> Got:
        """Return what was computed since it was begun anew."""
        return Got(self.logits[self.trail.kept :], Trail(0, self.trail.passes))


def check_history(
    server: TakesRequests, prompts: Sequence[Ids], events: Sequence[Event], new_tokens: int, terms: Terms
) -> tuple[Relation, ...]:
    """Run a history, then each of its prompts alone; return a relation for each request that was not aborted.

    One that lost its place to another gives a second relation: from then on it gets what a request gets that is begun
    with all its tokens so far. Where the same passes computed both sides, the same bits are due.

    Raises :class:`UsageError` for an unknown event, or a prompt that is none of ``prompts``.
    """
    server.forget()
    sent: list[tuple[str, int]] = []
    ended: set[str] = set()
    for kind, number in events:
        if kind not in EVENTS or (kind == "submit" and not 0 <= number < len(prompts)):
            raise UsageError(f"the event {(kind, number)!r} is unknown, expected {', '.join(EVENTS)} and a number")
        if kind == "submit":
            sent.append((server.submit(prompts[number], new_tokens), number))
        elif kind == "abort" and number < len(sent):
            server.abort(sent[number][0])
            ended.add(sent[number][0])
        elif kind == "step":
            for _ in range(number):
                server.step()
    finish(server)
    kept = [(name, number, Got.of(server, name)) for name, number in sent if name not in ended]
    lone = {number: alone(server, prompts[number], new_tokens) for number in sorted({n for _, n, _ in kept})}
    found: list[Relation] = []
    for name, number, got in kept:
        label = f"request {name} of prompt {number}"
        found.append(compared(server, label, got, lone[number], terms))
        if got.trail.kept:
            begun = [*prompts[number], *got.logits[: got.trail.kept].argmax(-1).tolist()]
            anew = alone(server, begun, new_tokens - got.trail.kept)
            found.append(compared(server, f"{label} resumed after {got.trail.kept} tokens", got.resumed(), anew, terms))
    return tuple(found)


def finish(server: TakesRequests) -> None:
    """Run until no request is left."""
    while server.step():
        pass


def alone(server: TakesRequests, ids: Ids, new_tokens: int) -> Got:
    """Return what a prompt gets that nothing else was run beside, from an empty cache."""
    server.forget()
    name = server.submit(ids, new_tokens)
    finish(server)
    return Got.of(server, name)


def compared(server: TakesRequests, label: str, got: Got, expected: Got, terms: Terms) -> Relation:
    """Compare a request's logits with those that it gets alone; to the bit where the same passes computed both."""
    actual, other = (
        Side(server.info, Captured({"logits": rows[None]}, {"logits": LOGITS.axes}), Asked(text, len(rows)))
        for rows, text in ((got.logits, label), (expected.logits, "the request alone"))
    )
    exact, name = got.trail == expected.trail, f"{label} = the request alone"
    return relate(name, actual, other, (), tolerance=terms.tolerance, floor=terms.floor, exact=exact)

"""A history of requests: whatever else a server does, each request gets what it would have got alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ditto_core.errors import UsageError
from ditto_core.relations.checks import Ids, Terms
from ditto_core.relations.feed import LOGITS, Captured
from ditto_core.relations.result import Relation, Side, relate
from ditto_core.session import TakesRequests

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


def check_history(
    server: TakesRequests, prompts: Sequence[Ids], events: Sequence[Event], new_tokens: int, terms: Terms
) -> tuple[Relation, ...]:
    """Run a history, then each of its prompts alone; return a relation for each request that was not aborted.

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
    kept = [(name, number, server.logits(name)) for name, number in sent if name not in ended]
    lone = {number: alone(server, prompts[number], new_tokens) for number in sorted({n for _, n, _ in kept})}
    return tuple(
        compared(server, f"request {name} of prompt {number}", logits, lone[number], terms)
        for name, number, logits in kept
    )


def finish(server: TakesRequests) -> None:
    """Run until no request is left."""
    while server.step():
        pass


def alone(server: TakesRequests, ids: Ids, new_tokens: int) -> torch.Tensor:
    """Return the logits of a prompt that nothing else was run beside, from an empty cache."""
    server.forget()
    name = server.submit(ids, new_tokens)
    finish(server)
    return server.logits(name)


def compared(server: TakesRequests, label: str, logits: torch.Tensor, expected: torch.Tensor, terms: Terms) -> Relation:
    """Compare a request's logits [tokens, vocabulary] with those that it gets alone."""
    actual, other = (
        Side(server.info, Captured({"logits": rows[None]}, {"logits": LOGITS.axes}), Asked(text, len(rows)))
        for rows, text in ((logits, label), (expected, "the request alone"))
    )
    return relate(f"{label} = the request alone", actual, other, (), tolerance=terms.tolerance, floor=terms.floor)

"""A session over a server that runs its own loop: the head hands each pass over and takes the token to go on with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ditto_core.backends.packing import new_tokens, prompts, to_rows
from ditto_core.backends.served.capture import Capture, Server
from ditto_core.backends.served.forcing import LOGITS, laid_out, one_hot, settle
from ditto_core.backends.served.handoff import Handoff
from ditto_core.backends.served.place import Place
from ditto_core.errors import RunError
from ditto_core.session import Pass, SessionInfo, TapSink
from ditto_core.sites import Tap

POSITIONS = "positions"


@dataclass(frozen=True)
class Rows:
    """The rows of a pass as the server packed them: ``order[i]`` is the caller's row of its row ``i``, which has
    ``counts[i]`` new tokens."""

    order: Sequence[int]
    counts: Sequence[int]

    def sorted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor [tokens, …] or [rows, …] with the rows in the caller's order; padding behind it is cut.

        Any other tensor is returned as it is.
        """
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        if tensor.shape[0] >= sum(self.counts):
            pieces = torch.split(tensor[: sum(self.counts)], list(self.counts))
            return torch.cat([pieces[place] for place in places])
        return tensor[places] if tensor.shape[0] == len(self.order) else tensor


class ServedSession:
    """Implements :class:`~ditto_core.session.Session` over a server's module in this process.

    A subclass starts and ends requests, and says how their rows are packed.
    """

    taps: tuple[Tap, ...]
    info: SessionInfo

    def __init__(self, server: Server, module: nn.Module, taps: tuple[Tap, ...], limit: int) -> None:
        self.taps = taps
        self._server, self._module, self._limit = server, module, limit
        self._places = {tap.site: Place.parse(tap.value) for tap in taps}
        self._capture = Capture(server, module, {place.tensor for place in self._places.values()}, self._leave)
        self._handoff: Handoff | None = None
        self._cache: dict[str, torch.Tensor] = {}
        self._chunks: list[dict[str, torch.Tensor]] = []
        self.passes: list[Pass] = []
        self.other_positions = ""

    def start(self, batch: int) -> None:
        """End the sequence that was being stepped; the next step is a prefill."""
        self._abort()
        if self._handoff is not None:
            self._handoff.stop()
        self._handoff = None
        self._cache, self._chunks, self.passes, self.other_positions = {}, [], [], ""

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass; see :class:`~ditto_core.session.Session`.

        Raises :class:`RunError` when a module of a tap did not run.
        """
        length = inputs["input_ids"].shape[1]
        real = new_tokens(inputs["attention_mask"], length)
        if self._handoff is None:
            found = self._prefill(inputs)
        elif length == 1:
            found = self._handoff.step(inputs["input_ids"][:, 0])
        else:
            raise RunError(f"{self._server.name} takes one token a row after the prefill, got {length}")
        if POSITIONS in found and not self.other_positions:
            self.other_positions = differing(found[POSITIONS], inputs["position_ids"], real)
        for tap in self.taps:
            place = self._places[tap.site]
            if place.tensor not in found:
                raise RunError(f"{place.module} of {self._server.name} did not run, so {tap.site} cannot be shown")
            rows = to_rows(place.cut(found[place.tensor], self._sizes(place)), real)
            sink(tap.site, self._whole(tap, laid_out(self._heads_apart(place, rows, tap.axes), tap.axes)))
        return {LOGITS: to_rows(found[LOGITS], real)}

    def _prefill(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        rows = prompts(inputs["input_ids"], inputs["attention_mask"])
        room = self._limit - max(len(row) for row in rows)
        if room < 1:
            raise RunError(f"a prompt of {max(map(len, rows))} tokens does not fit the engine's {self._limit} tokens")
        self._handoff = Handoff(settle, self._server.name)
        self._handoff.start(self._begin(rows, room))
        return self._handoff.step()

    def _whole(self, tap: Tap, new: torch.Tensor) -> torch.Tensor:
        """Return keys or values of all tokens so far: the server hands over the new ones, the reference has all."""
        if "total" not in tap.axes:
            return new
        axis = tap.axes.index("total")
        past = self._cache.get(tap.site)
        self._cache[tap.site] = new if past is None else torch.cat([past, new], axis)
        return self._cache[tap.site]

    def _heads_apart(self, place: Place, rows: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        """Return rows [batch, length, heads x size] as [batch, length, heads, size] where the tap has them apart."""
        heads = self._heads_of(place)
        return rows.reshape(*rows.shape[:-1], heads, -1) if heads and rows.ndim == len(axes) - 1 else rows

    def _leave(self, tensors: dict[str, torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
        if self._handoff is None or self._idle():
            return None
        tensors |= self._positions()
        unfinished = self._unfinished()
        self.passes.append(self._pass())
        if unfinished:
            self._chunks.append(tensors)
            return None
        tensors, self._chunks = joined([*self._chunks, tensors]), []
        rows = self._rows()
        if rows is not None:
            tensors = {name: rows.sorted(tensor) for name, tensor in tensors.items()}
        tokens = self._handoff.offer(tensors)
        if tokens is None:
            return None
        if rows is not None:
            return one_hot(output, tokens[list(rows.order)])
        return one_hot(output, tokens.expand(output.shape[0]))

    @abstractmethod
    def _begin(self, rows: list[torch.Tensor], room: int) -> Callable[[], Any]:
        """Send requests for prompts [length] of at most ``room`` new tokens; return what waits for their end."""

    @abstractmethod
    def _abort(self) -> None:
        """End what was begun."""

    def _idle(self) -> bool:
        """Tell whether a pass is none of a request's, as in a warm-up."""
        return False

    def _unfinished(self) -> bool:
        """Tell whether a pass computed a part of a prompt, which is handed over with the pass that ends it."""
        return False

    def _pass(self) -> Pass:
        """Return the shape of the pass at hand; empty where the server does not tell."""
        return ()

    def _positions(self) -> dict[str, torch.Tensor]:
        """Return the positions [tokens] of the pass at hand as ``POSITIONS``; nothing where the server keeps them."""
        return {}

    def _rows(self) -> Rows | None:
        """Return how the pass at hand is packed; None for a single row."""
        return None

    def _sizes(self, place: Place) -> tuple[int, ...]:
        """Return the ratio of the pieces of a joint projection."""
        return (1,) * place.parts

    def _heads_of(self, place: Place) -> int:
        """Return how many heads lie side by side in a port of attention; 0 for any other tensor."""
        return 0


def joined(passes: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors [tokens, …] of a prompt that several passes computed; logits are the last pass's."""
    last = passes[-1]
    return {n: t if n == LOGITS else torch.cat([each[n] for each in passes]) for n, t in last.items()}


def differing(packed: torch.Tensor, ours: torch.Tensor, real: torch.Tensor) -> str:
    """Say in which row a server's positions [tokens] are not ``ours`` [batch, length] of ``real`` tokens.

    Empty when they are the same, or where a cache gave some of the tokens, which have no positions then.
    """
    counts = real.sum(1).tolist()
    for row, theirs in enumerate(torch.split(packed, counts) if len(packed) == sum(counts) else ()):
        engine, reference = theirs.tolist(), ours[row][real[row]].tolist()
        if engine != reference:
            return f"positions of row {row} are {engine[:6]} in the engine, {reference[:6]} in the reference"
    return ""

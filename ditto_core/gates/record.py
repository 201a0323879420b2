"""What one sample came to on both sides: numbers, not tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ditto_core.compare._record import decode, encode


@dataclass(frozen=True, slots=True)
class Side:
    """One side's results on one sample.

    ``nll``: summed negative log-likelihood of the sample's own tokens, in nats (0 where it has none). ``top``: the
    likeliest token at each scored position. ``generated``: the tokens of its own greedy continuation. ``correct``:
    right or wrong, None where the sample has no answer.
    """

    nll: float = 0.0
    top: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    correct: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON."""
        lists = {"top": list(self.top), "generated": list(self.generated)}
        return {"nll": encode(self.nll), **lists, "correct": self.correct}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Side:
        """Inverse of :meth:`to_json`."""
        return cls(decode(data["nll"]), tuple(data["top"]), tuple(data["generated"]), data["correct"])


@dataclass(frozen=True, slots=True)
class Record:
    """One sample on the engine and on the reference.

    ``tokens``: how many tokens ``nll`` sums over. ``kl``: KL(reference || engine) in nats at each scored position, to
    five digits; empty where the reference's results come from a baseline.
    """

    id: str
    engine: Side
    reference: Side
    tokens: int = 0
    kl: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON."""
        sides = {"engine": self.engine.to_json(), "reference": self.reference.to_json()}
        return {"id": self.id, "tokens": self.tokens, **sides, "kl": [encode(value) for value in self.kl]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Inverse of :meth:`to_json`."""
        sides = (Side.from_json(data["engine"]), Side.from_json(data["reference"]))
        return cls(data["id"], *sides, data["tokens"], tuple(decode(value) for value in data["kl"]))

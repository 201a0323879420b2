"""The results of one sample on both sides: numbers, not tensors."""

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
    five digits; empty where the reference's results come from a baseline. ``floor``: the eager model in the engine's
    dtype, None where none was run; ``floor_kl``: KL(reference || floor). ``cluster``: samples that are no independent
    evidence share one; empty for a sample on its own.
    """

    id: str
    engine: Side
    reference: Side
    tokens: int = 0
    kl: tuple[float, ...] = ()
    floor: Side | None = None
    floor_kl: tuple[float, ...] = ()
    cluster: str = ""

    @property
    def group(self) -> str:
        """What is resampled as a whole: the cluster, or the sample itself."""
        return f"cluster {self.cluster}" if self.cluster else f"sample {self.id}"

    @property
    def is_text(self) -> bool:
        """Tell whether perplexity is measured on the sample."""
        return self.tokens > 0 and self.engine.correct is None

    @property
    def whole(self) -> bool:
        """Tell whether each side has as many results as positions were scored."""
        sides = [self.engine, self.reference, *([] if self.floor is None else [self.floor])]
        return len({len(side.top) for side in sides}) == 1 and all(
            len(kl) in (0, len(self.engine.top)) for kl in (self.kl, self.floor_kl)
        )

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON."""
        sides = {"engine": self.engine.to_json(), "reference": self.reference.to_json()}
        floor = {"floor": self.floor and self.floor.to_json(), "floor_kl": [encode(value) for value in self.floor_kl]}
        kl = [encode(value) for value in self.kl]
        return {"id": self.id, "cluster": self.cluster, "tokens": self.tokens, **sides, "kl": kl, **floor}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Inverse of :meth:`to_json`."""
        sides = (Side.from_json(data["engine"]), Side.from_json(data["reference"]))
        kl, floor_kl = (tuple(decode(value) for value in data[name]) for name in ("kl", "floor_kl"))
        floor = Side.from_json(data["floor"]) if data["floor"] else None
        return cls(data["id"], *sides, data["tokens"], kl, floor, floor_kl, data["cluster"])

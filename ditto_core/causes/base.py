"""What a cause is, what a rule looks at, and how rules are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Cause:
    """A named kind of fault: ``confidence`` 0 to 1, the evidence as lines for people, and what to do next."""

    kind: str
    site: str
    confidence: float
    evidence: tuple[str, ...]
    next_step: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.site}: {self.evidence[0]}" if self.evidence else f"{self.kind} at {self.site}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cause:
        """Inverse of :meth:`to_json`."""
        return cls(**{**data, "evidence": tuple(data["evidence"])})

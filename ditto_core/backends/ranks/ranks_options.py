"""Settings of the backend, as they stand in ``options=`` of an engine spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ditto_core.errors import UsageError, nearest
from ditto_core.spec import EngineSpec

KNOWN = ("ranks", "plan", "load")


@dataclass(frozen=True)
class RanksOptions:
    """Settings.

    ``ranks``: processes, each on a GPU of its own where there are any. ``plan``: rules over those of the model's own
    tensor-parallel plan, ``{"model.layers.*.mlp.down_proj": "rowwise"}``. ``load``: ``module:function`` that makes a
    rank's module, called with the model's directory, the rank and the number of ranks once the process group is up.
    """

    ranks: int = 2
    plan: Mapping[str, str] = field(default_factory=dict)
    load: str = ""

    @classmethod
    def of(cls, spec: EngineSpec) -> RanksOptions:
        """Read a spec's options. Raises :class:`UsageError` for an unknown name or value."""
        for name, _ in spec.options:
            if name not in KNOWN:
                known = ", ".join(KNOWN)
                raise UsageError(f"torch-tp has no option {name!r}{nearest(name, KNOWN)} (known: {known})")
        ranks, load = str(spec.option("ranks", 2)), str(spec.option("load", ""))
        if not ranks.isdecimal() or int(ranks) < 2:
            raise UsageError(f"torch-tp's ranks is {spec.option('ranks')!r}, expected a number from 2 on")
        if load and not all(load.partition(":")):
            raise UsageError(f"torch-tp's load is {load!r}, expected module:function")
        return cls(int(ranks), spec.table("plan"), load)

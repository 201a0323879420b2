"""Name and arguments of the marker ``ditto_gate``, as pytest registers it. Loads nothing."""

from __future__ import annotations

MARKER = "ditto_gate"
SIGNATURE = (
    f"{MARKER}(name='', *, suite='classics', limits={{}}, alpha=0.05, baseline=None, samples=None, shards=1, jobs=1, "
    "output=None, …): run a suite through the engine of `ditto_engine` and its reference. `name` is a table of "
    "[tool.ditto_core.gates]; `shards` makes so many tests, for xdist; `jobs` are processes of one test."
)

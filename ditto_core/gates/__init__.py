"""Accuracy gates: a suite through engine and reference, paired by sample, judged by tests that know their power.

Names are resolved on first use: a test run asks for them only where a gate runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ditto_core.gates.baseline import Baseline
    from ditto_core.gates.gate import Gate, run_gate
    from ditto_core.gates.policy import Policy
    from ditto_core.gates.result import GateResult, merge
    from ditto_core.gates.shards import Shard
    from ditto_core.gates.suite import Sample, Suite, load_suite
    from ditto_core.gates.verdict import GateVerdict
    from ditto_core.system.receipt import Receipt, make_receipt

_LAZY = {
    "Baseline": "ditto_core.gates.baseline",
    "Gate": "ditto_core.gates.gate",
    "GateResult": "ditto_core.gates.result",
    "GateVerdict": "ditto_core.gates.verdict",
    "Policy": "ditto_core.gates.policy",
    "Receipt": "ditto_core.system.receipt",
    "Sample": "ditto_core.gates.suite",
    "Shard": "ditto_core.gates.shards",
    "Suite": "ditto_core.gates.suite",
    "load_suite": "ditto_core.gates.suite",
    "make_receipt": "ditto_core.system.receipt",
    "merge": "ditto_core.gates.result",
    "run_gate": "ditto_core.gates.gate",
}

__all__ = [
    "Baseline",
    "Gate",
    "GateResult",
    "GateVerdict",
    "Policy",
    "Receipt",
    "Sample",
    "Shard",
    "Suite",
    "load_suite",
    "make_receipt",
    "merge",
    "run_gate",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ditto_core.gates' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)

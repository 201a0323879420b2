"""Comparisons made by hand: no engine runs."""

from __future__ import annotations

from typing import Any

import torch

from ditto_core.compare.comparison import Comparison
from ditto_core.compare.judging import judge
from ditto_core.compare.metrics import measure
from ditto_core.compare.result import SiteResult
from ditto_core.compare.tolerance import Tolerance
from ditto_core.compare.verdict import WITHIN, Verdict
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap

ENGINE = SessionInfo("onnxruntime float16", "onnxruntime", "float16", model="tiny", facts={"onnxruntime": "1"})
REFERENCE = SessionInfo("eager float32", "eager", "float32", model="tiny")
UNJUDGED = Verdict(WITHIN, "rel_l2", 0.0, 0.0, "")
FLOOR = 1e-3

SITES = (
    "model.layers.0.self_attn:q_rope",
    "model.layers.0.self_attn.o_proj",
    "model.layers.0.self_attn",
    "model.layers.0.mlp.down_proj",
    "model.layers.0",
    "lm_head",
)
TAPS = tuple(
    Tap(site, site, module_class="torch.nn.Linear", source=f"model.py:{i} forward: x{i}")
    for i, site in enumerate(SITES)
)


def measured(error: float) -> Any:
    """Metrics of 64 times 1 + error against 1: rel_l2 is ``error``."""
    return measure(torch.full((64,), 1 + error, dtype=torch.float64), torch.ones(64, dtype=torch.float64))


def compared(errors: dict[tuple[int, str], float], steps: int = 2, **fields: Any) -> Comparison:
    """A comparison of all sites at all steps: exact, save for ``errors`` by step and site. The bound is 4e-3."""
    results = [
        SiteResult(step, site, i, measured(errors.get((step, site), 0.0)), UNJUDGED, FLOOR)
        for step in range(steps)
        for i, site in enumerate(SITES)
    ]
    tolerance = Tolerance()
    return Comparison(ENGINE, REFERENCE, judge(results, tolerance, TAPS, ENGINE), tolerance, taps=TAPS, **fields)

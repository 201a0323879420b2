"""Comparisons built by hand, of tensors of a few elements: what their errors are is chosen, not computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ditto_core.compare.comparison import Comparison
from ditto_core.compare.judging import judge
from ditto_core.compare.metrics import Metrics, measure
from ditto_core.compare.result import ObserverEffect, SiteResult, TokenResult
from ditto_core.compare.tokens import measure_logits
from ditto_core.compare.tolerance import Tolerance
from ditto_core.compare.verdict import WITHIN, Verdict
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap

FLOOR = 1e-6
PARTS = ("input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "self_attn", "mlp.down_proj", "mlp")


def names(layers: int) -> tuple[str, ...]:
    """Seven sites a layer, the layer itself last, and the embedding before them."""
    blocks = (f"model.layers.{i}{f'.{part}' if part else ''}" for i in range(layers) for part in (*PARTS, ""))
    return ("model.embed_tokens", *blocks)


def measured() -> Metrics:
    """Metrics of [2 rows, 4 positions, 8] with a difference that grows with the position."""
    expected = torch.linspace(-1, 1, 64).reshape(2, 4, 8)
    actual = expected + torch.arange(4).reshape(1, 4, 1) * 1e-6
    return measure(actual, expected, axes=("batch", "length", ""))


def nan_metrics() -> Metrics:
    """Metrics of a pair whose engine side holds NaN at [0, 1, 2]."""
    expected = torch.ones(2, 4, 8)
    actual = expected.clone()
    actual[0, 1, 2] = math.nan
    return measure(actual, expected, axes=("batch", "length", ""))


def comparison(
    sites: tuple[str, ...],
    steps: int,
    error: Callable[[int, int], float],
    *,
    dump: str = "",
    tokens: bool = True,
    label: str = "onnxruntime float32",
) -> Comparison:
    """Make a comparison with ``error(step, number of the site)`` as rel-L2; NaN stands for a NaN in the engine."""
    template, broken = measured(), nan_metrics()
    taps = tuple(
        Tap(site, f"value_{i}", f"node_{i}", "torch.nn.Linear", f"models/tiny.py:{i + 10} in forward: x = f{i}(x)")
        for i, site in enumerate(sites)
    )
    taps = tuple(replace(tap, dtype="float32", axes=("batch", "length", "")) for tap in taps)
    unjudged = Verdict(WITHIN, "rel_l2", 0.0, 0.0, "")
    results = []
    for step in range(steps):
        for i, site in enumerate(sites):
            value = error(step, i)
            metrics = broken if math.isnan(value) else replace(template, rel_l2=value)
            results.append(SiteResult(step, site, i, metrics, unjudged, FLOOR))
    info = SessionInfo(label, "onnxruntime", "float32", model="tiny <llama>", facts={"onnxruntime": "1.32.0"})
    logits = torch.linspace(-3, 3, 16).repeat(2, 1)
    close = tuple(
        measure_logits(logits + 1e-3 * step * logits.sin(), logits, dtype="float32", step=step) for step in range(steps)
    )
    ids = tuple(range(steps))
    other = tuple(99 if step in (1, 2) else step for step in ids)
    row = TokenResult("Hey <you>", other, ids, near_ties=(2,) if steps > 2 else ())
    return Comparison(
        engine=info,
        reference=SessionInfo("eager float64", "eager", "float64", facts={"torch": "2.13"}),
        results=judge(results, Tolerance(), taps, info),
        tokens=(row, TokenResult("Second", ids, ids)) if tokens else (),
        logits=close if tokens else (),
        observer=ObserverEffect(0.0, 0, "logits"),
        taps=taps,
        dump=dump,
    )


def passing() -> Comparison:
    """Every site at half of its noise floor; 2 layers, 3 steps."""
    return comparison(names(2), 3, lambda step, i: FLOOR / 2)


def faulty() -> Comparison:
    """``model.layers.1.mlp.down_proj`` is wrong from step 0 on, by 1e-2, and so is what comes after it."""
    first = names(2).index("model.layers.1.mlp.down_proj")
    return comparison(names(2), 3, lambda step, i: 1e-2 if i >= first else FLOOR / 2)


def with_nan() -> Comparison:
    """The engine computes NaN from ``model.layers.0.mlp`` on, at step 1 alone."""
    first = names(2).index("model.layers.0.mlp")
    return comparison(names(2), 3, lambda step, i: math.nan if step == 1 and i >= first else FLOOR / 2)


def large() -> Comparison:
    """300 sites x 64 steps; a fault in the middle that grows with the steps."""
    sites = names(43)[:300]
    return comparison(sites, 64, lambda step, i: FLOOR * (1 + i / 300) * (1 if i < 150 else 1 + step * 3))

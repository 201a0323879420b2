"""Two aligned dumps become a :class:`Comparison`, as if they had been stepped beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ditto_core.compare.comparison import Comparison
from ditto_core.compare.dumps import DumpPairs, Pair
from ditto_core.compare.findings import find
from ditto_core.compare.judging import judge, unjudged
from ditto_core.compare.metrics import measure
from ditto_core.compare.result import SiteResult
from ditto_core.compare.tokens import LogitsMetrics, measure_logits, rounded_as
from ditto_core.compare.tolerance import EPSILON, INTEGERS, Tolerance
from ditto_core.compare.ulp import coarser
from ditto_core.compare.verdict import UNJUDGED
from ditto_core.dumps import Dump
from ditto_core.errors import UsageError
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.spec import DTYPES
from ditto_core.system.receipt import make_receipt

LOGITS = ("output:logits", "logits", "lm_head")
"""Names under which dumps hold a model's logits."""


def compare_offline(
    pairs: DumpPairs,
    *,
    tolerance: Tolerance | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    dtype: str = "",
    ignore_missing: bool = False,
) -> Comparison:
    """Measure and judge every pair of two dumps; the first dump is the engine's side.

    ``dtype`` decides the bounds where no rule does (default: what the dump says, else the coarsest of the tensors on
    either side; an 8-bit one only where there is no other); integers have to be equal, whatever ``rtol`` and ``atol``
    are. Names and steps that only one
    side has are in ``missing``, with ``ignore_missing`` in ``notes``; different shapes are in ``missing`` always.
    Raises :class:`UsageError` for a negative tolerance or a NaN.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise UsageError(f"{name} is {value}, expected a number of 0 or more")
    tolerance = tolerance or Tolerance()
    alone = one_sided(pairs)
    left_out = tuple(f"left out {name}: {reason}" for name, reason in alone.items()) if ignore_missing else ()
    known = dtype or pairs.actual.info.get("dtype", "")
    found = Found(tolerance, rtol, atol, equal_nan, {} if ignore_missing else alone, known)
    for pair in pairs.pairs():
        found.take(pair)
    called = [name for name in LOGITS if name in found.dtypes] if found.logits else []
    tolerance.check(found.dtypes, ["logits", *called] if found.logits else [])
    if not known:
        known = engine_dtype(found.dtypes.values())
    taps = tuple(
        Tap(name, "logits" if name in called else name, dtype=name_of(kind)) for name, kind in found.dtypes.items()
    )
    info = dump_info(pairs.actual, known)
    results = judge(found.results, tolerance, taps, info)
    return Comparison(
        engine=info,
        reference=dump_info(pairs.expected, pairs.expected.info.get("dtype", known)),
        results=results,
        tolerance=tolerance,
        logits=tuple(found.logits.values()),
        missing=unjudged(known, results, found.logits.values()) | found.missing,
        taps=taps,
        notes=(*pairs.notes, *left_out, *tolerance.idle(r.step for r in results), *reasons(pairs, results)),
        receipt=make_receipt(),
    )


@dataclass
class Found:
    """What is gathered while two dumps are read: place and dtype by name, ``logits`` by step.

    ``dtype`` is what is known of the engine's.
    """

    tolerance: Tolerance
    rtol: float | None
    atol: float | None
    equal_nan: bool
    missing: dict[str, str]
    dtype: str = ""
    results: list[SiteResult] = field(default_factory=list)
    order: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    logits: dict[int, LogitsMetrics] = field(default_factory=dict)

    def take(self, pair: Pair) -> None:
        """Measure a pair; one that cannot be compared is missing."""
        if pair.problem:
            self.missing.setdefault(pair.name, f"{pair.problem}, step {pair.step}")
            return
        kind = judged_dtype(pair.actual.dtype, pair.expected.dtype)
        exact = name_of(kind) in INTEGERS
        rtol, atol = self.tolerance.elementwise((pair.name,), pair.step)
        usual = (0.0, 0.0) if exact else (self.rtol, self.atol)
        metrics = measure(
            pair.actual,
            pair.expected,
            rtol=usual[0] if rtol is None else rtol,
            atol=usual[1] if atol is None else atol,
            equal_nan=self.equal_nan,
        )
        self.dtypes[pair.name] = kind if exact else self.dtypes.get(pair.name, kind)
        place = self.order.setdefault(pair.name, len(self.order))
        self.results.append(SiteResult(pair.step, pair.name, place, metrics, UNJUDGED))
        if pair.name in LOGITS and pair.step not in self.logits and pair.actual.dim() > 1 and metrics.count:
            self._take_logits(pair, kind)

    def _take_logits(self, pair: Pair, kind: torch.dtype) -> None:
        """Measure the last token's logits of [batch, length, vocab], all of [tokens, vocab]."""
        if name_of(kind) in DTYPES:
            a, b = (side[:, -1] if side.dim() == 3 else side for side in (pair.actual, pair.expected))
            self.logits[pair.step] = measure_logits(a, b, dtype=rounded_as(kind, self.dtype), step=pair.step)


def reasons(pairs: DumpPairs, results: Iterable[SiteResult]) -> tuple[str, ...]:
    """Say what would explain the first result that fails: swapped rows, a constant scale, a transposition, zeros."""
    bad = min((r for r in results if not r.ok), key=lambda r: (r.step, r.order), default=None)
    if bad is None:
        return ()
    pair = pairs.pair(bad.step, bad.site)
    found = find(pair.actual, pair.expected, bad.metrics)
    return tuple(f"{bad.site}, step {bad.step}: {finding.text}" for finding in found[:1])


def engine_dtype(dtypes: Iterable[torch.dtype]) -> str:
    """Return the coarsest floating dtype that has a bound, an 8-bit one only for want of others; else float32."""
    floats = [kind for kind in dtypes if name_of(kind) in EPSILON]
    wide = [kind for kind in floats if kind.itemsize > 1]
    found = wide or floats
    return name_of(max(found, key=lambda kind: EPSILON[name_of(kind)])) if found else "float32"


def judged_dtype(actual: torch.dtype, expected: torch.dtype) -> torch.dtype:
    """Return the coarser dtype, or that of the side with integers: ids are ids though the other tool wrote them as
    floats. An 8-bit integer beside a float is a quantized number, and no id.
    """
    for one, other in ((actual, expected), (expected, actual)):
        if name_of(one) in INTEGERS and one.itemsize > 1 and other.is_floating_point:
            return one
    return coarser(actual, expected)


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without its prefix."""
    return str(dtype).removeprefix("torch.")


def one_sided(pairs: DumpPairs) -> dict[str, str]:
    """Return what only one side has, with the reason."""
    missing: dict[str, str] = {}
    for names, path in ((pairs.only_actual(), pairs.actual.path), (pairs.only_expected(), pairs.expected.path)):
        for step, name in names:
            missing.setdefault(name, f"only in {path}, step {step}")
    ours, theirs = pairs.steps
    if ours != theirs:
        missing["step count"] = f"{ours} in {pairs.actual.path}, {theirs} in {pairs.expected.path}"
    return missing


def dump_info(dump: Dump, dtype: str) -> SessionInfo:
    """Describe a dump as a session."""
    facts: Mapping[str, str] = dict(dump.info)
    return SessionInfo(str(dump.path), dump.format, dtype, facts=facts, recorded=True)

"""Two aligned dumps become a :class:`Comparison`, as if they had been stepped beside each other."""

from __future__ import annotations

from collections.abc import Mapping

from ditto_core.backends.base import SessionInfo
from ditto_core.compare.comparison import Comparison
from ditto_core.compare.dumps import DumpPairs
from ditto_core.compare.judging import judge
from ditto_core.compare.metrics import measure
from ditto_core.compare.result import SiteResult
from ditto_core.compare.tolerance import EPSILON, UNJUDGED, Tolerance
from ditto_core.dumps import Dump
from ditto_core.errors import UsageError
from ditto_core.receipt import make_receipt
from ditto_core.sites import Tap


def compare_offline(
    pairs: DumpPairs,
    *,
    tolerance: Tolerance | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    dtype: str = "",
) -> Comparison:
    """Measure and judge every pair of two dumps; the first dump is the engine's side.

    ``dtype`` decides the bounds where no rule does (default: what the dump says, else that of its first tensor).
    Names, steps and shapes that only one side has are in ``missing``. Raises :class:`UsageError` for a negative
    tolerance or a NaN.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise UsageError(f"{name} is {value}, expected a number of 0 or more")
    results: list[SiteResult] = []
    missing = one_sided(pairs)
    tolerance = tolerance or Tolerance()
    order: dict[str, int] = {}
    for pair in pairs.pairs():
        if pair.problem:
            missing[pair.name] = pair.problem
            continue
        rule = tolerance.rule_for((pair.name,), pair.step)
        metrics = measure(
            pair.actual,
            pair.expected,
            rtol=rtol if rule is None or rule.rtol is None else rule.rtol,
            atol=atol if rule is None or rule.atol is None else rule.atol,
            equal_nan=equal_nan,
        )
        place = order.setdefault(pair.name, len(order))
        results.append(SiteResult(pair.step, pair.name, place, metrics, UNJUDGED))
        if not dtype and pair.actual.is_floating_point():
            dtype = pairs.actual.info.get("dtype") or str(pair.actual.dtype).removeprefix("torch.")
    tolerance.check(order)
    known = dtype if dtype in EPSILON else "float32"
    taps = tuple(Tap(name, name) for name in order)
    info = dump_info(pairs.actual, known)
    return Comparison(
        engine=info,
        reference=dump_info(pairs.expected, known),
        results=judge(results, tolerance, taps, info),
        tolerance=tolerance,
        missing=missing,
        taps=taps,
        notes=pairs.notes,
        receipt=make_receipt(),
    )


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
    return SessionInfo(str(dump.path), dump.format, facts.get("dtype", dtype), facts=facts)

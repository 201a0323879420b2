"""Two aligned dumps become a :class:`Comparison`, as if they had been stepped beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from ditto_core.compare.comparison import Comparison
from ditto_core.compare.dumps import DumpedPair, DumpPairs
from ditto_core.compare.findings import find
from ditto_core.compare.judging import judge, unjudged
from ditto_core.compare.result import STEPS, SiteResult
from ditto_core.compare.tolerance import EPSILON, INTEGERS, Tolerance, quantized_bounds
from ditto_core.dumps import Dump
from ditto_core.errors import UsageError
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.stepping.comparer import Comparer
from ditto_core.stepping.floor import BESIDE_TRACES, Floor, read_floor
from ditto_core.stepping.measured import Elementwise, Measured
from ditto_core.stepping.measuring import judged_dtype, name_of
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

    With ``rtol`` or ``atol`` every element has to be within them, as ``numpy.allclose`` judges; the one that is not
    given is the usual one of the tensors' dtype. ``dtype`` decides the bounds where neither these nor a rule does
    (default: what the dump says, else each tensor's own, the coarser of both sides); integers have to be equal. Names
    and steps that only one side has are in ``missing``, with ``ignore_missing`` in ``notes``; different shapes are in
    ``missing`` always.
    Raises :class:`UsageError` for a negative tolerance or a NaN.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise UsageError(f"{name} is {value}, expected a number of 0 or more")
    tolerance = replace(tolerance or Tolerance(), allclose=rtol is not None or atol is not None)
    alone = one_sided(pairs)
    inputs = [] if all(dump.taps for dump in (pairs.actual, pairs.expected)) else recorded_inputs(alone)
    said = [f"{name} was recorded on one side: {alone.pop(name)}" for name in inputs]
    said += [f"left out {name}: {reason}" for name, reason in alone.items()] if ignore_missing else []
    known = dtype or pairs.actual.info.get("dtype", "")
    found = Measured(floor=floor_of(pairs, said.append), missing={} if ignore_missing else alone)
    taps = step_through(pairs, found, tolerance, known, Elementwise(rtol, atol, equal_nan))
    called = [tap.site for tap in taps if tap.value == "logits"] if found.logits else []
    tolerance.check(
        [name for tap in taps for name in (tap.site, *tap.aliases)], ["logits", *called] if found.logits else []
    )
    if not known:
        known = engine_dtype(getattr(torch, tap.dtype) for tap in taps)
    info = dump_info(pairs.actual, known)
    results = judge(found.results, tolerance, taps, info)
    generated = any(r.step for r in results)
    return Comparison(
        engine=info,
        reference=dump_info(pairs.expected, pairs.expected.info.get("dtype", known)),
        results=results,
        tolerance=tolerance,
        logits=tuple(found.logits),
        missing=unjudged(known, results, found.logits, taps, generated=generated) | found.missing,
        taps=taps,
        notes=(*pairs.notes, *said, *tolerance.idle(r.step for r in results), *reasons(pairs, results)),
        receipt=make_receipt(),
    )


def step_through(
    pairs: DumpPairs, found: Measured, tolerance: Tolerance, dtype: str, elementwise: Elementwise
) -> tuple[Tap, ...]:
    """Measure every pair, two tensors at a time; return their taps in the order in which they came."""
    known = {tap.site: tap for tap in (*pairs.expected.taps, *pairs.actual.taps)}
    taps: dict[str, Tap] = {}
    order: dict[str, int] = {}
    comparer = None
    for pair in pairs.pairs():
        if pair.problem:
            found.missing.setdefault(pair.name, f"{pair.problem}, step {pair.step}")
            continue
        if comparer is None or comparer.step != pair.step:
            if comparer is not None:
                comparer.flush()
            inputs = tokens_of(pairs, pair.step)
            comparer = Comparer(
                (),
                pair.step,
                inputs,
                found,
                tolerance,
                dtype,
                generated=False,
                elementwise=elementwise,
                every_token=bool(dtype) and quantized_bounds(dtype) is not None,
            )
        tap = taps[pair.name] = tap_of(pair, known.get(pair.name), taps.get(pair.name), foreign=not known)
        final = pair.name.startswith("output:") or tap.value == "logits"
        comparer.compare(order.setdefault(pair.name, len(order)), tap, pair.actual, pair.expected, final=final)
        if tap.value == "logits":
            comparer.compare_logits(pair.actual, pair.expected)
    if comparer is not None:
        comparer.flush()
    return tuple(taps.values())


def tap_of(pair: DumpedPair, known: Tap | None, before: Tap | None, *, foreign: bool) -> Tap:
    """Describe a pair as a tap: as the trace on either side does, with the dtype that its numbers are judged by.

    Two ``foreign`` dumps, neither of them a trace, name no axes: three are taken for batch, position and width.
    """
    tap = known or Tap(pair.name, "logits" if pair.name in LOGITS else pair.name)
    if not known and (foreign or pair.name in LOGITS) and pair.actual.dim() == 3:
        tap = replace(tap, axes=("batch", "length", ""))
    if len(tap.axes) != pair.actual.dim():  # a name map cut or reshaped it
        tap = replace(tap, axes=())
    kind = torch.int64 if holds_ids(pair) else judged_dtype(pair.actual.dtype, pair.expected.dtype)
    dtype = tap.dtype if tap.dtype in INTEGERS else name_of(kind)
    return replace(tap, dtype=before.dtype if before and dtype not in INTEGERS else dtype)


def holds_ids(pair: DumpedPair) -> bool:
    """Tell whether a pair is called ids and has whole numbers on both sides, though a tool wrote them as floats."""
    sides = (pair.actual, pair.expected)
    if not pair.name.rpartition(".")[2].endswith("ids") or any(side.is_complex() for side in sides):
        return False
    return all(bool((side.double() == side.double().round()).all()) for side in sides)


def tokens_of(pairs: DumpPairs, step: int) -> dict[str, torch.Tensor]:
    """Return the tokens and their mask that a trace recorded; padding that a name map describes is cut already."""
    if pairs.name_map.padding is not None:
        return {}
    for dump in (pairs.expected, pairs.actual):
        names = [name for name in ("input_ids", "attention_mask") if dump.taps and f"input:{name}" in dump.names(step)]
        if names:
            return {name: dump.load(step, f"input:{name}") for name in names}
    return {}


def floor_of(pairs: DumpPairs, say: Callable[[str], None]) -> Floor:
    """Return the noise floor that lies beside the two traces of one run; none for any other two dumps.

    One that is damaged is said, and not used.
    """
    folder = pairs.actual.path.parent
    if (pairs.actual.path.name, pairs.expected.path) != ("engine", folder / "reference"):
        return {}
    return read_floor(folder / BESIDE_TRACES, say) or {}


def reasons(pairs: DumpPairs, results: Iterable[SiteResult]) -> tuple[str, ...]:
    """Say what would explain the first result that fails: swapped rows, a constant scale, a transposition, zeros."""
    bad = min((r for r in results if not r.ok), key=lambda r: (r.step, r.order), default=None)
    if bad is None:
        return ()
    pair = pairs.pair(bad.step, bad.site)
    found = find(pair.actual, pair.expected, bad.metrics)
    return tuple(f"{bad.site}, step {bad.step}: {finding.text}" for finding in found[:1])


def engine_dtype(dtypes: Iterable[torch.dtype]) -> str:
    """Return the coarsest floating dtype that has a bound, an 8-bit one only if there is no other; else float32."""
    floats = [kind for kind in dtypes if name_of(kind) in EPSILON]
    wide = [kind for kind in floats if kind.itemsize > 1]
    found = wide or floats
    return name_of(max(found, key=lambda kind: EPSILON[name_of(kind)])) if found else "float32"


def one_sided(pairs: DumpPairs) -> dict[str, str]:
    """Return what only one side has, with the reason."""
    missing: dict[str, str] = {}
    for names, path in ((pairs.only_actual(), pairs.actual.path), (pairs.only_expected(), pairs.expected.path)):
        for step, name in names:
            missing.setdefault(name, f"only in {path}, step {step}")
    if steps := "; ".join(lost_steps(pairs)):
        missing[STEPS] = steps
    return missing


def lost_steps(pairs: DumpPairs) -> Iterator[str]:
    """Yield what to say of the steps that only one side has, and of those that a run did not come to."""
    if len({*pairs.steps}) > 1:
        yield f"{pairs.steps[0]} in {pairs.actual.path}, {pairs.steps[1]} in {pairs.expected.path}"
    for dump in (pairs.actual, pairs.expected):
        if not dump.complete:
            yield f"the run of {dump.path} ended before its last step"
    for lost, path in zip(pairs.lost_steps(), (pairs.actual.path, pairs.expected.path), strict=True):
        if lost:
            yield f"{path} holds nothing of step {', '.join(map(str, lost))}"


def recorded_inputs(names: Iterable[str]) -> list[str]:
    """Return the names of a trace's inputs: beside the dump of a tool that records none they are no results."""
    return [name for name in names if name.startswith("input:")]


def dump_info(dump: Dump, dtype: str) -> SessionInfo:
    """Describe a dump as a session."""
    facts: Mapping[str, str] = dict(dump.info)
    return SessionInfo(str(dump.path), dump.format, dtype, facts=facts, kernels=dump.kernels, recorded=True)

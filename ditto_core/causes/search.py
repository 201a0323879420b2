"""The cheapest change of a site's own computation that gives the engine's tensor at every step, or none."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ditto_core.causes.confidence import SEVERAL, confidence
from ditto_core.causes.evidence import rel_l2
from ditto_core.causes.mutants import Edits, Model, Mutant, gloss, mutants
from ditto_core.causes.naming import kind_of
from ditto_core.causes.slices import Slice
from ditto_core.compare.blame import Cause
from ditto_core.compare.masks import hidden_share

CLOSE = 0.5
"""Difference in price up to which two explanations compete."""

MOST = 10
"""Explanations of different effect from which on the input cannot tell."""

FEWEST = 8
"""Numbers of a site that it takes to tell thousands of explanations apart."""

SAME = 1e-6
"""rel-L2 up to which two mutants do the same to random inputs."""

ONLY: tuple[tuple[str, Callable[[int], bool]], ...] = (
    ("in decode only", lambda step: step > 0),
    ("in the prefill only", lambda step: step == 0),
)

NEXT: Mapping[str, str] = {
    "operations": "compare this operation in the engine's graph with the model's line",
    "constants": "compare this constant in the engine with the model's",
    "ids": "compare the ids, positions and frequencies that the engine uses with the model's",
    "masks": "compare the mask that the engine builds with the model's",
    "tensors": "check which tensor the engine takes here",
    "ranks": "look for a missing all-reduce behind this layer, and check which share of the weight each rank loads",
    "formats": "look for a cast or a quantization here in the engine",
    "layouts": "compare the order of elements here: how the tensor is split, reshaped and transposed",
    "ranges": "check the bounds of slices, pads and loops here in the engine",
    "fits": "look for this number in the engine's operators here",
}
"""What to do, by family."""


@dataclass(frozen=True)
class Found:
    """A mutant that explains a site. ``error`` is what it leaves, rel-L2, at the first wrong step: in ``part``."""

    text: str
    price: float
    error: float
    mutant: Mutant
    edits: Edits
    part: Slice


def search(slices: Sequence[Slice], model: Model, seconds: float) -> tuple[list[Found], int, bool]:
    """Judge the mutants of a site's slices in the order of their price; stop once something explains.

    Mutants are judged at the first wrong step, and what explains it at all steps. Returns explanations, the cheapest
    first, how many mutants were judged, and whether there was time for all.
    """
    first = next(part for part in slices if part.flagged)
    small = first.narrowed()
    end = time.thread_time() + seconds
    found: list[Found] = []
    tried = 0
    for mutant in sorted(mutants(first, model), key=lambda mutant: mutant.price):
        if found and mutant.price > found[0].price + CLOSE:
            break
        if time.thread_time() > end:
            return found, tried, False
        tried += 1
        judged = judge(mutant, first, slices, small)
        if judged is not None:
            found = sorted([*found, judged], key=lambda f: (f.price, f.error))
    return [f for f in found if f.price <= found[0].price + CLOSE], tried, True


def judge(mutant: Mutant, first: Slice, slices: Sequence[Slice], small: Slice | None) -> Found | None:
    """Return what a mutant explains; one that cannot be computed explains nothing."""
    starts: Sequence[float] | None = mutant.starts
    try:
        if small is not None and first.costly(mutant.fit(1.0) if mutant.fit else mutant.edits):
            starts = screened(mutant, small)
        error, number, edits = (math.inf, 0.0, {}) if starts is None else settled(mutant, first, starts)
        if not first.explains(error, mutant.share):
            return None
        scope = scope_of(edits, slices, mutant.share)
    except Exception:  # noqa: BLE001 - many mutants fit no shape, and fail in as many ways
        return None
    if scope is None:
        return None
    text = mutant.text
    if mutant.fit is not None:
        text = text.replace("{}", said(number, mutant.starts[0], error / first.now))
    text, price = (f"{text}, {scope}", mutant.price + 1) if scope else (text, mutant.price)
    return Found(text, price, error, mutant, edits, first)


def screened(mutant: Mutant, small: Slice) -> Sequence[float] | None:
    """Return where the fit of a mutant begins that explains some output channels; None for one that does not."""
    try:
        error, number, _ = settled(mutant, small, mutant.starts)
    except Exception:  # noqa: BLE001 - it is no matter of single channels
        return mutant.starts
    return (number,) if small.explains(error / 2, mutant.share) else None


def settled(mutant: Mutant, part: Slice, starts: Sequence[float]) -> tuple[float, float, Edits]:
    """Return a mutant's error, the number that it has where one is fitted, and its edits."""
    if mutant.fit is None:
        return part.error(part.run(mutant.edits)), 0.0, mutant.edits
    error, number = min((fit(mutant.fit, start, part) for start in starts), default=(math.inf, 0.0))
    return error, number, mutant.fit(number)


def said(number: float, own: float, left: float) -> str:
    """Write a fitted number: known is how far it is from the model's ``own``, but for ten times the share ``left``."""
    doubt = min(10 * left, 0.1)
    return shown(number, doubt * abs(number - own)) + gloss(number, own, max(doubt, 1e-6))


def shown(number: float, doubt: float) -> str:
    """Write a number as the power of ten or with the fewest digits that say it within its uncertainty."""
    tens = 10.0 ** round(math.log10(abs(number))) if number and math.isfinite(number) else number
    tried = (math.copysign(tens, number), *(float(f"{number:.{digits}g}") for digits in range(1, 9)))
    return f"{next((near for near in tried if abs(near - number) <= doubt), number):.8g}"


def fit(edits: Callable[[float], Edits], start: float, part: Slice, steps: int = 9) -> tuple[float, float]:
    """Return the least error and the number it is at, by Gauss-Newton with a numeric derivative from ``start``."""
    best, number = (math.inf, start), start
    for step in range(steps):
        value = part.run(edits(number))
        error = part.error(value)
        best = min(best, (error, number))
        if step == 2 and best[0] > 0.5 * part.now:
            break  # it leads nowhere
        width = 1e-5 * max(abs(number), 1e-7)
        slope = part.seen.chosen((part.run(edits(number + width)) - value).double() / width)
        rest = part.seen.chosen(part.seen.actual - value.double())
        usable = torch.isfinite(slope) & torch.isfinite(rest)
        size = float(slope[usable].square().sum())
        if not size > 0:
            break
        most = 3 * max(abs(number), 1e-9) if number else 1.0
        move = max(-most, min(most, float((slope[usable] * rest[usable]).sum()) / size))
        if abs(move) < 1e-10 * abs(number):
            break
        number += move
    return best


def scope_of(edits: Edits, slices: Sequence[Slice], share: float) -> str | None:
    """Return at which steps a mutant explains the engine: empty for all; None where it does not."""
    explained = [part.explains(part.error(part.run(edits)), share) for part in slices]
    if all(explained):
        return ""
    for text, inside in ONLY:
        fair = (e if inside(part.seen.step) else not part.flagged for part, e in zip(slices, explained, strict=True))
        if all(fair):
            return text
    return None


def distinct(found: Iterable[Found], part: Slice) -> list[Found]:
    """Return the explanations that differ in effect on random inputs, of those that do not the cheapest alone."""
    kept: list[Found] = []
    outs: list[torch.Tensor] = []
    other = part.at_random(0)
    for item in found:
        out = effect(item.edits, other)
        if out is None or not any(o.shape == out.shape and rel_l2(o.flatten(), out.flatten()) <= SAME for o in outs):
            kept.append(item)
            outs += [] if out is None else [out]
    return kept


def effect(edits: Edits, part: Slice) -> torch.Tensor | None:
    """Return what a mutant gives there; None where that is no tensor of finite numbers."""
    try:
        out = part.run(edits)
    except Exception:  # noqa: BLE001 - what fails on random inputs is compared with nothing
        return None
    out = hidden_share(out) if part.mask else out.double()
    return out if bool(torch.isfinite(out).all()) else None


def tells(part: Slice) -> bool:
    """Tell whether the engine's tensor can tell explanations apart: NaN, zeros and few numbers fit too many."""
    actual, expected = part.seen.chosen(part.seen.actual), part.seen.chosen(part.expected.double())
    finite = bool(torch.isfinite(actual).all()) and bool(torch.isfinite(expected).all())
    enough = len(actual) >= FEWEST and bool(actual.any()) and bool(expected.any())
    return (finite and enough) or (part.mask and not bool(torch.isnan(actual).any()))


def explain(levels: Iterator[Sequence[Slice]], model: Model, seconds: float) -> tuple[Cause | None, str, Found | None]:
    """Return the cause of a site, a note where there is something to say and no cause, and what is named.

    ``levels``: the site's slices, then those with more of the code upstream unfolded. Empty slices, which do not
    reproduce the model, explain nothing.
    """
    end = time.thread_time() + seconds
    tried = 0
    for slices in levels:
        first = next((part for part in slices if part.flagged), None)
        if first is None or not tells(first):
            break
        found, count, complete = search(slices, model, end - time.thread_time())
        tried += count
        if found:
            return *named(distinct(found, first), slices, tried, model), found[0]
        if not complete:
            said = f"no cause among {tried} changes of the model's code tried in {seconds:.0f} s"
            return None, f"{first.seen.site}: {said}", None
    return None, "", None


def named(found: Sequence[Found], slices: Sequence[Slice], tried: int, model: Model) -> tuple[Cause | None, str]:
    """Make a cause of what explains a site: one explanation, or several that this input cannot tell apart."""
    first, best = found[0].part, found[0]
    site, steps = first.seen.site, ", ".join(str(part.seen.step) for part in slices)
    if len(found) > MOST:
        texts = "; ".join(item.text for item in found[:3])
        return None, f"{site}: the cause cannot be told on this input, {len(found)} changes explain it: {texts} …"
    evidence = [best.text, *(f"or: {item.text}" for item in found[1:3])]
    if len(found) > 3:
        evidence.append(f"or one of {len(found) - 3} more, which only another input can tell apart")
    judged_at = f"judged at {'steps' if len(slices) > 1 else 'step'} {steps}"
    evidence.append(f"that leaves {best.error:.1e} of an error of {first.now:.1e}; {judged_at}, {tried} changes tried")
    step = NEXT.get(best.mutant.family, "compare this place of the model's code with the engine's graph")
    rule = f"mutants.{best.mutant.family}"
    sure = confidence(rule if len(found) == 1 else SEVERAL)
    if len({item.mutant.family for item in found}) > 1:
        step += "; a longer prompt, padding or more rows may tell the explanations apart"
    kind = kind_of(best.mutant, best.edits, first, model)
    return Cause(kind, site, sure, tuple(evidence), step, rule=rule), ""

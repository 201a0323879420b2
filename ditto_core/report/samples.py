"""Elements of the dumped tensors: a random sample of each pair, and where the two sides differ most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ditto_core.errors import TraceError

if TYPE_CHECKING:
    import torch

    from ditto_core.compare.comparison import Comparison
    from ditto_core.compare.result import SiteResult
    from ditto_core.sites import Tap
    from ditto_core.trace import StepData

WORST = 10
SEED = 0


@dataclass(frozen=True)
class Element:
    """One element: its index, and its value on both sides."""

    index: tuple[int, ...]
    engine: float
    reference: float


@dataclass(frozen=True)
class Sample:
    """What is shown of one pair of tensors: ``count`` valid elements, of which ``engine`` and ``reference`` hold some.

    The sample is uniform, without replacement, with a fixed seed. ``worst`` are the elements with the largest
    difference of all, largest first; a NaN or Inf that stands on one side only comes before any number.
    """

    count: int
    engine: tuple[float, ...]
    reference: tuple[float, ...]
    worst: tuple[Element, ...]


def sample_dump(comparison: Comparison, results: Iterable[SiteResult], points: int) -> Mapping[tuple[int, str], Sample]:
    """Sample up to ``points`` elements of each result's tensors, by step and site.

    Tensors missing from the dump are left out; without a dump, or with a damaged one, the result is empty.
    """
    found: dict[tuple[int, str], Sample] = {}
    if not comparison.dump or not Path(comparison.dump, "engine").is_dir():
        return found
    with suppress(TraceError):
        for sides, group in steps_of(Path(comparison.dump), results):
            for result in group:
                pair = pair_of(sides, result, comparison.tap_of.get(result.site))
                if pair is not None:
                    found[result.step, result.site] = sample(*pair, points)
    return found


Sides = tuple["StepData", "StepData"]


def steps_of(dump: Path, results: Iterable[SiteResult]) -> Iterator[tuple[Sides, Iterable[SiteResult]]]:
    """Yield each step of a dump that is asked for, the engine's side and the reference's, with its results."""
    from ditto_core.trace import Trace

    engine, reference = (Trace.open(dump / side, verify=False) for side in ("engine", "reference"))
    for step, group in groupby(sorted(results, key=lambda r: r.step), key=lambda r: r.step):
        if step < min(engine.steps, reference.steps):
            yield (engine.step(step), reference.step(step)), group


Pair = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor | None"]


def pair_of(sides: Sides, result: SiteResult, tap: Tap | None) -> Pair | None:
    """Return the engine's tensor, the reference's, and which elements are valid; None where one side has none."""
    engine, reference = (tensor_of(step, result.site) for step in sides)
    if engine is None or reference is None or engine.shape != reference.shape or engine.is_complex():
        return None
    return engine, reference, validity(sides[1], tap, result.site, engine.ndim)


def tensor_of(step: StepData, site: str) -> torch.Tensor | None:
    """Return a tap, or a final output, of a step."""
    return step.taps[site] if site in step.taps else step.outputs.get(site)


def validity(step: StepData, tap: Tap | None, site: str, ndim: int) -> torch.Tensor | None:
    """Return the mask of the elements that belong to real tokens, None where all do."""
    from ditto_core.stepping.prompts import valid_elements

    if "attention_mask" not in step.inputs or "input_ids" not in step.inputs:
        return None
    axes = tap.axes if tap else ("batch", "length", "") if site == "logits" else ()
    if len(axes) != ndim:
        return None
    return valid_elements(axes, step.inputs["attention_mask"], step.inputs["input_ids"].shape[1])


def sample(
    engine: torch.Tensor, reference: torch.Tensor, valid: torch.Tensor | None, points: int, worst: int = WORST
) -> Sample:
    """Sample one pair of tensors of one shape; ``valid`` broadcasts to it."""
    import torch

    from ditto_core.compare._blocks import unravel

    shape = engine.shape
    a, b = engine.reshape(-1).double(), reference.reshape(-1).double()
    everything = torch.arange(a.numel())
    places = everything if valid is None else everything[valid.bool().expand(shape).reshape(-1)]
    a, b = a[places], b[places]
    size = (a - b).abs()
    size = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, size).nan_to_num(nan=torch.inf)
    top = size.topk(min(worst, size.numel())).indices.tolist()
    chosen = torch.randperm(a.numel(), generator=torch.Generator().manual_seed(SEED))[:points]
    elements = (Element(unravel(int(places[i]), shape), float(a[i]), float(b[i])) for i in top if size[i] > 0)
    return Sample(a.numel(), tuple(a[chosen].tolist()), tuple(b[chosen].tolist()), tuple(elements))

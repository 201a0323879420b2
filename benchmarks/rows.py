"""How far beyond its own noise floor is the worst row [batch, position] of a healthy engine?

Steps engine, reference and low-precision reference on random tokens. Prints, by dtype and number of rows, the largest
multiple of a row's floor (at least the median row's and half of epsilon), of the largest element's floor, and of the
whole tensor's; and four times the median floor: the smallest error of one usual row that the rule finds.

    python benchmarks/rows.py [--backend onnxruntime] [--device cpu] [--dtypes float16,float32] [--seeds 1]
        [--model DIR] [--length TOKENS]
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ditto_core.cache import Cache
from ditto_core.compare.rows import row_errors
from ditto_core.compare.tolerance import EPSILON
from ditto_core.engines.workspace import Workspace
from ditto_core.model.tiny import FAMILIES, tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec, ModelSource
from ditto_core.stepping.prompts import Sequencer, encode, greedy, valid_elements

LENGTHS = (2, 7, 17, 40, 97)


@dataclass(frozen=True)
class Sample:
    """One tap of one step: rows, elements a row, and the multiples of the floor of worst row, element and tensor."""

    dtype: str
    site: str
    rows: int
    width: int
    row: float
    element: float
    tensor: float
    smallest: float


def sources(model: str, seeds: int) -> Iterator[tuple[str, ModelSource]]:
    """Yield the models: a directory, or every tiny family with each seed."""
    if model:
        yield model, ModelSource(location=model)
        return
    for seed in range(seeds):
        for family in FAMILIES:
            yield f"{family} {seed}", ModelSource(factory=partial(tiny_decoder, family, seed=seed))


def step_samples(pair: Pair, prompts: Sequence[Sequence[int]], steps: int) -> Iterator[Sample]:
    """Step the three sessions of a pair and yield a sample for each tap with more than one row."""
    sessions = pair.sessions
    assert sessions.low_precision is not None
    sides = (sessions.engine, sessions.reference, sessions.low_precision)
    batch = encode(prompts)
    sequence = Sequencer(batch)
    taps = {tap.site: tap for tap in sessions.engine.taps}
    for side in sides:
        side.start(batch.rows)
    for _ in range(steps):
        inputs = sequence.inputs()
        found: list[dict[str, torch.Tensor]] = [{}, {}, {}]
        for side, kept in zip(sides, found, strict=True):
            outputs = side.step(inputs, lambda site, tensor, kept=kept: kept.update({site: tensor.clone()}))
            if side is sessions.reference:
                chosen = greedy(outputs["logits"])
        for site in found[0].keys() & found[1].keys() & found[2].keys():
            axes, tensors = taps[site].axes, [kept[site] for kept in found]
            valid = valid_elements(axes, inputs["attention_mask"], inputs["input_ids"].shape[1])
            yield from sample(pair.spec.dtype, site, axes, tensors, valid)
        sequence.advance(chosen)


def sample(
    dtype: str, site: str, axes: Sequence[str], tensors: Sequence[torch.Tensor], valid: torch.Tensor | None
) -> Iterator[Sample]:
    """Yield the sample of one tap, unless it is a mask, has a single row, or another shape on one side."""
    actual, expected, noisy = (tensor.to(tensors[1].device) for tensor in tensors)
    if actual.shape != expected.shape or not expected.is_floating_point() or expected.abs().max() > 1e30:
        return
    errors, floors = (row_errors(side, expected, axes, valid) for side in (actual, noisy))
    if errors is None or floors is None:
        return
    half = EPSILON[dtype] / 2
    floor = floors.clamp(min=max(half, float(floors.median())))
    d, n = (side.double() - expected.double() for side in (actual, noisy))
    if valid is not None:
        d, n = d * valid.to(d.device), n * valid.to(n.device)
    size = float(expected.double().square().mean().sqrt())
    element = float(d.abs().max()) / max(float(n.abs().max()), half * size)
    tensor = float(d.norm()) / max(float(n.norm()), half * float(expected.double().norm()))
    row, least = float((errors / floor).max()), 4 * float(floor.median())
    yield Sample(dtype, site, len(errors), expected.numel() // len(errors), row, element, tensor, least)


def table(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield (
        "| dtype | rows | samples | worst row / its floor: median, 99 %, 99.9 %, max "
        "| element: 99.9 %, max | tensor: max | smallest fault of a row |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    groups: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for found in samples:
        groups[found.dtype, next(top for top in (4, 20, 100, 1000, 10**9) if found.rows < top)].append(found)
    for (dtype, top), group in sorted(groups.items()):
        columns = ("row", "element", "tensor", "smallest")
        row, element, whole, least = (np.array([getattr(s, name) for s in group]) for name in columns)
        q = np.quantile(row, (0.5, 0.99, 0.999, 1))
        yield (
            f"| {dtype} | below {top} | {len(group)} | {', '.join(f'{x:.2f}' for x in q)} | "
            f"{np.quantile(element, 0.999):.2f}, {element.max():.2f} | {whole.max():.2f} | {np.median(least):.1e} |"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", default="float16,float32")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--model", default="")
    parser.add_argument("--length", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path(".demo/rows-cache"))
    options = parser.parse_args()
    workspace, samples = Workspace(Cache(options.cache)), []
    for name, source in sources(options.model, options.seeds):
        rng = random.Random(name)
        for dtype in options.dtypes.split(","):
            profile = {"batch": (1, 2, 4), "length": (1, 64, 4096), "past": (0, 64, 4096)}
            spec = EngineSpec.of(source, backend=options.backend, dtype=dtype, outputs=("**", "**:*"), profile=profile)
            pair = Pair(workspace, spec, PairOptions(observer=False, device=options.device))
            for length in [options.length] if options.length else rng.sample(LENGTHS, 3):
                count = 1 if options.length else rng.choice((1, 1, 2, 3))
                prompts = [[rng.randrange(3, 256) for _ in range(length + rng.choice((0, 3)))] for _ in range(count)]
                samples += step_samples(pair, prompts, 2)
            pair.close()
        print(f"# {name}: {len(samples)} samples", flush=True)
    print("\n".join(table(samples)))
    for worst in sorted(samples, key=lambda s: -s.row)[:5]:
        print("#", worst)


if __name__ == "__main__":
    main()

"""What the browser tests look at: real engines of tiny Llamas, built by ONNX Runtime, three of them with a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ditto_core.compare.comparison import Comparison
from ditto_core.engines.workspace import Workspace
from ditto_core.localize import EVERYTHING
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace, weights
from tests.faults.runs import PROMPT, nearly_tied
from tests.graph_faults import faulty_engine, scaled
from tests.models import llama

PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1]]
DOWN = "model.layers.1.mlp.down_proj"
STEPS = 4


def passing(workspace: Workspace, folder: Path) -> Comparison:
    """A healthy engine in float16, whose first token nearly ties; with the observer check and a dump."""
    spec = EngineSpec.of(nearly_tied, dtype="float16", outputs=EVERYTHING)
    return compared(Pair(workspace, spec, PairOptions(dump=folder / "dump")), prompts=PROMPT)


def faulty(workspace: Workspace, folder: Path) -> Comparison:
    """The weight of ``down_proj`` in layer 1 is scaled by 1.01; localized, with a dump and a repro."""
    pair = faulty_pair(workspace, folder, weights.scaled(DOWN, 1.01), PairOptions(dump=folder / "dump"))
    return compared(pair, localize=True, repro=folder / "repro")


def with_nan(workspace: Workspace, folder: Path) -> Comparison:
    """One channel of the weight of ``down_proj`` in layer 1 is NaN; localized, without a dump."""
    pair = faulty_pair(workspace, folder, weights.not_a_number(DOWN), PairOptions(observer=False))
    return compared(pair, localize=True)


def large(workspace: Workspace, folder: Path) -> Comparison:
    """Every value of the graph at 64 steps, with a fault in layer 1, against the healthy engine."""
    spec = EngineSpec.of(three_layers, outputs=(*EVERYTHING, "onnx:*"))
    engine = faulty_engine(workspace.build(spec), folder / "engine", scaled(DOWN, 1.01))
    return compared(Pair(workspace, spec, PairOptions(reference="onnxruntime", observer=False), engine), steps=64)


def three_layers() -> Any:
    return tiny_decoder("llama", layers=3)


RUNS = {"passing": passing, "faulty": faulty, "with_nan": with_nan, "large": large}


def faulty_pair(workspace: Workspace, folder: Path, fault: Any, options: PairOptions) -> Pair:
    """Return a pair whose engine has a fault, with and without taps alike."""
    return Pair(FaultyWorkspace(workspace.cache, fault, folder), EngineSpec.of(llama, outputs=EVERYTHING), options)


def compared(
    pair: Pair, *, prompts: Any = PROMPTS, steps: int = STEPS, localize: bool = False, repro: Path | None = None
) -> Comparison:
    """Run a pair as the plugin does: the comparison that it leaves knows its dump and its repros."""
    try:
        run = pair.generate(prompts, max_new_tokens=steps, localize=localize)
        if repro is not None:
            pair.save_repro(run.first_bad.site, repro)
        return pair.comparisons[-1]
    finally:
        pair.close()

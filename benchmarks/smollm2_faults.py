"""SmolLM2-135M with one fault at each of ten sites: the blamed site, the cause, the builds and the time.

    python benchmarks/smollm2_faults.py --model DIR --cache DIR

``DIR`` is the model's directory (GGUF or safetensors). Each case is one build and one run of 2 steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from ditto_core.localize import EVERYTHING
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace, cache, graph, mask, rope, weights

PROMPT = "The capital of France is Paris, and the capital of Italy is"
LAYERS = 30


def faults(layers: int = LAYERS) -> dict[str, tuple[Any, str, int]]:
    """Return fault, kind of cause and first step by site, in a model of the first ``layers`` of the 30.

    With less than four layers some of the ten sites fall together.
    """

    def at(layer: int) -> str:
        return f"model.layers.{layer * layers // LAYERS}"

    cached = 20 * layers // LAYERS
    epsilon = graph.constant_changed(f"{at(9)}.input_layernorm", "Add", lambda e: e * 100)
    scale = graph.constant_changed(f"{at(14)}.self_attn:probs", "Mul", lambda s: s * 1.001)
    return {
        f"{at(1)}.mlp.down_proj": (weights.scaled(f"{at(1)}.mlp.down_proj", 1.01), "weight scaled", 0),
        f"{at(10)}.mlp.down_proj": (weights.scaled(f"{at(10)}.mlp.down_proj", 1.0001), "weight scaled", 0),
        f"{at(9)}.input_layernorm": (epsilon, "norm epsilon", 0),
        f"{at(5)}.self_attn.q_proj": (weights.interleaved(f"{at(5)}.self_attn.q_proj", 9), "fused weight order", 0),
        f"{at(14)}.self_attn:probs": (scale, "attention scale", 0),
        "model.rotary_emb": (rope.frequencies(lambda f: f * 1.001), "RoPE scaling factor", 0),
        f"{at(20)}.self_attn:v_states": (cache.scaled(cached, "value", 0.99), "KV cache scale", 1),
        f"{at(0)}:in.attention_mask": (mask.without_self(), "mask off by one", 0),
        f"{at(25)}.mlp.up_proj": (weights.quantized(f"{at(25)}.mlp.up_proj"), "weights quantized", 0),
        f"{at(29)}": (graph.operand_alone(at(29), 1), "residual missing", 0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    spec = EngineSpec.of(options.model, outputs=EVERYTHING)
    store = Cache(options.cache)
    Workspace(store).build(spec)
    wrong, cases = 0, faults()
    print("| fault at | blamed | cause | builds | local | next largest | accumulated above 1e-5 | s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for site, (fault, kind, step) in cases.items():
        with tempfile.TemporaryDirectory(dir=options.cache) as folder:
            workspace = FaultyWorkspace(store, fault, Path(folder))
            start = time.perf_counter()
            pair = Pair(workspace, spec, PairOptions(observer=False))
            comparison = pair.generate(PROMPT, max_new_tokens=2, localize=True)
            seconds = time.perf_counter() - start
            pair.close()
        found = comparison.localization
        assert found is not None
        first, cause = found.first, found.cause
        right = first is not None and (first.site, first.step) == (site, step)
        wrong += not right
        others = [r.metrics.rel_l2 for r in found.results if first is None or r.site != first.site]
        inherited = sum(r.metrics.rel_l2 > 1e-5 for r in comparison.results)
        print(
            f"| {site} | {first.site if right and first else first} | {cause.kind if cause else '-'}"
            f"{'' if cause and cause.kind == kind else ' (expected ' + kind + ')'} | {workspace.builds} "
            f"| {first.local if first else 0:.1e} | {max(others):.1e} "
            f"| {inherited} of {len(comparison.results)} | {seconds:.0f} |",
            flush=True,
        )
        for item in found.blamed[1:4]:
            print(f"  also {item}")
        for line in cause.evidence if cause else ():
            print(f"  {line}")
    print(f"{len(cases) - wrong} of {len(cases)} blamed sites right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Faults in a layer as wide as an 8 B model's: seconds and memory of naming the cause.

    python benchmarks/cause_width.py --cache DIR [--width 4096]

One Llama layer, float32, 12 tokens and a decoding step, with one fault an engine: on one thread, the processor's
seconds of the search and by how much the process grew in it.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from ditto_core.cache import Cache
from ditto_core.compare.blame import Localization
from ditto_core.localize import EVERYTHING
from ditto_core.localize import diagnosis as diagnosing
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair import localizing
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace, graph, norm, weights

LAYER = "model.layers.0"
FAULTS: Mapping[str, tuple[str, Callable[[Any], None]]] = {
    "attention scale": (
        f"{LAYER}.self_attn:probs",
        graph.constant_changed(f"{LAYER}.self_attn:probs", "Mul", lambda c: c * 2),
    ),
    "epsilon": (f"{LAYER}.input_layernorm", norm.epsilon_outside(f"{LAYER}.input_layernorm", 1e-2)),
    "other activation": (f"{LAYER}.mlp.act_fn", graph.replaced(f"{LAYER}.mlp.act_fn", "Relu")),
    "input columns": (f"{LAYER}.self_attn.o_proj", weights.inputs_rolled(f"{LAYER}.self_attn.o_proj")),
    "noise": (f"{LAYER}.self_attn.o_proj", weights.noisy(f"{LAYER}.self_attn.o_proj", 1e-2)),
}


def wide(width: int) -> Any:
    """A Llama of one layer."""
    heads = width // 128
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads // 4}
    return tiny_decoder("llama", layers=1, head_dim=128, intermediate_size=width // 4, **sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured: dict[str, float] = {}

    def conclude(*args: Any) -> Localization:
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        found = diagnosing.conclude(*args)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        measured.update(seconds=time.process_time() - start, grown=grown / 2**20)
        return found

    localizing.conclude = conclude
    print("| fault | blamed | cause | s | GiB more | GiB in all |\n| --- | --- | --- | --- | --- | --- |")
    for name in options.faults:
        site, fault = FAULTS[name]
        with tempfile.TemporaryDirectory(dir=options.cache) as folder:
            spec = EngineSpec.of(partial(wide, options.width), outputs=EVERYTHING)
            pair = Pair(FaultyWorkspace(Cache(options.cache), fault, Path(folder)), spec, PairOptions(observer=False))
            found = pair.generate(list(range(5, 17)), max_new_tokens=2, localize=True).localization
            pair.close()
        cause = found.cause.evidence[0] if found and found.cause else "none"
        blamed = "right" if found and found.first and found.first.site == site else str(found and found.first)
        whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        numbers = " | ".join(f"{number:.1f}" for number in (measured["seconds"], measured["grown"], whole))
        print(f"| {name} | {blamed} | {cause} | {numbers} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

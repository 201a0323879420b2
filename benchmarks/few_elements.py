"""How often a healthy engine's logits leave their bound when there are few: ``python benchmarks/few_elements.py [N]``.

Tiny float32 and float16 BERT classifiers of 1 to 16 classes on ONNX Runtime, one row of 2 to 12 random tokens, N runs
each. Prints the share of runs whose logits exceed the factor times the noise floor, the share that exceeds the bound in
force, and the largest multiple of the floor.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ditto_core.cache import Cache
from ditto_core.compare.tolerance import EPSILON, FACTOR
from ditto_core.engines.workspace import Workspace
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec

CLASSES = (1, 2, 3, 4, 5, 6, 8, 16)
VOCABULARY = 128


def classifier(classes: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tiny BERT with a head, and example inputs."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(classes)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=VOCABULARY, num_labels=classes, **sizes)
    return BertForSequenceClassification(config).eval(), tokens(torch.Generator().manual_seed(0), 8)


def tokens(chance: torch.Generator, length: int) -> dict[str, torch.Tensor]:
    """One row of random tokens, all to be seen."""
    ids = torch.randint(VOCABULARY, (1, length), generator=chance)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def measure(workspace: Workspace, classes: int, dtype: str, runs: int) -> str:
    """Return a row of the table."""
    factory = functools.partial(classifier, classes)
    pair = Pair(workspace, EngineSpec.of(factory, outputs="classifier", dtype=dtype), PairOptions(observer=False))
    chance = torch.Generator().manual_seed(7)
    multiples, out = [], 0
    for _ in range(runs):
        length = int(torch.randint(2, 13, (), generator=chance))
        result = next(r for r in pair.run(tokens(chance, length)).results if r.site == "classifier")
        multiples.append(result.metrics.rel_l2 / max(result.floor, EPSILON[dtype] / 2))
        out += not result.verdict.ok
        pair.comparisons.clear()
    pair.close()
    beyond = sum(found > FACTOR for found in multiples) / runs
    return f"| {dtype} | {classes} | {beyond:.1%} | {out / runs:.1%} | {max(multiples):.3g} |"


def main(runs: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Cache(Path(folder)))
        for dtype in ("float32", "float16"):
            for classes in CLASSES:
                print(measure(workspace, classes, dtype, runs), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)

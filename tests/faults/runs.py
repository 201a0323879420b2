"""Causes that a whole run shows, or two runs side by side: real engines made so that one of them holds."""

from itertools import pairwise

import numpy as np
import torch

from ditto_core.causes.runs import two_run_causes
from ditto_core.localize import EVERYTHING
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace, graph, weights
from tests.models import gemma3, llama

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
DOWN = "model.layers.1.mlp.down_proj"
TIED = 7


def pair_with(workspace, directory, fault, model=llama, **fields):
    observer = fields.pop("observer", False)
    faulty = FaultyWorkspace(workspace.cache, fault, directory)
    return Pair(faulty, EngineSpec.of(model, outputs=EVERYTHING, **fields), PairOptions(observer=observer))


def nearly_tied():
    """Llama whose two best logits at the prompt's end are 1e-4 apart, though their rows of weights differ by 5 %.

    In float16 they are equal, so that the smaller id wins there, and in float32 the other.
    """
    model = tiny_decoder("llama")
    hidden = model.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    best = int((model.lm_head.weight @ hidden).argmax())
    row = model.lm_head.weight[best].clone()
    noise = 0.05 * row * torch.randn(row.shape, generator=torch.Generator().manual_seed(0))
    other = row + noise - hidden * (noise @ hidden) / (hidden @ hidden)
    model.lm_head.weight[TIED], model.lm_head.weight[best] = row, other * (1 + 1e-4)
    return model


def near_tie(workspace, directory):
    pair = Pair(workspace, EngineSpec.of(nearly_tied, outputs=EVERYTHING, dtype="float16"))
    comparison = pair.generate(PROMPT, max_new_tokens=1, localize=True)
    assert comparison.tokens[0].engine == (TIED,)
    assert comparison.tokens[0].differences == (0,)
    return comparison.localization.causes


def observer_effect(workspace, directory):
    fault = graph.only_plain(weights.scaled(DOWN, 1.5))
    pair = pair_with(workspace, directory, fault, observer=True)
    comparison = pair.generate(PROMPT, max_new_tokens=1, localize=True)
    assert not comparison.localization.blamed
    return comparison.localization.causes


def hidden_by_input(workspace, directory):
    """Gemma 3 normalizes after the MLP, so that a scale before it does not get through."""
    pair = pair_with(workspace, directory, weights.scaled(DOWN, 1.01), gemma3)
    found = pair.generate(PROMPT, max_new_tokens=1, localize=True).localization
    assert [item.site for item in found.blamed] == [DOWN]
    assert found.causes[0].kind == "weight scaled"
    assert found.causes[1].evidence[1] == f"{DOWN} is the last site that shows it"
    return found.causes[1:]


def build_spread(workspace, directory):
    """ONNX Runtime with and without graph optimization rounds float16 at other places."""

    def run(level):
        pair = Pair(workspace, EngineSpec.of(llama, outputs="**", dtype="float16", options={"level": level}))
        return pair.generate(PROMPT, max_new_tokens=2)

    optimized, plain = run("all"), run("disable")
    assert two_run_causes(optimized, optimized) == ()
    return two_run_causes(optimized, plain)


def split_product_in_a_batch(edit, value="logits", parts=32):
    """From two rows on, a float16 product is summed over parts and rounded after each, as split-K kernels do.

    One row is computed in one go. Rounding is Veltkamp's splitting, since the CPU provider drops casts.
    """
    node = edit.weighted(value)
    x = edit.insert_before(node, "Cast", [node.input[0]], to=graph.SINGLE)
    weight = edit.weight(value).astype(np.float32)
    ends = np.linspace(0, weight.shape[0], parts + 1).astype(np.int64)
    total = None
    for start, end in pairwise(ends):
        places = [edit.constant(np.array([v], np.int64)) for v in (start, end, -1)]
        part = edit.insert_before(node, "Slice", [x, *places])
        part = edit.insert_before(node, "MatMul", [part, edit.constant(weight[start:end])])
        total = part if total is None else edit.insert_before(node, "Add", [total, part])
        total = graph.rounded(edit, node, total, 10)
    split = edit.insert_before(node, "Cast", [total], to=graph.HALF)
    rows = edit.insert_before(node, "Shape", [node.input[0]], start=0, end=1)
    several = edit.insert_before(node, "Greater", [rows, edit.constant(np.array([1], np.int64))])
    edit.change_value(node.output[0], ("Where", [several, split, None], {}))


def batch_rounding(workspace, directory):
    """The two tied logits are equal alone, and part when the product is summed in another order."""
    pair = pair_with(workspace, directory, split_product_in_a_batch, nearly_tied, dtype="float16")
    alone = pair.generate(PROMPT, max_new_tokens=1)
    batched = pair.generate([PROMPT, PROMPT], max_new_tokens=1)
    pair.close()
    assert two_run_causes(batched, alone) == ()
    return two_run_causes(alone, batched)


CAUSES = {
    "runs.near_tie": ("near tie", near_tie),
    "runs.observer_effect": ("observer effect", observer_effect),
    "runs.hidden_by_input": ("hidden by this input", hidden_by_input),
    "runs.batch_rounding": ("batch-shape rounding", batch_rounding),
    "runs.build_spread": ("build-to-build spread", build_spread),
}
"""Rule -> kind, and what provokes it."""

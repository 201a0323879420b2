"""Real ONNX Runtime engines of every tiny model, step by step beside eager."""

import math

import pytest
import torch

from ditto_core.compare.judging import UNTAPPED
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec
from tests.models import DECODERS, bert, conv_net, tapped_net

PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [4, 5, 6], [9, 8, 7, 6, 5]]
EVERYTHING = ("**", "**:**")


@pytest.fixture(params=DECODERS, scope="module")
def pair(request, workspace):
    pair = Pair(workspace, EngineSpec.of(DECODERS[request.param], outputs=EVERYTHING))
    yield pair
    pair.close()


def test_every_tap_of_every_step_of_a_left_padded_batch_is_within_the_noise_floor(pair):
    run = pair.generate(PROMPTS, max_new_tokens=12)
    run.assert_close()
    run.assert_same_tokens()
    assert run.steps == 12
    assert not run.missing
    tapped = [site for site in run.sites if not site.endswith(UNTAPPED)]  # judged where its bits are others
    assert len(tapped) == len({tap.value for tap in pair.sessions.engine.taps}) >= 40
    assert all(result.floor is not None for result in run)
    assert run.observer is not None


def test_the_perplexity_of_the_prompts_is_what_transformers_says(pair, workspace):
    module = workspace.model(pair.spec.model).module
    run = pair.generate(PROMPTS, max_new_tokens=2)
    losses = [module(input_ids=torch.tensor([p]), labels=torch.tensor([p])).loss for p in PROMPTS]
    counts = [len(prompt) - 1 for prompt in PROMPTS]
    mean = sum(float(loss) * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert run.logits[0].perplexity_expected == pytest.approx(math.exp(mean), rel=1e-4)
    assert run.logits[0].perplexity_actual == pytest.approx(run.logits[0].perplexity_expected, rel=1e-4)
    assert (run.logits[1].perplexity_actual, run.logits[1].perplexity_expected) == (None, None)


def test_nearly_every_single_output_module_is_one_engine_tensor_and_the_rest_are_listed(pair, workspace):
    provenance = workspace.export(pair.spec).provenance
    module = workspace.model(pair.spec.model).module
    called: dict[str, int] = {}
    outputs: dict[str, int] = {}
    for path, child in module.named_modules():
        if path:
            child.register_forward_hook(count_outputs(path, called, outputs))
    module(input_ids=torch.tensor([PROMPTS[0]]))
    for child in module.modules():
        child._forward_hooks.clear()
    single = [path for path, count in outputs.items() if count == 1 and called[path] == 1]
    mapped = [path for path in single if provenance.find(path) is not None]
    assert len(mapped) >= 0.95 * len(single)
    assert len(single) >= 15
    assert set(single) - set(mapped) <= set(provenance.unmapped)


def count_outputs(path, called, outputs):
    def hook(module, args, output):
        called[path] = called.get(path, 0) + 1
        outputs[path] = 1 if isinstance(output, torch.Tensor) else len(output)

    return hook


def test_sites_carry_the_module_class_and_the_eager_source_line(workspace):
    provenance = workspace.export(EngineSpec.of(DECODERS["llama"])).provenance
    tap = provenance.find("model.layers.1.mlp.down_proj")
    assert tap is not None
    assert tap.module_class == "torch.nn.modules.linear.Linear"
    assert "modeling_llama.py" in tap.source
    assert "down_proj" in tap.source
    assert tap.fx_node
    assert tap.axes == ("batch", "length", "")


@pytest.mark.parametrize("source", [bert, conv_net, tapped_net])
def test_a_model_that_is_no_decoder_passes_in_one_step(source, workspace):
    pair = Pair(workspace, EngineSpec.of(source, outputs=EVERYTHING))
    run = pair.run()
    run.assert_close()
    assert run.steps == 1
    assert len(run) >= 3
    pair.close()


def test_a_model_with_floating_inputs_is_exported_in_half_precision(workspace):
    pair = Pair(workspace, EngineSpec.of(conv_net, outputs="**", dtype="float16"))
    run = pair.run()
    run.assert_close()
    assert run.results[0].metrics.rel_l2 > 1e-5
    pair.close()


def test_another_batch_size_than_the_examples_runs(workspace):
    pair = Pair(workspace, EngineSpec.of(conv_net, outputs="**"))
    pair.run({"input": torch.randn(5, 3, 16, 16)}).assert_close()
    pair.close()


def test_a_tensor_named_inside_eager_code_is_a_site_of_its_module(workspace):
    pair = Pair(workspace, EngineSpec.of(tapped_net, outputs="**:inter"))
    run = pair.run()
    assert "mlp:inter" in run.sites
    run.assert_close()
    pair.close()


def test_free_running_sides_agree_over_the_same_text(workspace):
    pair = Pair(workspace, EngineSpec.of(DECODERS["llama"], outputs="model.layers.*"))
    run = pair.generate(PROMPTS[0], max_new_tokens=8, forced=False)
    run.assert_close()
    assert run.tokens[0].engine == run.tokens[0].reference
    assert run.steps == 8
    pair.close()


def test_sdpa_attention_is_exported_and_compared_with_sdpa_eager(workspace):
    pair = Pair(workspace, EngineSpec.of(DECODERS["llama"], outputs=EVERYTHING, attention="sdpa"))
    run = pair.generate(PROMPTS[0], max_new_tokens=4)
    run.assert_close()
    assert "model.layers.0.self_attn:probs" not in run.sites
    pair.close()


def test_a_site_under_an_alias_is_compared_under_that_name(workspace):
    outputs = {"model.layers.1.mlp.down_proj": "down", "model.norm": "last"}
    pair = Pair(workspace, EngineSpec.of(DECODERS["llama"], outputs=outputs))
    run = pair.generate(PROMPTS, max_new_tokens=2)
    run.assert_close()
    assert {"down", "last"} <= set(run.sites)
    assert all(result.floor is not None for result in run)
    whole = Pair(workspace, EngineSpec.of(DECODERS["llama"], outputs=EVERYTHING)).generate(PROMPTS, max_new_tokens=2)
    error = {r.site: r.metrics.rel_l2 for r in whole if r.step == 0}
    assert {r.site: r.metrics.rel_l2 for r in run if r.step == 0}["last"] == error["model.norm"]

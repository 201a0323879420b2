"""Families of transformers that need something of their own: real engines beside eager. benchmarks/zoo.py runs all."""

import pytest
import torch
import transformers

from ditto_core.errors import UsageError
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec
from tests.zoo import FAMILIES, USUAL, VISION, factory

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
EVEN = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]


@pytest.fixture
def pair_of(workspace):
    pairs = []

    def make(name, **fields):
        pairs.append(Pair(workspace, EngineSpec.of(factory(name), **{"outputs": "**", **fields})))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("family", ["mixtral", "llama4", "falcon", "deepseek_v2"])
def test_experts_complex_rotations_and_caches_of_other_shapes_pass_with_the_references_tokens(pair_of, family):
    run = pair_of(family).generate(PROMPTS, max_new_tokens=4)
    run.assert_close()
    run.assert_same_tokens()
    assert run.steps == 4


TRACED = {"backend": "inductor", "options": {"compiler": "aot_eager"}}
"""An engine of the exported program; the others are of ONNX."""


@pytest.mark.parametrize("fields", [{}, TRACED])
def test_a_convolutions_window_is_carried_beside_keys_and_values(pair_of, fields):
    pair = pair_of("lfm2", **fields)
    run = pair.generate(EVEN, max_new_tokens=4)
    run.assert_close()
    run.assert_same_tokens()
    assert "past_key_values.0.conv" in pair.sessions.export.inputs
    with pytest.raises(UsageError, match=r"padding would enter the state 0\.conv"):
        pair.generate(PROMPTS, max_new_tokens=2)


def test_a_scan_takes_prompts_of_one_chunk_and_of_several(pair_of):
    pair = pair_of("mamba2")  # chunks of 8
    for tokens in (5, 20):
        pair.generate([list(range(3, 3 + tokens))], max_new_tokens=2).assert_close()


@pytest.mark.parametrize("family", ["bart", "vit", "resnet", "resnet50", "regnet", "clip"])
def test_other_models_pass_on_inputs_made_from_their_configuration(pair_of, family):
    run = pair_of(family).run()
    run.assert_close()
    assert len(run.sites) >= 20


def test_segformer_takes_images_of_three_sizes(pair_of):
    pair = pair_of("segformer", profile={"height": (32, 64, 128), "width": (32, 64, 128)})
    for height, width in ((64, 64), (32, 96), (128, 64)):
        pair.run({"pixel_values": torch.rand(2, 3, height, width)}).assert_close()


def test_a_reference_that_fills_in_the_lowest_float64_computes(pair_of):
    pair = pair_of("xglm", outputs="model.layer_norm")
    session = pair.workspace.eager(pair.spec, (), dtype="float64")
    session.start(1)
    ids = torch.tensor([[5, 6, 7]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(3)[None]}
    assert session.step(given, lambda site, tensor: None)["logits"].dtype == torch.float64
    session.close()


def test_a_part_that_text_tokens_do_not_reach_is_told(pair_of, monkeypatch):
    pair = pair_of("llama", outputs="model.norm")
    monkeypatch.setattr(pair.model_config, "vision_config", {"hidden_size": 8}, raising=False)
    assert "vision" in " ".join(pair.generate([[5, 6, 7]], max_new_tokens=1).notes)
    monkeypatch.delattr(pair.model_config, "vision_config")
    assert "vision" not in " ".join(pair.generate([[5, 6, 7]], max_new_tokens=1).notes)


def llava():
    """Tokens 2 to 17 of each row are an image's."""
    torch.manual_seed(0)
    vision, text = {"model_type": "clip_vision_model", **VISION}, {"model_type": "llama", **USUAL}
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=100, image_seq_length=16)
    ids = torch.randint(3, 90, (2, 20))
    ids[:, 2:18] = 100
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 32, 32)}
    return transformers.LlavaForConditionalGeneration(config).eval(), given


def test_a_vision_language_model_runs_its_vision_tower_on_images_that_are_given(workspace):
    run = Pair(workspace, EngineSpec.of(llava, outputs="**")).run()
    run.assert_close()
    assert {"model.vision_tower.embeddings.patch_embedding", "model.multi_modal_projector.linear_2"} <= set(run.sites)


def test_families_are_called_what_they_are():
    assert len(FAMILIES) >= 80
    assert factory("llama").__name__ == "llama"


def test_a_text_model_that_needs_an_image_at_every_step_runs_once_from_its_directory(workspace, tmp_path):
    FAMILIES["blip"]().save_pretrained(tmp_path / "blip")
    pair = Pair(workspace, EngineSpec.of(str(tmp_path / "blip"), outputs="text_decoder.*"))
    run = pair.run()
    pair.close()
    run.assert_close()
    assert {"pixel_values", "input_ids"} == set(pair.sessions.model.examples)


def misrouted():
    """A mixture of experts whose exported router turns its scores around."""
    module = factory("qwen3_moe")()

    def turned(gate, inputs):
        return (-inputs[0],) if torch.compiler.is_exporting() else None

    module.model.layers[1].mlp.gate.register_forward_pre_hook(turned)
    return module


def test_a_router_that_is_wrong_gets_no_excuse_in_half_precision(workspace):
    pair = Pair(workspace, EngineSpec.of(misrouted, dtype="float16", outputs="**"))
    run = pair.generate(PROMPTS, max_new_tokens=2)
    pair.close()
    assert "model.layers.1.mlp.gate" in {r.site for r in run.failures}
    assert not run
    assert [r for r in run.failures if r.final]


def test_the_router_of_a_mixture_is_known_by_how_many_experts_it_chooses(pair_of):
    pair = pair_of("mixtral", dtype="float16")
    chosen = {tap.site: tap.choice for tap in pair.engine.taps if tap.choice}
    assert chosen == {"model.layers.0.mlp.gate": 2, "model.layers.1.mlp.gate": 2}

"""Decoders that see images generate: the images come with the first step, tokens alone after it."""

from contextlib import closing

import pytest
import torch

from ditto_core.cache import Cache
from ditto_core.errors import UsageError
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec
from tests.faults.graph import scaled
from tests.faults.inject import FaultyWorkspace
from tests.zoo import FAMILIES, factory, patched, pictured

STEPS = 4
llava, qwen2_vl = factory("llava"), factory("qwen2_vl")
TOWER = "model.vision_tower.encoder.layers.1.mlp.fc2"


@pytest.fixture
def pair_of(workspace):
    pairs = []

    def make(source, workspace=workspace, outputs="**"):
        pairs.append(Pair(workspace, EngineSpec.of(source, outputs=outputs)))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def tokens_of_transformers(module, given):
    found = module.generate(**given, do_sample=False, num_beams=1, eos_token_id=None, max_new_tokens=STEPS)
    return found[:, -STEPS:].tolist()


def padded():
    """The second row is three tokens shorter, padded on the left."""
    given = pictured()
    ids = given["input_ids"]
    ids[1] = torch.cat([torch.zeros(3, dtype=torch.int64), ids[1, :17]])
    given["attention_mask"][1, :3] = 0
    return given


@pytest.mark.parametrize("given", [pictured(), padded()], ids=["even", "padded"])
def test_every_step_passes_on_the_tokens_of_transformers_own_generate(pair_of, given):
    pair = pair_of(llava)
    run = pair.generate(given, max_new_tokens=STEPS)
    run.assert_close()
    run.assert_same_tokens()
    assert [list(row.engine) for row in run.tokens] == tokens_of_transformers(pair.sessions.model.module, given)
    sites = {step: {r.site for r in run if r.step == step} for step in range(STEPS)}
    assert {TOWER, "model.multi_modal_projector.linear_2"} <= sites[0]
    assert not any("vision_tower" in site for site in sites[STEPS - 1])
    assert "model.language_model.layers.1.mlp.down_proj" in sites[STEPS - 1]
    assert not run.missing
    assert not run.notes


def weak(edit):
    """The tower's last product is one percent too large; the later steps' graph has no tower."""
    if any(TOWER in node.output for node in edit.graph.node):
        scaled(TOWER, 1.01)(edit)


def test_a_fault_in_the_vision_tower_is_named_at_its_site(pair_of, shared_cache_dir, tmp_path):
    faulty = FaultyWorkspace(Cache(shared_cache_dir), weak, tmp_path)
    run = pair_of(llava, faulty).generate(pictured(), max_new_tokens=2, localize=True)
    assert not run
    assert (run.first_bad.site, run.first_bad.step) == (TOWER, 0)
    assert [(blamed.site, blamed.step) for blamed in run.localization.blamed] == [(TOWER, 0)]


def test_what_it_takes_is_told_and_what_takes_tokens_alone_names_the_way_to_images(pair_of, workspace, tmp_path):
    with pytest.raises(UsageError, match=r"llava takes input_ids, pixel_values, .*: call generate\(\{name: tensor\}\)"):
        pair_of(llava).generate([[5, 6, 7]])
    FAMILIES["llava"]().save_pretrained(tmp_path / "llava")
    with pytest.raises(UsageError, match=r"got inputs by name, .* callable that returns \(module, \{name: tensor\}\)"):
        pair_of(str(tmp_path / "llava")).generate(pictured())


def test_a_grid_that_the_models_code_reads_is_held_at_the_examples(pair_of, capfd):
    """Its rotary positions are the model's own, [3, batch, length]."""
    pair = pair_of(qwen2_vl)
    run = pair.generate(patched(), max_new_tokens=STEPS)
    run.assert_close()
    run.assert_same_tokens()
    assert [list(row.engine) for row in run.tokens] == tokens_of_transformers(pair.sessions.model.module, patched())
    assert "model.visual.blocks.1.mlp.fc2" in run.sites
    assert [note for note in run.notes if note.startswith("image_grid_thw is a constant of this engine")]
    wide = {**patched(), "image_grid_thw": torch.tensor([[1, 2, 8]])}
    with pytest.raises(UsageError, match=r"'image_grid_thw' is held at \[\[1, 4, 4\]\]"):
        pair.generate(wide, max_new_tokens=1)
    assert "aten" not in capfd.readouterr().err


def test_attention_that_runs_once_a_window_has_a_site_for_each(workspace):
    with closing(Pair(workspace, EngineSpec.of(factory("qwen2_5_vl"), outputs=("**", "**:**")))) as pair:
        run = pair.generate(patched(), max_new_tokens=STEPS)
        run.assert_close()
        tokens = tokens_of_transformers(pair.sessions.model.module, patched())
    assert [list(row.engine) for row in run.tokens] == tokens
    windows = {"model.visual.blocks.0.attn:context", "model.visual.blocks.0.attn:context@1"}
    assert windows < set(run.sites)
    assert "model.visual.blocks.1.attn:context@1" not in run.sites, "of full attention"


def test_an_example_with_another_grid_is_exported_again(workspace):
    grid = [1, 4, 4]

    def seen():
        return FAMILIES["qwen2_vl"](), {**patched(), "image_grid_thw": torch.tensor([grid])}

    held = []
    for grid[1:] in ([4, 4], [2, 8]):
        spec = EngineSpec.of(seen, outputs="model.visual.merger")
        pair = Pair(type(workspace)(workspace.cache), spec)
        pair.run().assert_close()
        held.append(pair.sessions.export.held)
        pair.close()
    assert held == [{"image_grid_thw": [[1, 4, 4]]}, {"image_grid_thw": [[1, 2, 8]]}]

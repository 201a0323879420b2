"""Encoder-decoders generate: the encoder runs in the first step, the decoder in all, with both attentions' caches."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from ditto_core.cache import Cache
from ditto_core.cli.run import command as run_command
from ditto_core.engines.staged import copy_engine
from ditto_core.errors import UsageError
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec
from tests.faults.inject import FaultyWorkspace
from tests.zoo import FAMILIES, factory

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
STEPS = 5
RULES = ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids")


def small(name, **fields):
    """Make a family of the zoo with one layer on each side."""
    layers = {"num_layers": 1} if name == "t5" else {"encoder_layers": 1, "decoder_layers": 1}
    return replace(FAMILIES[name], fields={**FAMILIES[name].fields, **layers, **fields})()


def t5():
    """Of larger weights than the zoo's, so that it does not repeat one token."""
    return small("t5", initializer_factor=4.0, tie_word_embeddings=False)


def whisper():
    return small("whisper")


def sounds():
    return {"input_features": torch.randn(2, 16, 60, generator=torch.Generator().manual_seed(1))}


SOURCES = {"t5": (t5, PROMPTS), "whisper": (whisper, sounds())}


@pytest.fixture
def pair_of(workspace):
    pairs = []

    def make(source, workspace=workspace, **fields):
        pairs.append(Pair(workspace, EngineSpec.of(source, **{"outputs": "**", **fields})))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def tokens_of_transformers(module, given, *, plain=False):
    """What ``generate`` of transformers makes of the same source, [rows, STEPS]; ``plain``: all tokens are allowed."""
    if not isinstance(given, dict):
        given = {
            "input_ids": torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        }
    settings = copy.deepcopy(module.generation_config)
    settings.update(do_sample=False, num_beams=1, eos_token_id=None, max_new_tokens=STEPS)
    if plain:
        settings.update(**dict.fromkeys(RULES), no_repeat_ngram_size=0)
    return module.generate(**given, generation_config=settings)[:, -STEPS:].tolist()


@pytest.mark.parametrize("name", SOURCES)
def test_every_step_passes_on_the_tokens_of_transformers_own_generate(pair_of, name):
    source, given = SOURCES[name]
    pair = pair_of(source)
    run = pair.generate(given, max_new_tokens=STEPS)
    run.assert_close()
    run.assert_same_tokens()
    assert run.steps == STEPS
    assert not run.missing
    assert [list(row.engine) for row in run.tokens] == tokens_of_transformers(pair.sessions.model.module, given)
    sites = {step: {r.site for r in run if r.step == step} for step in range(STEPS)}
    encoder = {site for site in sites[0] if "encoder." in site.replace("decoder.", "")}
    assert len(encoder) >= 9
    assert not encoder & sites[1]
    assert len([site for site in sites[STEPS - 1] if "decoder." in site]) >= 14
    assert all(result.floor is not None for result in run)
    whole = pair.run()
    whole.assert_close()
    assert len(whole.sites) >= 20


def bart():
    """Its first and last tokens are forced, no pair of tokens may come twice, and it may not say what it would."""
    module = small("bart", init_std=0.5)
    settings = module.generation_config
    settings.forced_bos_token_id, settings.forced_eos_token_id, settings.no_repeat_ngram_size = 7, 2, 2
    ids = tokens_of_transformers(module, PROMPTS, plain=True)
    settings.suppress_tokens, settings.bad_words_ids = sorted({row[1] for row in ids}), [[ids[0][2]]]
    return module


def marian():
    return small("marian")


@pytest.mark.parametrize("source", [bart, marian])
def test_models_that_clamp_what_overflows_in_float16_pass_in_it(pair_of, source):
    pair = pair_of(source, dtype="float16", outputs=["model.encoder.layers.0", "model.decoder.layers.0"])
    pair.generate(PROMPTS, max_new_tokens=2).assert_close()


def hushed():
    module = small("whisper")
    settings = module.generation_config
    settings.begin_suppress_tokens = [row[0] for row in tokens_of_transformers(module, sounds())]
    return module


@pytest.mark.parametrize(("source", "given"), [(bart, PROMPTS), (hushed, sounds())])
def test_forced_and_suppressed_tokens_are_those_of_transformers_own_generate(pair_of, source, given):
    pair = pair_of(source, outputs="lm_head" if source is bart else "proj_out")
    run = pair.generate(given, max_new_tokens=STEPS)
    run.assert_close()
    run.assert_same_tokens()
    module, found = pair.sessions.model.module, [list(row.engine) for row in run.tokens]
    assert found == tokens_of_transformers(module, given)
    settings = module.generation_config
    free = {token for row in found for token in (row[1:-1] if source is bart else row[:1])}
    assert not free & {*(settings.suppress_tokens or settings.begin_suppress_tokens)}
    if source is bart:
        assert {(row[0], row[-1]) for row in found} == {(7, 2)}


def test_the_decoder_may_start_with_several_tokens(pair_of):
    pair = pair_of(whisper)
    run = pair.generate({**sounds(), "decoder_input_ids": torch.tensor([[1, 7, 9], [1, 8, 9]])}, max_new_tokens=2)
    run.assert_close()
    assert {r.step for r in run} == {0, 1}


def other_values(edit):
    """In the later steps' graph, layer 0 attends to the keys of what was encoded in place of the values."""
    for node in edit.graph.node:
        node.input[:] = ["state.0.cross_key" if name == "state.0.cross_value" else name for name in node.input]


def test_a_fault_in_the_decoders_cross_attention_is_found_at_its_site_and_step(pair_of, shared_cache_dir, tmp_path):
    faulty = FaultyWorkspace(Cache(shared_cache_dir), other_values, tmp_path)
    run = pair_of(whisper, faulty, outputs=("**", "**:**")).generate(sounds(), max_new_tokens=3, localize=True)
    assert not run
    assert (run.first_bad.site, run.first_bad.step) == ("model.decoder.layers.0.encoder_attn:context", 1)
    first = run.localization.first
    assert (first.site, first.step) == ("model.decoder.layers.0.encoder_attn:context", 1)
    assert [blamed.site for blamed in run.localization.blamed] == [first.site]


def test_a_healthy_encoder_decoder_is_blamed_nowhere(pair_of):
    run = pair_of(whisper, outputs=("**", "**:**")).generate(sounds(), max_new_tokens=3, localize=True)
    run.assert_close()
    assert not run.localization.blamed
    assert {"model.encoder.layers.0.fc2", "model.decoder.layers.0.encoder_attn:probs"} <= set(run.localization.by_site)


def test_a_copy_of_both_engines_runs_by_itself_and_dumps_every_step(pair_of, workspace, tmp_path, capsys):
    pair = pair_of(whisper)
    module = pair.sessions.model.module
    copy_engine(workspace, pair.engine, tmp_path / "engine")
    module.save_pretrained(tmp_path / "model")
    save_file(sounds(), tmp_path / "sounds.safetensors")
    names = {"engine_dir": tmp_path / "engine", "model": str(tmp_path / "model"), "dump_dir": tmp_path / "dump"}
    run_command(**names, inputs=tmp_path / "sounds.safetensors", max_output_len=STEPS)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == tokens_of_transformers(module, sounds())
    assert len(list((tmp_path / "dump").glob("step*.safetensors"))) == STEPS
    with pytest.raises(UsageError, match="input_features: give --inputs FILE"):
        run_command(**names, input_ids=["5,6"])


def test_what_an_encoder_needs_is_told(pair_of):
    with pytest.raises(UsageError, match="encodes input_features"):
        pair_of(whisper).generate(PROMPTS)
    with pytest.raises(UsageError, match="no input 'input_ids', expected input_features"):
        pair_of(whisper).generate({"input_ids": torch.tensor([PROMPTS[0]])})
    with pytest.raises(UsageError, match="got inputs by name"):
        pair_of(factory("llama")).generate({"input_ids": torch.tensor([PROMPTS[0]])})

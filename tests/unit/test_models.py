"""Why a model cannot be loaded, in one line."""

import io
import json
import os
import re
from contextlib import suppress
from importlib import metadata

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from ditto_core.cache import Cache
from ditto_core.engines.keys import graph_key, outline_key
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import ModelError
from ditto_core.model import states
from ditto_core.model.checkpoint import load_tokenizer
from ditto_core.model.loading import is_decoder, load_model, tiny_decoder
from ditto_core.spec import EngineSpec, ModelSource
from ditto_core.stepping.solo import tokenizer_for
from tests.zoo import FAMILIES

CONFIG = {"model_type": "of_its_own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}


def test_a_model_with_code_of_its_own_says_how_to_trust_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "code.py").write_text("raise AssertionError('nobody has trusted this')")
    with pytest.raises(ModelError) as refused:
        load_model(ModelSource(str(tmp_path)))
    hint = f"read it, then give ModelSource({str(tmp_path)!r}, trust_remote_code=True), or --trust-remote-code"
    assert str(refused.value) == f"model {str(tmp_path)!r} could not be loaded: it brings code of its own; {hint}"


SMALL = {"vocab_size": 16, "hidden_size": 8, "num_layers": 1, "num_hidden_layers": 1, "num_heads": 2}
SIZES = {"t5": {"d_model": 8, "d_kv": 4, "d_ff": 8}, "mamba": {"state_size": 2}}
KINDS = {"t5": AutoModelForSeq2SeqLM, "mamba": AutoModelForCausalLM}


@pytest.mark.parametrize(
    ("family", "inputs"),
    [
        ("t5", {"input_ids": [2, 7], "attention_mask": [2, 7], "decoder_input_ids": [2, 4]}),
        ("mamba", {"input_ids": [2, 7], "attention_mask": [2, 7]}),
    ],
)
def test_what_keeps_no_key_value_cache_of_its_own_prompt_runs_on_inputs_made_from_its_configuration(family, inputs):
    def model():
        return KINDS[family].from_config(AutoConfig.for_model(family, **(SMALL | SIZES[family])))

    loaded = load_model(ModelSource.of(model))
    assert not loaded.decoder
    assert {name: list(tensor.shape) for name, tensor in loaded.examples.items()} == inputs
    assert int(loaded.examples["input_ids"].max()) < 16


def test_a_module_of_no_class_that_is_known_needs_example_inputs():
    with pytest.raises(ModelError, match=r"returned no example inputs.*give a callable that returns \(module, "):
        load_model(ModelSource.of(lambda: torch.nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("vit", {"pixel_values": [2, 3, 32, 32]}),
        ("segformer", {"pixel_values": [2, 3, 64, 64]}),
        ("whisper", {"input_features": [2, 16, 60], "decoder_input_ids": [2, 4]}),
        ("wav2vec2", {"input_values": [2, 640]}),
        ("ast", {"input_values": [2, 64, 16]}),
        ("dac", {"input_values": [2, 1, 1600]}),
        ("videomae", {"pixel_values": [2, 4, 3, 32, 32]}),
        ("patchtst", {"past_values": [2, 32, 2]}),
        ("clip", {"input_ids": [2, 7], "attention_mask": [2, 7], "pixel_values": [2, 3, 32, 32]}),
    ],
)
def test_a_directory_of_any_class_gives_inputs_of_the_sizes_that_its_configuration_says(tmp_path, family, sizes):
    FAMILIES[family]().save_pretrained(tmp_path)
    loaded = load_model(ModelSource(str(tmp_path)))
    assert {name: list(tensor.shape) for name, tensor in loaded.examples.items()} == sizes


def test_a_configuration_that_does_not_tell_the_sizes_of_an_input_says_what_to_give():
    config = transformers.TimeSeriesTransformerConfig(prediction_length=4, context_length=8, d_model=16)
    module = transformers.TimeSeriesTransformerForPrediction(config)
    with pytest.raises(ModelError, match=r"lacks 'num_input_channels' for past_values; give a callable") as refused:
        load_model(ModelSource.of(lambda: module))
    assert len(str(refused.value).splitlines()) == 1


def test_inputs_that_do_not_fit_the_model_say_what_to_give():
    model = FAMILIES["vit"]()
    model.config.image_size = 48  # not what its positions were made for
    with pytest.raises(ModelError, match=r"cannot be run on pixel_values \[2, 3, 48, 48\].*give a callable") as refused:
        load_model(ModelSource.of(model))
    assert len(str(refused.value).splitlines()) == 1


def test_weights_that_are_not_of_the_configurations_sizes_are_refused_in_one_line(tmp_path):
    FAMILIES["vit"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_channels": 4}))
    with pytest.raises(ModelError, match="could not be loaded") as refused:
        load_model(ModelSource(str(tmp_path)))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("examples", [None, {"input": torch.ones(2, 3)}])
def test_a_module_at_hand_is_copied_and_stays_as_it_is(examples):
    module = torch.nn.Linear(3, 2).train() if examples else FAMILIES["llama"]().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    source = ModelSource.of((module, examples) if examples else module)
    loaded = load_model(source, dtype=torch.float16)
    assert source.label == type(module).__name__
    assert loaded.decoder == (examples is None)
    assert module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize(
    ("family", "carried"),
    [
        ("falcon", {"0.key": (1, 0, 16), "1.value": (1, 0, 16)}),  # one key/value head for four of queries
        ("deepseek_v2", {"0.key": (1, 0, 16), "0.value": (1, 0, 8)}),  # the latent, and its rotary part
        ("lfm2", {"0.conv": (64, 3), "1.key": (2, 0, 16)}),
        ("mamba2", {"0.recurrent": (8, 16, 8), "1.conv": (144, 4)}),
    ],
)
def test_what_a_decoder_carries_is_read_off_a_run(family, carried):
    found = {state.name: state.sizes for state in states.layout(FAMILIES[family]())}
    assert carried.items() <= found.items()


@pytest.mark.parametrize(
    ("family", "decoder"),
    [("lfm2", True), ("mamba2", True), ("mamba", False), ("falcon_mamba", False), ("qwen3_next", False)],
)
def test_a_state_is_carried_only_where_several_tokens_go_on_from_it(family, decoder):
    assert is_decoder(FAMILIES[family]()) == decoder


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_configuration_alone_makes_no_tokenizer(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert load_tokenizer(tmp_path) is None


def test_a_tokenizer_whose_package_is_missing_is_left_out_with_a_warning_that_names_it(tmp_path, monkeypatch):
    def load(*args, **options):
        raise ImportError("\nYou need to install sacremoses to use BioGptTokenizer.\nSee elsewhere")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    with pytest.warns(UserWarning, match="left out: You need to install sacremoses to use BioGptTokenizer.$"):
        assert load_tokenizer(tmp_path) is None


def test_a_tokenizer_that_gets_no_vocabulary_is_left_out_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *args, **options: os.fspath(None))
    with pytest.warns(UserWarning, match="left out: .*NoneType"):
        assert load_tokenizer(tmp_path) is None


def test_a_model_whose_own_code_takes_no_empty_cache_is_refused_in_one_line(monkeypatch):
    model = tiny_decoder("llama", layers=1)
    monkeypatch.setattr("ditto_core.model.states.empty_cache", lambda module: object())
    with pytest.raises(ModelError, match=r"^LlamaForCausalLM cannot be stepped: .*AttributeError"):
        states.layout(model)


def test_a_model_that_takes_no_long_prompt_is_exported_for_one_length(monkeypatch):
    model = tiny_decoder("llama", layers=1)
    assert not states.loops(model)
    monkeypatch.setattr(states, "LENGTHS", (4, 8))
    model.register_forward_pre_hook(at_most_five, with_kwargs=True)
    assert states.loops(model)


def at_most_five(module, args, kwargs):
    if kwargs["input_ids"].shape[1] > 5:
        raise IndexError("index out of range in self")


def saved(folder):
    tiny_decoder("llama", layers=1).save_pretrained(folder)
    return folder


def test_a_checkpoint_that_lacks_weights_is_refused_by_their_names(tmp_path):
    weights = load_file(saved(tmp_path) / "model.safetensors")
    gone = [name for name in weights if "layers.0.mlp" in name]
    save_file({name: tensor for name, tensor in weights.items() if name not in gone}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="lacks 3 of its model's tensors: " + ", ".join(map(re.escape, sorted(gone)))):
        load_model(ModelSource(str(tmp_path)))


@pytest.mark.parametrize("name", ["adapter_config.json", "code/extra.py", "parts/more.safetensors", "config.json"])
def test_adapters_and_subfolders_are_part_of_a_checkpoints_identity(tmp_path, name):
    def digest():
        return Workspace(Cache(tmp_path / "cache")).digest(ModelSource(str(tmp_path / "model")))

    (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
    saved(tmp_path / "model")
    first = digest()
    with (tmp_path / "model" / name).open("a") as file:
        file.write(" ")
    assert digest() != first


def test_an_adapter_that_would_be_left_out_is_refused(tmp_path, monkeypatch):
    (saved(tmp_path) / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "another"}')
    monkeypatch.setattr("transformers.utils.is_peft_available", lambda: False)
    with pytest.raises(ModelError, match=r"has an adapter .*, which needs peft: pip install peft$"):
        load_model(ModelSource(str(tmp_path)))


def test_an_adapter_whose_base_lies_elsewhere_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "another"}')
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ModelError, match=r"is an adapter, expected it beside its base model, or merged into that$"):
        load_model(ModelSource(str(tmp_path)))


@pytest.mark.parametrize("key", [lambda spec: graph_key(spec, "same"), lambda spec: outline_key(spec, "same")])
def test_pefts_version_is_part_of_the_key_of_what_has_an_adapter_only(key, tmp_path, monkeypatch):
    known = metadata.version

    def keys():
        for number in ("0.18.0", "0.19.0"):
            monkeypatch.setattr(metadata, "version", lambda name, n=number: n if name == "peft" else known(name))
            yield key(EngineSpec.of(str(tmp_path)))

    saved(tmp_path)
    assert len({*keys()}) == 1
    (tmp_path / "adapter_config.json").write_text("{}")
    assert len({*keys()}) == 2


TOKENIZER_CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import PreTrainedTokenizerFast
class Own(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("answer", ["y\n", ""])
def test_a_tokenizers_own_code_does_not_run_untrusted_whatever_stdin_says(tmp_path, monkeypatch, answer):
    (tmp_path / "own.py").write_text(TOKENIZER_CODE)
    config = {"model_type": "of_its_own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert load_tokenizer(tmp_path) is None
    assert tokenizer_for([[1]], ModelSource(str(tmp_path))) is None
    assert not [*tmp_path.rglob("ran")]
    with suppress(Exception):  # the code makes no tokenizer that works; that it ran is what counts
        load_tokenizer(tmp_path, trust_remote_code=True)
    assert [*tmp_path.rglob("ran")]


def test_an_attention_implementation_that_a_model_has_not_is_one_line():
    with pytest.raises(ModelError, match=r"^Gemma2ForCausalLM has no attention implementation 'sdpa', expected"):
        load_model(ModelSource.of(FAMILIES["gemma2"]()), implementation="sdpa")

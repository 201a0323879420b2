"""Why a model cannot be loaded, in one line."""

import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from ditto_core.errors import ModelError
from ditto_core.model.checkpoint import load_tokenizer
from ditto_core.model.loading import load_model
from ditto_core.spec import ModelSource

CONFIG = {"model_type": "of_its_own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}


def test_a_model_with_code_of_its_own_says_how_to_trust_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "code.py").write_text("raise AssertionError('nobody has trusted this')")
    with pytest.raises(ModelError) as refused:
        load_model(ModelSource(str(tmp_path)))
    hint = f"read it, then give ModelSource({str(tmp_path)!r}, trust_remote_code=True)"
    assert str(refused.value) == f"model {str(tmp_path)!r} could not be loaded: it brings code of its own; {hint}"


@pytest.mark.parametrize("family", ["t5", "mamba"])
def test_what_keeps_no_key_value_cache_of_its_own_prompt_needs_example_inputs(family):
    small = {"vocab_size": 16, "hidden_size": 8, "num_layers": 1, "num_hidden_layers": 1, "num_heads": 2}
    sizes = {"t5": {"d_model": 8, "d_kv": 4, "d_ff": 8}, "mamba": {"state_size": 2}}[family]
    kind = {"t5": AutoModelForSeq2SeqLM, "mamba": AutoModelForCausalLM}[family]

    def model():
        return kind.from_config(AutoConfig.for_model(family, **(small | sizes)))

    with pytest.raises(ModelError, match="returned no example inputs, expected"):
        load_model(ModelSource.of(model))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_configuration_alone_makes_no_tokenizer(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert load_tokenizer(tmp_path) is None

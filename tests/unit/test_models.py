"""Why a model cannot be loaded, in one line."""

import io
import json
import re
from contextlib import suppress

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import ModelError
from ditto_core.model.checkpoint import load_tokenizer
from ditto_core.model.loading import load_model, tiny_decoder
from ditto_core.spec import ModelSource
from ditto_core.stepping.solo import tokenizer_for

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


TOKENIZER_CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import PreTrainedTokenizerFast as Own
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
    assert tokenizer_for([[1]], str(tmp_path), False) is None
    assert not [*tmp_path.rglob("ran")]
    with suppress(Exception):  # the code makes no tokenizer that works; that it ran is what counts
        load_tokenizer(tmp_path, trust_remote_code=True)
    assert [*tmp_path.rglob("ran")]

"""Checkpoints with code of their own: whose class makes the model, trusted and untrusted, and what the digest says."""

import io
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MptConfig, MptForCausalLM

from ditto_core.backends.trtllm.backend import MANIFEST, TrtllmBackend, trusted_model
from ditto_core.backends.vllm import serving
from ditto_core.cache import Cache
from ditto_core.cli import application
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import ModelError, RunError
from ditto_core.model.loading import load_model, tiny_decoder
from ditto_core.model.own_code import model_class
from ditto_core.spec import EngineSpec, ModelSource
from ditto_core.stepping.solo import source_batch
from tests.commands import ditto

CODE = """
from transformers import LlamaForCausalLM as Base, LlamaForSequenceClassification as Judge
class LlamaForCausalLM(Base): pass
class MyLlama(Base): pass
class MyJudge(Judge): pass
"""


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    tiny_decoder("llama", layers=1).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(plain, tmp_path, monkeypatch):
    """Return what writes a checkpoint of an architecture whose code is its own, and returns its folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def write(architecture, **own):
        folder = shutil.copytree(plain, tmp_path / "model", dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
        code = {kind: f"code_of_its_own.{name}" for kind, name in own.items()}
        (folder / "config.json").write_text(json.dumps(config | ({"auto_map": code} if code else {})))
        (folder / "code_of_its_own.py").write_text(CODE)
        return str(folder)

    return write


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MyLlama"])
def test_a_trusted_checkpoints_own_class_is_loaded_as_transformers_does(checkpoint, architecture):
    location = checkpoint(architecture, AutoModelForCausalLM=architecture)
    made = type(load_model(ModelSource(location, trust_remote_code=True)).module)
    assert made.__name__ == architecture and made is not LlamaForCausalLM
    assert made is type(AutoModelForCausalLM.from_pretrained(location, trust_remote_code=True))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MyLlama"])
def test_untrusted_a_class_that_transformers_has_too_is_loaded_from_there(checkpoint, name):
    location = checkpoint("LlamaForCausalLM", AutoModelForCausalLM=name)
    assert type(load_model(ModelSource(location)).module) is LlamaForCausalLM


@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "AutoModel"])
def test_untrusted_no_other_class_stands_in_for_one_that_transformers_lacks(checkpoint, kind):
    location = checkpoint("MyLlama", **{kind: "MyLlama"})
    hint = f"read it, then give ModelSource({location!r}, trust_remote_code=True), or --trust-remote-code"
    with pytest.raises(ModelError) as refused:
        load_model(ModelSource(location))
    assert str(refused.value) == f"model {location!r} could not be loaded: it brings code of its own; {hint}"


@pytest.mark.parametrize("trust", [False, True])
def test_a_class_that_neither_transformers_nor_the_checkpoint_has_is_refused_by_name(checkpoint, trust):
    location = checkpoint("LlamaForCausalLMs")
    said = "could not be loaded: transformers has no class 'LlamaForCausalLMs'; did you mean 'LlamaForCausalLM'[?]$"
    with pytest.raises(ModelError, match=said):
        load_model(ModelSource(location, trust_remote_code=trust))


def test_trust_is_part_of_the_identity_of_a_checkpoint_with_code_of_its_own_only(checkpoint, tmp_path):
    def digests(location):
        sources = [ModelSource(location, trust_remote_code=trust) for trust in (False, True)]
        return {Workspace(Cache(tmp_path / "cache")).digest(source) for source in sources}

    assert len(digests(checkpoint("LlamaForCausalLM"))) == 1
    assert len(digests(checkpoint("LlamaForCausalLM", AutoModelForCausalLM="LlamaForCausalLM"))) == 2


@pytest.mark.parametrize(
    ("file", "auto_map"),
    [
        ("config.json", {"AutoModelForCausalLM": "owner/repo--code_of_its_own.LlamaForCausalLM"}),
        ("tokenizer_config.json", {"AutoTokenizer": [None, "owner/repo--code_of_its_own.Tokenizer"]}),
    ],
)
def test_trusted_code_of_another_repository_is_refused(file, auto_map, checkpoint):
    location = checkpoint("LlamaForCausalLM")
    written = Path(location, file)
    known = json.loads(written.read_text()) if written.exists() else {}
    written.write_text(json.dumps({**known, "auto_map": auto_map}))
    with pytest.raises(ModelError, match=r"another repository .owner/repo--.*, expected it beside the weights"):
        load_model(ModelSource(location, trust_remote_code=True))
    assert type(load_model(ModelSource(location)).module) is LlamaForCausalLM


def config(architecture, kind=LlamaConfig, **own):
    return kind(architectures=architecture and [architecture], auto_map={k: f"code.{name}" for k, name in own.items()})


TRUSTED = ModelSource("model", trust_remote_code=True)


def test_of_several_classes_the_architectures_own_is_taken_then_the_decoder():
    both = {"AutoModelForSequenceClassification": "MyJudge", "AutoModelForCausalLM": "MyLlama"}
    for architecture, made in (("MyJudge", 0), ("MyLlama", 1), ("LlamaForCausalLM", 1), ("Another", 1), (None, 1)):
        assert model_class(TRUSTED, config(architecture, **both)).__name__ == list(both)[made]


def test_a_class_of_its_own_for_another_purpose_leaves_the_architecture_to_transformers():
    assert model_class(TRUSTED, config("LlamaForCausalLM", AutoModelForSequenceClassification="MyJudge")) is (
        LlamaForCausalLM
    )


def test_a_class_that_another_package_registered_or_that_is_spelled_otherwise_is_known():
    class Fla(LlamaForCausalLM):
        config_class = type("FlaConfig", (LlamaConfig,), {"model_type": "fla_of_this_test"})

    AutoConfig.register("fla_of_this_test", Fla.config_class)
    AutoModelForCausalLM.register(Fla.config_class, Fla)
    for known in (config("Fla", Fla.config_class), config("MPTForCausalLM", MptConfig, AutoModelForCausalLM="MPT")):
        assert model_class(ModelSource("model"), known) is AutoModelForCausalLM
    assert MptForCausalLM.__name__ != "MPTForCausalLM"


def test_generating_asks_nothing_on_stdin_about_a_configurations_own_code(tmp_path, monkeypatch):
    own = {"model_type": "of_its_own", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "code.py").write_text("raise AssertionError('nobody has trusted this')")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        source_batch(ModelSource(str(tmp_path)), [[1]], None, None, 1)


def options_of(*words):
    command = typer.main.get_command(application())
    for word in words:
        command = command.commands[word]
    return {option for parameter in command.params for option in parameter.opts}


def test_every_command_that_loads_a_model_can_be_told_to_trust_its_code():
    for words in ("build", "run", "localize", "answers", "align", "fuzz", "sites", "init", "calibrate", "gate run"):
        assert "--trust-remote-code" in options_of(*words.split()), words


def test_a_command_runs_a_checkpoints_own_code_only_where_it_is_told_to(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("DITTO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    location = checkpoint("MyLlama", AutoModelForCausalLM="MyLlama")
    made = ("build", location, "engine", "--add-output", "model.layers.*")
    ids = ("--input-ids", "1,2,3", "--max-output-len", "2")
    refused = ditto(*made)
    assert refused.returncode == 2 and "or --trust-remote-code" in refused.stderr
    for words in (made, ("run", "--engine-dir", "engine", *ids), ("localize", "engine", *ids), ("init", location)):
        done = ditto(*words, "--trust-remote-code")
        assert done.returncode == 0, done.stderr
    assert 'ModelSource(str(Path(__file__).parent / "model"), trust' in Path("test_engine.py").read_text()
    refused = ditto("localize", "engine", *ids)
    assert refused.returncode == 2 and "give --trust-remote-code, or" in refused.stderr


def test_tensorrt_llm_which_trusts_unasked_gets_no_untrusted_code(checkpoint, plain, tmp_path):
    folder = checkpoint("LlamaForCausalLM", AutoModelForCausalLM="LlamaForCausalLM")
    with pytest.raises(ModelError, match=r"not given to TensorRT-LLM: it brings code of its own; read it"):
        trusted_model({}, EngineSpec.of(folder, backend="trtllm"), tmp_path)
    trusted = ModelSource(folder, trust_remote_code=True)
    assert trusted_model({}, EngineSpec.of(trusted, backend="trtllm"), tmp_path) == folder
    assert trusted_model({}, EngineSpec.of(str(plain), backend="trtllm"), tmp_path) == str(plain)


def test_its_pytorch_backend_is_not_opened_with_untrusted_code_either(checkpoint, tmp_path):
    folder = checkpoint("LlamaForCausalLM", AutoModelForCausalLM="LlamaForCausalLM")
    (tmp_path / MANIFEST).write_text('{"engine": "pytorch"}')
    with pytest.raises(ModelError, match="not given to TensorRT-LLM"):
        TrtllmBackend().open(EngineSpec.of(folder, backend="trtllm"), tmp_path, ())


class StandInForVllm(ModuleType):
    """Takes no model: it refuses each in vLLM's words, and keeps what it was given."""

    def LLM(self, model, **settings):
        self.given = settings
        raise ValueError("Failed to load the model config. Consider setting `trust_remote_code=True` in LLM")


@pytest.mark.parametrize(
    ("own", "trust", "option", "passed", "said"),
    [
        (True, False, {}, False, r"it brings code of its own; read it, then give ModelSource\("),
        (True, True, {}, True, "Failed to load"),
        (False, False, {}, False, "Failed to load"),
        (True, True, {"checkpoint": "here"}, False, r"its checkpoint brings .* options=.'engine\.trust_remote_code'"),
        (True, False, {"checkpoint": "here", "engine.trust_remote_code": True}, True, "Failed to load"),
    ],
)
def test_vllm_is_told_what_a_model_may_run(own, trust, option, passed, said, checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", vllm := StandInForVllm("vllm"))
    folder = checkpoint("LlamaForCausalLM", **({"AutoModelForCausalLM": "LlamaForCausalLM"} if own else {}))
    options = {name: folder if value == "here" else value for name, value in option.items()}
    source = ModelSource(folder, trust_remote_code=trust)
    kind = RunError if said == "Failed to load" else ModelError
    with pytest.raises(kind, match=f"^vLLM does not serve model: {said}"):
        serving.start(EngineSpec.of(source, backend="vllm", options=options), folder, tapped=True)
    assert vllm.given["trust_remote_code"] is passed

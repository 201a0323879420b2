"""TensorRT-LLM's real Python layer builds: ``DITTO_TRTLLM_SOURCE`` is its source; skipped, and counted, without it.

A process of its own: upstream stays imported. See ``tests/upstream_trtllm.py`` for what is a stand-in.
"""

import json
import os
from pathlib import Path

import pytest

from ditto_core.backends.trtllm import build, detect
from ditto_core.backends.trtllm import build_command as trtllm_build
from ditto_core.backends.trtllm.plan import Report
from ditto_core.errors import BuildError
from ditto_core.model.loading import tiny_decoder

SOURCE = os.environ.get("DITTO_TRTLLM_SOURCE", "")
pytestmark = pytest.mark.skipif(not SOURCE, reason="DITTO_TRTLLM_SOURCE is not set")
CACHES = ["present_key_value_0", "present_key_value_1"]


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    pytest.importorskip("tensorrt_rtx_bindings", reason="it takes TensorRT-RTX for TensorRT")
    import upstream_trtllm

    found = detect.installed
    detect.installed = lambda name: "10.0" if name == "tensorrt" else found(name)
    upstream_trtllm.version = upstream_trtllm.install(Path(SOURCE), tmp_path_factory.mktemp("found"))
    return upstream_trtllm


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A two-layer Llama of 64 hidden units, 4 heads of queries and 2 of keys, on the disk."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_decoder("llama", architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(upstream, model, tmp_path_factory):
    return upstream.write_checkpoint(model, tmp_path_factory.mktemp("converted") / "ckpt", "float32")


@pytest.fixture
def trtllm(upstream, checkpoint, tmp_path, monkeypatch):
    """trtllm-build with its plugins off: words in, names of outputs and our report out."""
    import tensorrt_llm.builder as theirs

    monkeypatch.chdir(tmp_path)  # upstream writes model.cache where it runs
    monkeypatch.setattr(theirs.Builder, "build_engine", upstream.traced)

    def run(*words):
        places = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")]
        trtllm_build.run([*places, *upstream.words_off(upstream.version), *words])
        return upstream.BUILT["outputs"], Report.load(tmp_path / "e" / "ditto")

    return run


def in_memory(upstream, model, directory, outputs, **fields):
    directory.mkdir(exist_ok=True)
    sizes = {"batch": 2, "prompt": 16, "sequence": 32}
    places = {"model": str(model), "directory": str(directory), "checkpoint": "", "builder": "memory"}
    order = build.Order(
        dtype="float32", sizes=sizes, outputs=outputs, plugin=upstream.plugins_off(), **places, **fields
    )
    return build.build_engine(**build.asdict(order))


def test_sites_become_outputs_and_the_builder_is_as_before(upstream, model, tmp_path):
    import tensorrt_llm.builder as theirs

    before = theirs.Builder.build_engine
    sites = ("model.layers.0", "model.layers.1.mlp.gate_proj", "model.layers.1.self_attn.q_proj", "model.norm:in")
    wanted = {**dict.fromkeys(sites, ""), "lm_head": "head"}
    report = in_memory(upstream, model, tmp_path / "e", wanted, artifacts=str(tmp_path / "art"))
    names = ["transformer.layers.0", "transformer.layers.1.mlp.fc", "transformer.layers.1.attention.qkv"]
    assert set(report["outputs"]) == {*names, "transformer.ln_f:in", "head"}
    assert set(upstream.BUILT["outputs"]) == {"logits", *CACHES, *report["outputs"]}
    assert [found["shape"][-1] for found in report["outputs"].values()] == [64, 128, 128, 64, 256]
    assert report["refused"] == {}
    assert theirs.Builder.build_engine is before
    written = json.loads((tmp_path / "art" / "builder_config.json").read_text())
    assert written["num_optimization_profiles"] == 2  # of the prompt and of one token


def test_use_fused_mlp_disable_is_effective(upstream, trtllm):
    off = [] if upstream.version.startswith("0.12") else ["--use_fused_mlp", "disable"]
    outputs, _ = trtllm(*off, "--add-output", "model.layers.*.mlp.up_proj", "--add-output", "lm_head=head")
    gates = ["transformer.layers.0.mlp.gate", "transformer.layers.1.mlp.gate"]
    assert outputs == ["logits", *CACHES, *gates, "head"]


def test_a_fused_mlp_is_the_reason_that_is_given(upstream, trtllm):
    on = ["--use_fused_mlp"] if upstream.version.startswith("0.12") else []
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.*.mlp.up_proj", "transformer.layers.1.mlp.fc"):
        with pytest.raises(BuildError, match="build with use_fused_mlp off"):
            trtllm(*on, "--add-output", name)
    outputs, report = trtllm(*on, "--add-output", "model.layers.*.mlp.*_proj")
    assert outputs == ["logits", *CACHES, "transformer.layers.0.mlp.proj", "transformer.layers.1.mlp.proj"]
    hidden = {f"model.layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up")}
    assert hidden <= set(report.refused)


def test_a_layers_name_with_other_line_numbers_is_found(upstream, trtllm):
    trtllm("--add-output", "lm_head")
    name = [layer for layer in upstream.BUILT["layers"] if "/layers/1/" in layer and layer.endswith("SUM_1")][-1]
    assert "_L" in name
    moved = name.replace("_L", "_L9")
    outputs, report = trtllm("--add-output", f"{moved}=sum")
    assert outputs == ["logits", *CACHES, "sum"]
    assert report.outputs["sum"]["source"] == name


def test_raw_names_and_module_lists(upstream, trtllm):
    outputs, _ = trtllm("--add-output", "trt:transformer.layers.0.mlp=mlp", "--add-output", "trt:lm_head")
    assert outputs == ["logits", *CACHES, "mlp", "lm_head"]
    outputs, _ = trtllm("--add-output", "transformer.*")
    assert outputs == ["logits", *CACHES, "transformer.vocab_embedding", "transformer.ln_f"]


OWN = """
from tensorrt_llm.functional import identity
from tensorrt_llm.models import LLaMAForCausalLM
class Own(LLaMAForCausalLM):
    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        self.register_network_output("mine", identity(found[0] if isinstance(found, tuple) else found))
        return found
"""


def test_registered_outputs_are_there_once_and_only_where_they_are_asked_for(upstream, trtllm, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = ["--model_cls_file", str(tmp_path / "own.py"), "--model_cls_name", "Own"]
    assert trtllm(*own, "--add-output", "transformer.ln_f")[0] == ["logits", *CACHES, "transformer.ln_f"]
    for flags in ([], ["--enable_debug_output"]):
        outputs, report = trtllm(*own, *flags, "--add-output", "mine")
        assert sorted(outputs) == sorted(["logits", *CACHES, "mine"])
        assert report.outputs["mine"]["requests"] == ["mine"]


def test_a_failed_build_leaves_the_builder_as_it_was(upstream, model, tmp_path):
    import tensorrt_llm.builder as theirs

    before = theirs.Builder.build_engine
    with pytest.raises(BuildError, match="'logits' is already the name"):
        in_memory(upstream, model, tmp_path / "e", {"model.norm": "logits"}, artifacts=str(tmp_path / "art"))
    assert theirs.Builder.build_engine is before

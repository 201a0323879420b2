"""Taps in engines: the adapter's real code on a stand-in for TensorRT-LLM whose builder is TensorRT-RTX's own."""

import json
import os

import pytest

from ditto_core.backends.trtllm import build, marking, taps
from ditto_core.backends.trtllm import build_command as trtllm_build
from ditto_core.backends.trtllm.plan import Plan, Report
from ditto_core.errors import BackendError, BuildError, UsageError
from ditto_core.model.loading import tiny_decoder

VERSIONS = ["0.12.0", "0.13.0", "0.14.0", "0.15.0", "0.16.0", "0.17.0.dev2024121700", "1.3.0rc3"]
UNFUSED = ["--use_fused_mlp", "disable"]
SUM = "LLaMAForCausalLM/transformer/layers/1/__add___L325/elementwise_binary_L2901/ELEMENTWISE_SUM_1"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A two-layer Llama of 64 hidden units, 4 heads of queries and 2 of keys, on the disk."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_decoder("llama", architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(standin, model, tmp_path):
    from standin_trtllm.llama import config_of

    (tmp_path / "ckpt").mkdir()
    config = config_of(model, "float16")
    path = tmp_path / "ckpt" / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    return path.parent


def order(model, directory, outputs, **fields):
    directory.mkdir(exist_ok=True)
    sizes = {"batch": 2, "prompt": 16, "sequence": 32}
    settings = {"builder": "memory", "checkpoint": "", "dtype": "float16", **fields}
    return build.asdict(
        build.Order(model=str(model), directory=str(directory), sizes=sizes, outputs=outputs, **settings)
    )


def engine_outputs(directory, rank=0):
    return json.loads((directory / f"outputs{rank}.json").read_text())


@pytest.mark.parametrize("standin", VERSIONS, indirect=True)
def test_sites_become_outputs_of_the_engine(standin, model, tmp_path):
    sites = ("model.layers.0", "model.layers.1.mlp.gate_proj", "model.layers.1.self_attn.q_proj", "model.norm:in")
    report = build.build_engine(**order(model, tmp_path / "e", dict.fromkeys(sites, "")))
    names = ["transformer.layers.0", "transformer.layers.1.mlp.fc", "transformer.layers.1.attention.qkv"]
    assert list(report["outputs"]) == [*names, "transformer.ln_f:in"]
    assert set(engine_outputs(tmp_path / "e")) == {"logits", *names, "transformer.ln_f:in"}
    shapes = {name: (found["dtype"], found["shape"]) for name, found in report["outputs"].items()}
    # joint projection: (4 + 2 + 2) heads of 16; the MLP is 128 wide
    assert shapes["transformer.layers.1.attention.qkv"] == ("HALF", [1, 8, 128])
    assert shapes["transformer.layers.1.mlp.fc"] == ("HALF", [1, 8, 128])
    assert shapes["transformer.layers.0"] == ("HALF", [1, 8, 64])
    assert (tmp_path / "e" / "rank0.engine").stat().st_size > 1000
    assert report["refused"] == {}


def test_every_call_of_the_build_is_in_the_table(standin, model, checkpoint, tmp_path):
    from ditto_core.backends.trtllm.calls import CALLS

    build.build_engine(**order(model, tmp_path / "a", {"lm_head": ""}, artifacts=str(tmp_path / "art")))
    build.build_engine(
        **order(model, tmp_path / "b", {"lm_head": ""}, builder="checkpoint", checkpoint=str(checkpoint))
    )
    ours = {call.name for call in CALLS}
    assert {"tensorrt_llm.builder.build", "tensorrt_llm.commands.build.parallel_build"} <= standin.called & ours


def test_an_output_that_has_a_name_keeps_it_beside_the_alias(standin, model, tmp_path):
    build.build_engine(**order(model, tmp_path / "e", {"lm_head": "head"}))
    assert set(engine_outputs(tmp_path / "e")) == {"logits", "head"}


def test_two_aliases_of_one_tensor_are_two_outputs(standin, model, tmp_path):
    build.build_engine(**order(model, tmp_path / "e", {"model.layers.1": "block", SUM: "sum"}))
    assert set(engine_outputs(tmp_path / "e")) == {"logits", "block", "sum"}


def test_a_layer_is_found_by_its_name_whatever_the_line_numbers(standin, model, tmp_path):
    other = SUM.replace("L325", "L1").replace("L2901", "L99")
    report = build.build_engine(**order(model, tmp_path / "e", {other: "sum"}))
    assert report["outputs"]["sum"]["source"] == SUM


def test_a_glob_with_an_alias_numbers_its_outputs(standin, model, tmp_path):
    report = build.build_engine(**order(model, tmp_path / "e", {"transformer.layers.*.mlp": "mlp"}))
    assert {n: f["source"] for n, f in report["outputs"].items()} == {
        "mlp_0": "transformer.layers.0.mlp",
        "mlp_1": "transformer.layers.1.mlp",
    }


def test_several_outputs_of_a_layer_are_numbered():
    assert marking.aliases("x", 1) == ["x"]
    assert marking.aliases("x", 3) == ["x_0", "x_1", "x_2"]


def test_the_observed_model_is_as_before_after_tracing(standin, model, tmp_path):
    from ditto_core.backends.trtllm import calls

    traced = calls.FROM_HUGGING_FACE(hf_model_or_dir=str(model), dtype="float16")
    wanted = build.Order(**order(model, tmp_path / "e", {"lm_head": ""}))
    calls.BUILD(taps.observe(traced, wanted.plan), build.build_config(wanted))
    below = [m for path, m in calls.NAMED_MODULES(traced) if path]
    assert len(below) == 24  # 2 layers of 10 modules, the list, the body, the last norm, the head
    assert not [m for m in below if "forward" in vars(m)]


def test_a_module_that_is_called_past_call_is_seen(standin, model, tmp_path):
    # the stand-in calls transformer.forward and layers.forward directly, as upstream does
    report = build.build_engine(**order(model, tmp_path / "e", {"transformer": "body", "transformer.layers": "list"}))
    assert set(report["outputs"]) == {"body", "list"}


def test_a_fused_mlp_is_refused_with_the_remedy(standin, model, tmp_path):
    wanted = {"model.layers.0.mlp.gate_proj": "", "model.layers.0.mlp": ""}
    report = build.build_engine(**order(model, tmp_path / "e", wanted, build={"use_fused_mlp": True}))
    assert list(report["outputs"]) == ["transformer.layers.0.mlp"]
    assert report["refused"]["model.layers.0.mlp.gate_proj"].endswith("build with use_fused_mlp off")


def test_fusions_that_return_pairs_are_refused(standin, model, tmp_path):
    wanted = {"model.layers.0": "", "model.layers.0.mlp.down_proj": ""}
    report = build.build_engine(**order(model, tmp_path / "e", wanted, plugin={"reduce_fusion": True}))
    assert list(report["outputs"]) == ["transformer.layers.0.mlp.proj"]
    assert "reduce_fusion makes it a pair" in report["refused"]["transformer.layers.0"]


def test_an_unknown_field_of_the_configuration_is_an_error(standin, model, tmp_path):
    with pytest.raises(BuildError, match="PluginConfig of this TensorRT-LLM has no field 'gemmplugin'"):
        build.build_engine(**order(model, tmp_path / "e", {}, plugin={"gemmplugin": "auto"}))


def test_an_alias_that_is_taken_is_an_error(standin, model, tmp_path):
    with pytest.raises(BuildError, match="'logits' is already the name of an input or output of the network"):
        build.build_engine(**order(model, tmp_path / "e", {"model.norm": "logits"}))


def test_the_compiler_way_needs_the_compiler(standin, model, tmp_path):
    with pytest.raises(BackendError, match="builder='ditto' needs the compiler `ditto`, which is not installed"):
        build.build_engine(**order(model, tmp_path / "e", {"mm_default": ""}, builder="ditto"))


def test_the_compiler_gets_the_outputs_on_its_command_line(tmp_path):
    wanted = build.Order(**order("m", tmp_path / "e", {"mm_default": "", "gpt_attention_plugin": ""}, builder="ditto"))
    command = build.compiler_command(wanted)
    assert command[1:5] == ["-m", "ditto", "build", "m"]
    assert command[-4:] == ["--add-output", "mm_default", "--add-output", "gpt_attention_plugin"]


def test_artifacts_show_the_final_network_its_plugins_and_the_builder(standin, model, tmp_path):
    import tensorrt_llm.builder as upstream

    before = upstream.Builder.build_engine
    build.build_engine(**order(model, tmp_path / "e", {"model.layers.1": "block"}, artifacts=str(tmp_path / "art")))
    assert upstream.Builder.build_engine is before
    text = (tmp_path / "art" / "trt_network_def.py").read_text()
    compile(text, "trt_network_def.py", "exec")
    assert f"# layer: {SUM}\n" in text
    assert "#   num_heads = [4]" in text
    assert "GPTAttention(" in text
    assert "# half[1, 8, 64], output" in text
    (plugin, _) = sorted((tmp_path / "art" / "plugins").iterdir())
    assert json.loads(plugin.read_text())["fields"] == {"num_heads": [4], "layer_idx": [0]}
    assert json.loads((tmp_path / "art" / "builder_config.json").read_text())["engine_capability"] == "STANDARD"


def test_trtllm_build_takes_its_own_flags_and_ours(standin, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("TRTLLM_ADD_OUTPUT", json.dumps({SUM: "block1"}))
    out = tmp_path / "engine"
    words = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(out), "--max_batch_size", "1", *UNFUSED]
    trtllm_build.run([*words, "--add-output", "model.layers.*.mlp.up_proj", "--add-output", "lm_head=head"])
    gates = {"transformer.layers.0.mlp.gate", "transformer.layers.1.mlp.gate"}
    assert set(engine_outputs(out)) == {"logits", "block1", "head", *gates}
    assert Report.load(out / "ditto").outputs["block1"]["source"] == SUM
    assert "DITTO_TRTLLM_PLAN" not in os.environ


def test_trtllm_build_wraps_the_users_own_model_class(standin, checkpoint, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from standin_trtllm.llama import make\n"
        "class Own:\n"
        "    @classmethod\n"
        "    def from_checkpoint(cls, ckpt_dir, rank=None, config=None):\n"
        "        config.__dict__['registers'] = True\n"
        "        return make(config)\n"
    )
    words = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")]
    trtllm_build.run([*words, "--model_cls_file", str(own), "--model_cls_name", "Own", "--add-output", "lm_head=head"])
    # what the user's class registers is an output only where somebody asks for it
    assert set(engine_outputs(tmp_path / "e")) == {"logits", "head"}
    own_way = ["--model_cls_file", str(own), "--model_cls_name", "Own", "--enable_debug_output"]
    trtllm_build.run([*words, *own_way, "--add-output", "lm_head=head"])
    assert set(engine_outputs(tmp_path / "e")) == {"logits", "head", "hidden_for_debugging"}
    listed = Report.load(tmp_path / "e" / "ditto").outputs["hidden_for_debugging"]
    assert (listed["dtype"], listed["shape"], listed["requests"]) == ("HALF", [1, 8, 64], [])


def test_a_registered_output_can_be_given_an_alias(standin, checkpoint, tmp_path):
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "registers": True}))
    words = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")]
    trtllm_build.run([*words, "--add-output", "hidden_for_debugging=mine"])
    assert set(engine_outputs(tmp_path / "e")) == {"logits", "mine"}
    trtllm_build.run([*words, "--add-output", "hidden_for_debugging=mine", "--enable_debug_output"])
    assert set(engine_outputs(tmp_path / "e")) == {"logits", "mine", "hidden_for_debugging"}


def test_a_name_that_means_nothing_fails_with_the_closest(standin, checkpoint, tmp_path):
    words = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")]
    with pytest.raises(BuildError, match=r"'model.layers.7.mpl' is no module, site, layer .*; closest: .*model.layers"):
        trtllm_build.run([*words, "--add-output", "model.layers.7.mpl"])


def test_layers_of_pipeline_ranks_have_their_numbers_of_the_whole_model(standin, checkpoint, tmp_path):
    path = checkpoint / "config.json"
    mapping = {"world_size": 2, "pp_size": 2, "tp_size": 1}
    path.write_text(json.dumps({**json.loads(path.read_text()), "mapping": mapping}))
    words = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")]
    trtllm_build.run([*words, "--add-output", "model.layers.1", "--add-output", "model.layers.0.mlp"])
    assert set(engine_outputs(tmp_path / "e", 0)) == {"logits", "transformer.layers.0.mlp"}
    assert set(engine_outputs(tmp_path / "e", 1)) == {"logits", "transformer.layers.1"}
    assert Report.load(tmp_path / "e" / "ditto", 1).refused == {
        "model.layers.0.mlp": "no module of that name ran on this rank"
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "TRTLLM_ADD_OUTPUT is no JSON"), ("[1]", "expected a JSON object"), ('{"a": 1}', "expected a JSON object")],
)
def test_a_malformed_variable_is_an_error(text, message):
    with pytest.raises(UsageError, match=message):
        Plan.from_env({"TRTLLM_ADD_OUTPUT": text})


def test_an_alias_can_be_given_only_once():
    with pytest.raises(UsageError, match="the alias 'x' is given to several outputs"):
        Plan({"a": "x", "b": "x"})


def test_the_plan_survives_the_environment():
    plan = Plan({"a": "x", "b": ""}, strict=False, report="r", artifacts="s", model_class=("f.py", "C"))
    assert Plan.from_env(plan.to_env()) == plan


@pytest.mark.parametrize("flags", [[], ["--enable_debug_output"]], ids=["plain", "debug"])
def test_a_registered_output_that_is_asked_for_by_its_own_name_is_there_once(standin, checkpoint, tmp_path, flags):
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "registers": True}))
    words = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")]
    trtllm_build.run([*words, *flags, "--add-output", "hidden_for_debugging"])
    assert sorted(engine_outputs(tmp_path / "e")) == ["hidden_for_debugging", "logits"]
    found = Report.load(tmp_path / "e" / "ditto").outputs["hidden_for_debugging"]
    assert found["requests"] == ["hidden_for_debugging"]


@pytest.mark.parametrize("standin", VERSIONS[1:], indirect=True)
def test_use_fused_mlp_disable_is_effective(standin, checkpoint, tmp_path):
    import tensorrt_llm.commands.build as command

    before = command.parallel_build
    words = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")]
    trtllm_build.run([*words, *UNFUSED, "--add-output", "model.layers.0.mlp.gate_proj=gate"])
    assert set(engine_outputs(tmp_path / "e")) == {"logits", "gate"}
    assert command.parallel_build is before


@pytest.mark.parametrize("standin", VERSIONS[1:], indirect=True)
def test_a_fused_mlp_is_the_reason_that_is_given_in_strict_mode_and_for_globs(standin, checkpoint, tmp_path):
    words = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")]
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.*.mlp.up_proj", "transformer.layers.1.mlp.fc"):
        with pytest.raises(BuildError, match="build with use_fused_mlp off"):
            trtllm_build.run([*words, "--add-output", name])
    trtllm_build.run([*words, "--add-output", "model.layers.*.mlp.*_proj"])  # down_proj is there
    refused = Report.load(tmp_path / "e" / "ditto").refused
    hidden = {f"model.layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up")}
    assert hidden <= set(refused)
    assert all("use_fused_mlp off" in refused[name] for name in hidden)


@pytest.mark.parametrize("standin", ["0.16.0", "1.3.0rc3"], indirect=True)
def test_the_class_is_asked_for_its_keywords_and_not_the_version(standin):
    from ditto_core.backends.trtllm import calls, detect

    there = standin.SIGNATURES[detect.require().version][calls.BUILD_CONFIG.name]["parameters"]
    has = "use_fused_mlp" in [name for name, *_ in there]
    for version in ("0.12.0", "0.20.0", "1.2.1", "9.9"):
        assert calls.BUILD_CONFIG.takes(version, "use_fused_mlp") == has


def test_of_layers_that_differ_in_line_numbers_the_one_with_most_in_common_is_meant():
    names = [f"Model/lm_head/call_L{a}/matmul_L{b}/cast_L{c}/CAST_0" for a, b, c in ((9, 1048, 855), (9, 1050, 855))]
    marker = marking.Marker.__new__(marking.Marker)
    marker.layers = {name: name for name in names}
    assert marker._layer("Model/lm_head/call_L7/matmul_L1048/cast_L855/CAST_0") == names[0]
    assert marker._layer("Model/lm_head/call_L7/matmul_L1050/cast_L1/CAST_0") == names[1]
    with pytest.raises(BuildError) as caught:
        marker._layer("Model/lm_head/call_L7/matmul_L7/cast_L855/CAST_0")
    assert all(name in str(caught.value) for name in names)


def test_a_raw_prefix_before_an_output_is_dropped(standin, checkpoint, tmp_path):
    words = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")]
    trtllm_build.run([*words, "--add-output", "trt:transformer.layers.0.mlp=mlp", "--add-output", "trt:lm_head"])
    assert set(engine_outputs(tmp_path / "e")) == {"logits", "mlp", "lm_head"}


def test_no_glob_means_a_list_of_modules(standin, model, tmp_path):
    report = build.build_engine(**order(model, tmp_path / "e", {"transformer.*": ""}))
    # not transformer.layers, which is the last block's output under another name
    assert set(report["outputs"]) == {"transformer.ln_f"}


def test_a_failed_build_leaves_the_builder_as_it_was(standin, model, tmp_path, monkeypatch):
    import tensorrt_llm.builder as upstream

    before = upstream.Builder.build_engine
    wanted = {"model.norm": "logits"}  # the alias is taken: tracing fails before the engine is built
    with pytest.raises(BuildError):
        build.build_engine(**order(model, tmp_path / "e", wanted, artifacts=str(tmp_path / "art")))
    assert upstream.Builder.build_engine is before


def test_the_builders_configuration_is_written_with_the_profiles_that_the_build_adds(standin, model, tmp_path):
    build.build_engine(**order(model, tmp_path / "e", {}, artifacts=str(tmp_path / "art")))
    written = json.loads((tmp_path / "art" / "builder_config.json").read_text())
    assert written["num_optimization_profiles"] == 2

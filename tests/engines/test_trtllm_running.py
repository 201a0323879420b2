"""Stepping: the adapter's real code on a stand-in runtime that computes with Hugging Face's model.

What is proven is the adapter's side: layouts, pieces of joint projections, forced tokens, residual pairs, threads.
"""

import json
import sys
import threading
from dataclasses import replace

import pytest
import torch

from ditto_core.backends.served.handoff import Handoff
from ditto_core.backends.trtllm.executor import ExecutorRun, additional_outputs
from ditto_core.backends.trtllm.names import torch_place
from ditto_core.backends.trtllm.pytorch import TorchSession
from ditto_core.errors import BackendError, RunError, UsageError
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair, PairOptions
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

SITES = ["model.layers.*", "model.layers.*.self_attn.[qkv]_proj", "model.layers.*.mlp.*_proj", "model.norm"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A two-layer Llama of 64 hidden units, 4 heads of queries and 2 of keys, on the disk."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_decoder("llama", architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


def spec_of(model, outputs, **options):
    return EngineSpec.of(
        str(model), backend="trtllm", dtype="float32", outputs=outputs, options={"isolate": False, **options}
    )


def unlike(session, step):
    """Steps a session on a prompt and then on tokens that the model would not choose."""
    prompt = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    session.start(1)
    out = [session.step(prompt, step)["logits"]]
    for past, token in ((3, 11), (4, 200)):
        mask = torch.ones(1, past + 1, dtype=torch.int64)
        out.append(session.step({"input_ids": torch.tensor([[token]]), "attention_mask": mask}, step)["logits"])
    return out


def forward(model, ids):
    """Logits of the whole sequence in one pass."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return hf(torch.tensor([ids])).logits


@pytest.mark.parametrize("standin", ["0.12.0", "0.16.0", "1.3.0rc3"], indirect=True)
def test_an_engine_in_lockstep_with_eager_on_rows_of_unequal_length(standin, model, workspace):
    pair = Pair(workspace, spec_of(model, SITES, **{"build.max_batch_size": 3}), PairOptions(observer=False))
    comparison = pair.generate([[5, 6, 7], [9, 8, 7, 6, 5]], max_new_tokens=3)
    pair.close()
    # 2 blocks, 6 projections of queries, keys and values, 6 of the MLP, the last norm; logits besides
    assert sorted({r.step for r in comparison.results}) == [0, 1, 2]
    assert len(comparison.results) == 3 * (2 + 6 + 6 + 1 + 1)
    assert max(r.metrics.rel_l2 for r in comparison.results) < 2e-5
    assert comparison.missing == {}
    assert [t.engine for t in comparison.tokens] == [t.reference for t in comparison.tokens]


def test_what_the_engine_cannot_show_is_counted_with_its_reason(standin, model, workspace):
    pair = Pair(workspace, spec_of(model, ["model.layers.0.self_attn:*", "model.norm"]), PairOptions(observer=False))
    comparison = pair.generate([5, 6, 7], max_new_tokens=1)
    pair.close()
    assert {r.site for r in comparison.results} == {"model.layers.0.self_attn:in", "model.norm", "logits"}
    assert comparison.missing["model.layers.0.self_attn:q_rope"].startswith("'q_rope' is inside the attention plugin")


def test_parts_of_an_interleaved_projection_are_refused():
    from ditto_core.backends.trtllm.backend import delivered, requested
    from ditto_core.backends.trtllm.build import interleaved

    assert interleaved({"qk_layernorm": True, "num_attention_heads": 4, "num_key_value_heads": 4})
    assert interleaved({"qk_layernorm": True, "num_attention_heads": 4, "num_key_value_heads": None})
    assert not interleaved({"qk_layernorm": True, "num_attention_heads": 4, "num_key_value_heads": 2})
    assert not interleaved({"num_attention_heads": 4, "num_key_value_heads": 4})
    wanted, _ = requested((Tap("model.layers.0.self_attn.q_proj", "q", fx_node="mm"),))
    qkv = {"requests": ["transformer.layers.0.attention.qkv"], "dtype": "HALF"}
    report = {"outputs": {"transformer.layers.0.attention.qkv": qkv}, "refused": {}}
    config = {"qk_layernorm": True, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert [tap.value for tap in delivered(wanted, report, config)[0]] == ["transformer.layers.0.attention.qkv[0/3]"]
    taps, refused = delivered(wanted, report, {**config, "num_key_value_heads": 4})
    assert taps == ()
    assert "head by head: tap 'trt:transformer.layers.0.attention.qkv'" in refused["model.layers.0.self_attn.q_proj"]


def test_names_of_tensorrt_llm_are_outputs_under_their_alias(standin, model, workspace):
    spec = spec_of(model, {"trt:transformer.layers.*.mlp": "mlp", "model.norm": "last"})
    engine = workspace.build(spec)
    assert {tap.site: tap.value for tap in engine.taps} == {
        "mlp_0": "mlp_0",
        "mlp_1": "mlp_1",
        "last": "transformer.ln_f",
    }


def test_outputs_under_an_alias_have_a_reference(standin, model, workspace):
    spec = spec_of(model, {"trt:transformer.layers.*.mlp": "mlp", "model.norm": "last"}, **{"build.max_batch_size": 3})
    pair = Pair(workspace, spec, PairOptions(observer=False))
    comparison = pair.generate([[5, 6, 7], [9, 8, 7, 6, 5]], max_new_tokens=2)
    pair.close()
    assert comparison.missing == {}
    assert {r.site for r in comparison.results} == {"mlp_0", "mlp_1", "last", "logits"}
    assert max(r.metrics.rel_l2 for r in comparison.results) < 2e-5


def test_the_tokens_are_the_callers(standin, model, workspace):
    session = workspace.build(spec_of(model, ["model.norm"])).open()
    logits = unlike(session, lambda site, tensor: None)
    session.close()
    expected = forward(model, [5, 6, 7, 11, 200])
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)


def test_a_new_sequence_begins_with_an_empty_cache_and_leaves_no_thread(standin, model, workspace):
    session = workspace.build(spec_of(model, ["model.norm"])).open()
    first, second = unlike(session, print_nothing), unlike(session, print_nothing)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    session.close()
    assert not [t for t in threading.enumerate() if t.name == "ditto-handoff"]


def print_nothing(site, tensor):
    pass


def test_nothing_is_dumped_to_the_disk_while_stepping(standin, model, workspace):
    session = workspace.build(spec_of(model, ["model.norm"])).open()
    unlike(session, print_nothing)
    assert session._runner.session.dumped == []
    session.close()


def test_a_prompt_that_does_not_fit_is_an_error(standin, model, workspace):
    session = workspace.build(spec_of(model, ["model.norm"])).open()
    session._limit = 3
    with pytest.raises(RunError, match="a prompt of 3 tokens does not fit the engine's 3 tokens"):
        unlike(session, print_nothing)


def test_an_engine_of_several_ranks_is_refused_with_the_way_out(standin, model, workspace, tmp_path):
    engine = workspace.build(spec_of(model, ["model.norm"])).copy_to(tmp_path / "e")
    (tmp_path / "e" / "rank1.engine").write_bytes(b"x")
    with pytest.raises(BackendError, match="has 2 ranks, which need MPI: dump each rank there and merge"):
        engine.open()


@pytest.fixture(params=["llama", "qwen3"])
def style(request, monkeypatch):
    torch_llm = pytest.importorskip("standin_trtllm.torch_llm", reason="the stand-in needs TensorRT-RTX")
    monkeypatch.setitem(torch_llm.STYLE, "style", request.param)
    monkeypatch.setitem(torch_llm.STYLE, "gathers", True)
    return request.param


@pytest.mark.parametrize("standin", ["1.3.0rc3"], indirect=True)
def test_the_pytorch_backend_in_lockstep_with_eager(standin, style, model, workspace):
    outputs = [
        *SITES,
        "model.layers.*:in",
        "model.layers.*.*_layernorm",
        "model.layers.*.*_layernorm:in",
        "model.layers.*.mlp",
    ]
    pair = Pair(workspace, spec_of(model, outputs, engine="pytorch"), PairOptions(observer=False))
    comparison = pair.generate([5, 6, 7, 8], max_new_tokens=3)
    pair.close()
    worst = max(comparison.results, key=lambda r: r.metrics.rel_l2)
    assert worst.metrics.rel_l2 < 2e-5, worst.site
    # the input of layer 1 is the very tensor that layer 0 puts out, and goes by that name
    sites = {f"model.layers.{i}{end}" for i in (0, 1) for end in ("", ".post_attention_layernorm:in", ".mlp.up_proj")}
    assert {r.site for r in comparison.results} >= sites
    assert len(comparison.results) == 3 * len({r.site for r in comparison.results})
    assert comparison.missing == {}


@pytest.mark.parametrize("standin", ["1.3.0rc3"], indirect=True)
def test_the_pytorch_backend_gets_the_callers_tokens_and_safe_settings(standin, style, model):
    taps = (Tap("model.layers.0", torch_place("model.layers.0").value),)
    spec = spec_of(model, ["model.layers.0"])
    trusted = replace(spec, model=replace(spec.model, trust_remote_code=True))
    session = TorchSession(trusted, str(model), taps)
    logits = unlike(session, print_nothing)
    torch.testing.assert_close(torch.cat(logits, 1), forward(model, [5, 6, 7, 11, 200]), rtol=1e-4, atol=1e-4)
    settings = session._llm.settings
    assert settings["cuda_graph_config"] is None
    assert settings["disable_overlap_scheduler"] is True
    assert settings["kv_cache_config"] == {"enable_block_reuse": False}
    assert settings["trust_remote_code"] is True
    with pytest.raises(UsageError, match="stepped one row at a time, got 2: give one prompt"):
        session.start(2)
    session.close()


@pytest.mark.parametrize("standin", ["1.3.0rc3"], indirect=True)
def test_where_the_sampler_gives_the_last_tokens_logits_alone_these_are_compared(standin, style, model, workspace):
    from standin_trtllm import torch_llm

    from ditto_core.backends.trtllm import calls

    assert calls.LLM.available("1.0.0", enable_trtllm_sampler=True) == {}  # the installed class lacks it
    torch_llm.STYLE["gathers"] = False  # the fixture puts the dictionary's entries back
    pair = Pair(workspace, spec_of(model, ["model.norm"], engine="pytorch"), PairOptions(observer=False))
    comparison = pair.generate([5, 6, 7, 8], max_new_tokens=2)
    pair.close()
    assert {(r.site, r.step) for r in comparison.results} == {(s, i) for s in ("model.norm", "logits") for i in (0, 1)}
    assert max(r.metrics.rel_l2 for r in comparison.results) < 2e-5


@pytest.mark.parametrize("standin", ["1.3.0rc3"], indirect=True)
def test_warm_up_runs_are_not_taken_for_steps(standin, model):
    session = TorchSession(spec_of(model, ["model.norm"]), str(model), (Tap("model.norm", "model.norm"),))
    session._handoff = Handoff()
    session._engine.is_warmup = True
    assert session._leave({}, None) is None  # it would wait for a consumer
    session._engine.is_warmup = False
    session._handoff = None
    session.close()


@pytest.mark.parametrize("standin", ["1.3.0rc3"], indirect=True)
def test_a_failing_request_is_an_error_and_not_a_hang(standin, model):
    session = TorchSession(spec_of(model, ["model.norm"]), str(model), (Tap("model.norm", "model.norm"),))
    session._module.lm_head.weight = torch.nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(RunError, match="TensorRT-LLM failed: "):
        unlike(session, print_nothing)
    session.close()


@pytest.mark.parametrize("standin", ["0.14.0", "0.16.0", "1.3.0rc3"], indirect=True)
def test_the_executor_keeps_debug_tensors_in_memory(standin):
    run = ExecutorRun("engine", iterations=2, debug=["transformer.layers.0"])
    assert run.generate([1, 2, 3], 2).output_token_ids == [[7, 7]]
    assert [t["transformer.layers.0"].tolist() for t in run.debug_tensors()] == [[0, 0], [1, 1]]
    run.close()


@pytest.mark.parametrize("standin", ["0.13.0"], indirect=True)
def test_the_executor_of_013_writes_files(standin):
    run = ExecutorRun("engine", iterations=2)
    assert run._executor.config.debug_config.dump_output_tensors is True
    with pytest.raises(BackendError, match="writes debug tensors to files: compare `tllm_debug`"):
        list(run.debug_tensors())


@pytest.mark.parametrize("standin", ["0.12.0"], indirect=True)
def test_the_executor_of_012_shows_nothing(standin):
    with pytest.raises(BackendError, match=r"the executor of TensorRT-LLM 0.12.0 shows no tensors"):
        ExecutorRun("engine", iterations=2)


@pytest.mark.parametrize(
    ("standin", "field"),
    [("0.17.0.dev2024121700", "additional_output_names"), ("1.3.0rc3", "additional_model_outputs")],
    indirect=["standin"],
)
def test_additional_outputs_are_asked_for_in_both_places(standin, field):
    run = ExecutorRun("engine", iterations=0, outputs=["hidden"])
    assert len(getattr(run._executor.config, field)) == 1
    found = additional_outputs(run.generate([1, 2, 3], 1))
    assert {name: list(t.shape) for name, t in found.items()} == {"context_hidden": [3, 3]}


@pytest.mark.parametrize("standin", ["0.16.0"], indirect=True)
def test_additional_outputs_need_017(standin):
    with pytest.raises(BackendError, match=r"0.16.0 has no additional outputs \(0.17 has\)"):
        ExecutorRun("engine", iterations=0, outputs=["hidden"])


def test_a_run_that_ends_early_is_an_error():
    handoff = Handoff()
    handoff.start(lambda: handoff.offer("one"))
    assert handoff.step() == "one"
    with pytest.raises(RunError, match="ended the sequence before the last step"):
        handoff.step("go on")


def test_a_run_that_fails_carries_its_message():
    handoff = Handoff()

    def run():
        raise ValueError("out of blocks\nmore")

    handoff.start(run)
    with pytest.raises(RunError, match=r"TensorRT-LLM failed: out of blocks$"):
        handoff.step()


def test_an_engine_is_dumped_where_it_runs_and_compared_by_its_name_map(standin, model, workspace, tmp_path):
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from ditto_core.backends.trtllm.run_command import dump
    from ditto_core.compare.dumps import compare_dumps

    engine = workspace.build(spec_of(model, SITES))
    tokens = dump(engine.directory, [[5, 6, 7]], 2, tmp_path / "ours")
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    kept = {}
    for name in ("model.layers.1.self_attn.k_proj", "model.layers.0.mlp.up_proj"):
        hf.get_submodule(name).register_forward_hook(lambda m, a, out, name=name: kept.update({name: out[0]}))
    with torch.inference_mode():
        hf(torch.tensor([[5, 6, 7]]))
    (tmp_path / "theirs").mkdir()
    save_file({name: t.contiguous() for name, t in kept.items()}, tmp_path / "theirs" / "step0.safetensors")
    pairs = list(
        compare_dumps(tmp_path / "ours", tmp_path / "theirs", name_map=tmp_path / "ours" / "names.json").pairs()
    )
    assert {pair.name for pair in pairs} == set(kept)
    for pair in pairs:
        torch.testing.assert_close(pair.actual, pair.expected, rtol=1e-4, atol=1e-4)
    assert [len(row) for row in tokens] == [2]


def test_a_build_in_a_child_process_leaves_the_same_engine(standin, model, workspace):
    spec = EngineSpec.of(str(model), backend="trtllm", dtype="float32", outputs=["model.norm"])
    engine = workspace.build(spec)
    assert [tap.value for tap in engine.taps] == ["transformer.ln_f"]
    assert (engine.directory / "build.log").exists()
    assert (engine.directory / "rank0.engine").exists()


@pytest.mark.parametrize("standin", ["0.12.0"], indirect=True)
def test_the_four_documented_steps_end_in_a_comparison_of_every_site(
    standin, model, workspace, tmp_path, monkeypatch, capsys
):
    from standin_trtllm.llama import config_of
    from typer.testing import CliRunner

    from ditto_core.backends.trtllm import build_command, run_command
    from ditto_core.cli import application

    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    pair = Pair(
        workspace,
        EngineSpec.of(str(model), outputs=["model.layers.*", "model.layers.*.self_attn.[oq]_proj", "lm_head"]),
        PairOptions(observer=False, dump=tmp_path / "eager"),
    )
    pair.generate(prompts, max_new_tokens=3)
    pair.close()
    (tmp_path / "ckpt").mkdir()
    config = {**config_of(model, "float32").to_dict(), "architecture": "LlamaForCausalLM"}
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(config))
    engine, dump = tmp_path / "engine", tmp_path / "dump"
    words = ["--checkpoint_dir", str(tmp_path / "ckpt"), "--output_dir", str(engine)]
    outputs = ["model.layers.*", "model.layers.*.self_attn.o_proj", "model.layers.*.self_attn.q_proj", "lm_head=head"]
    added = [word for name in outputs for word in ("--add-output", name)]
    build_command.run([*words, *added])
    given = [word for row in prompts for word in ("--input-ids", ",".join(map(str, row)))]
    monkeypatch.setattr(sys, "argv", ["trtllm_run", str(engine), *given, "--steps", "3", "--dump-dir", str(dump)])
    run_command.main()
    assert [len(json.loads(line)) for line in capsys.readouterr().out.splitlines()] == [3, 3]
    assert {f"step{i}.{kind}" for i in range(3) for kind in ("safetensors", "txt")} < {p.name for p in dump.iterdir()}
    assert "input_ids" in (dump / "step1.txt").read_text()
    written = json.loads((dump / "names.json").read_text())
    assert written["padding"]["lengths"] == [3, 5]
    assert "past_key_value_0" in written["ignore"]
    assert not {"logits", "input_ids", "head"} & set(written["ignore"])
    command = ["compare", str(dump), str(tmp_path / "eager" / "reference"), "--name-map", str(dump / "names.json")]
    result = CliRunner().invoke(application(), [*command, "--ignore-missing", "--json", str(tmp_path / "found.json")])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())
    sites = {each["site"] for each in found["results"]}
    assert sites >= {"model.layers.0", "model.layers.1.self_attn.o_proj", "model.layers.0.self_attn.q_proj"}
    assert sites >= {"lm_head", "output:logits", "input:input_ids"}
    assert max(each["metrics"]["rel_l2"] for each in found["results"]) < 2e-5
    # without the map, the error says what is the matter
    plain = CliRunner().invoke(
        application(), ["compare", str(dump), str(tmp_path / "eager" / "reference"), "--ignore-missing"]
    )
    assert plain.exit_code == 2
    assert "padding" in plain.output

"""Names of TensorRT-LLM and of Hugging Face, both ways, and the installation that is found without importing it."""

import sys

import pytest
import torch

from ditto_core.backends.packing import prompts, to_rows
from ditto_core.backends.trtllm import detect, names
from ditto_core.backends.trtllm.names import Place
from ditto_core.dumps.namemap import NameMap
from ditto_core.errors import BackendError, UsageError


@pytest.mark.parametrize(
    ("site", "value"),
    [
        ("model.embed_tokens", "transformer.vocab_embedding"),
        ("model.layers.3", "transformer.layers.3"),
        ("model.layers.12.self_attn", "transformer.layers.12.attention"),
        ("model.layers.3.self_attn.q_proj", "transformer.layers.3.attention.qkv[0/3]"),
        ("model.layers.3.self_attn.v_proj", "transformer.layers.3.attention.qkv[2/3]"),
        ("model.layers.3.self_attn.v_proj:in", "transformer.layers.3.attention.qkv:in"),
        ("model.layers.3.self_attn.o_proj", "transformer.layers.3.attention.dense"),
        ("model.layers.3.mlp.gate_proj", "transformer.layers.3.mlp.fc"),
        ("model.layers.3.mlp.up_proj", "transformer.layers.3.mlp.gate"),
        ("model.layers.3.mlp.down_proj:in", "transformer.layers.3.mlp.proj:in"),
        ("model.layers.3.post_attention_layernorm", "transformer.layers.3.post_layernorm"),
        ("model.norm", "transformer.ln_f"),
        ("transformer.h.3.attn.c_attn", "transformer.layers.3.attention.qkv"),
        ("transformer.h.3.mlp.c_proj", "transformer.layers.3.mlp.proj"),
        ("lm_head", "lm_head"),
        ("model.layers.3.self_attn.qkv_proj", "transformer.layers.3.attention.qkv"),
        ("model.layers.3.mlp.gate_up_proj", "transformer.layers.3.mlp.fc[1,0]"),
        ("model.layers.3.mlp.gate", "transformer.layers.3.mlp.router"),
        ("model.layers.3.block_sparse_moe.gate", "transformer.layers.3.mlp.router"),
    ],
)
def test_site_has_its_place_in_an_engine(site, value):
    place = names.engine_place(site)
    assert place.value == value
    assert Place.parse(value) == place


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        ("model.layers.3.self_attn:q_rope", "'q_rope' is inside the attention plugin"),
        ("model.layers.3.mlp.act_fn", "without a module of its own"),
        ("model.layers.3.mlp.router", "no module of that name"),
    ],
)
def test_site_without_a_place_has_a_reason(site, reason):
    assert names.engine_place(site) is None
    assert reason in names.why_not(site)


def test_the_pytorch_backend_keeps_hugging_face_names_but_for_joint_projections():
    assert names.torch_place("model.layers.3.mlp.up_proj").value == "model.layers.3.mlp.gate_up_proj[1/2]"
    assert names.torch_place("model.layers.3.self_attn.k_proj").value == "model.layers.3.self_attn.qkv_proj[1/3]"
    assert names.torch_place("model.layers.3.mlp.down_proj:in").value == "model.layers.3.mlp.down_proj:in"
    assert names.torch_place("model.layers.3.self_attn:q_rope") is None


def test_a_module_has_its_names_in_every_family():
    assert list(names.sites("transformer.layers.7.mlp.fc")) == [
        "model.layers.7.mlp.gate_proj",
        "transformer.h.7.mlp.c_fc",
        "model.layers.7.mlp.gate_up_proj",
    ]
    assert list(names.sites("something.else")) == []


def test_the_name_map_of_a_dump_renames_and_cuts_the_joint_projection():
    present = ["transformer.layers.3.attention.qkv", "transformer.layers.3.mlp.proj", "logits"]
    found = names.name_map("llama", 4, 2, present)
    assert NameMap.from_json(found).unused(present) == []
    entries = NameMap.from_json(found).entries(present)
    joint = torch.arange(16.0).reshape(1, 16)
    taken = {name: entry.take(joint).tolist()[0] for name, entry in entries.items()}
    assert taken["model.layers.3.self_attn.q_proj"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert taken["model.layers.3.self_attn.k_proj"] == [8, 9, 10, 11]
    assert taken["model.layers.3.self_attn.v_proj"] == [12, 13, 14, 15]
    assert list(entries)[3:] == ["model.layers.3.mlp.down_proj", "logits"]
    assert names.name_map("gpt2", 4, 4, ["transformer.layers.0.mlp.fc:in"]) == {
        "names": {"transformer.layers.{i}.mlp.fc:in": "transformer.h.{i}.mlp.c_fc:in"},
        "split": [],
    }


def test_an_unknown_family_names_the_nearest():
    with pytest.raises(
        UsageError, match="unknown family 'lama', expected llama, gpt2, phi3, pytorch; did you mean 'llama'"
    ):
        names.name_map("lama", 1, 1, [])


REAL = torch.tensor([[False, True, True], [True, True, True]])


def test_packed_tokens_become_left_padded_rows():
    packed = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    expected = [[0, 1, 2], [3, 4, 5]]
    assert to_rows(packed, REAL)[..., 0].tolist() == expected
    assert to_rows(packed[None], REAL)[..., 0].tolist() == expected


def test_right_padded_rows_become_left_padded_rows():
    padded = torch.tensor([[[1.0], [2.0], [9.0]], [[3.0], [4.0], [5.0]]])
    assert to_rows(padded, REAL)[..., 0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_one_token_a_row_becomes_rows_of_length_one():
    assert to_rows(torch.zeros(2, 7), torch.ones(2, 1, dtype=torch.bool)).shape == (2, 1, 7)
    assert to_rows(torch.zeros(2, 7), REAL).shape == (2, 1, 7)  # logits of the last tokens only


def test_prompts_lose_their_padding():
    ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
    assert [p.tolist() for p in prompts(ids, REAL.long())] == [[5, 6], [7, 8, 9]]


def test_a_piece_is_cut_by_the_ratio_of_heads():
    joint = torch.arange(8)
    assert Place("x", "", 1, 3).cut(joint, (2, 1, 1)).tolist() == [4, 5]
    assert Place("x").cut(joint, (2, 1, 1)) is joint


def package(folder, version, *files):
    root = folder / "tensorrt_llm"
    for name in ("__init__.py", *files):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("raise RuntimeError('imported')\n")
    (root / "version.py").write_text(f'__version__ = "{version}"\n')
    return root


def test_an_installation_is_recognized_without_importing_it(tmp_path, monkeypatch):
    package(tmp_path, "0.16.0", *detect.ENGINE_FILES)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = detect.find()
    assert (found.version, found.numbers, found.engines, found.pytorch) == ("0.16.0", (0, 16, 0), True, False)
    assert "tensorrt_llm" not in sys.modules
    assert "no PyTorch backend: it needs TensorRT-LLM 1.0 or later" in list(detect.problems(found))


def test_a_version_after_the_removal_has_the_pytorch_backend_alone(tmp_path, monkeypatch):
    package(tmp_path, "1.4.0rc1", "_torch/__init__.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = detect.find()
    assert (found.engines, found.pytorch, found.label) == (False, True, "tensorrt_llm 1.4.0rc1: PyTorch backend")
    assert any("builder.py" in line and "1.2.1" in line for line in detect.problems(found))


def test_without_an_installation_the_report_gives_the_commands_for_the_container(monkeypatch):
    monkeypatch.setattr(detect, "find", lambda: None)
    lines = list(detect.report_lines())
    assert "tensorrt_llm is not installed" in lines[0]
    assert any("python -m ditto_core.trtllm_build" in line for line in lines)
    with pytest.raises(BackendError, match="work in the vendor's container, or dump there and compare here"):
        detect.require()


@pytest.mark.parametrize(
    ("text", "numbers"), [("1.3.0rc3", (1, 3, 0)), ("v0.17.0.dev2024", (0, 17, 0)), ("x", (0, 0, 0))]
)
def test_release_numbers(text, numbers):
    assert detect.release(text) == numbers


def test_a_name_of_an_engine_is_the_sites_of_either_family_and_a_joint_one_is_none():
    assert names.same("transformer.layers.3.mlp") == (
        "model.layers.3.mlp",
        "transformer.h.3.mlp",
        "model.layers.3.block_sparse_moe",
    )
    assert names.same("transformer.layers.3.attention.dense:in")[0] == "model.layers.3.self_attn.o_proj:in"
    assert names.same("transformer.layers.3.attention.qkv") == (
        "transformer.h.3.attn.c_attn",
        "model.layers.3.self_attn.qkv_proj",
    )
    assert names.same("model.norm") == ("model.norm",)
    assert names.same("transformer.ln_f") == ("transformer.ln_f", "model.norm")
    assert names.same("anything.else") == ()


def test_the_halves_of_phi3s_joint_projection_are_put_in_the_order_of_hugging_face():
    # the converter writes [up | gate], Hugging Face computes [gate | up]
    engine = torch.tensor([[30.0, 40.0, 1.0, 2.0]])
    assert Place.parse("transformer.layers.0.mlp.fc[1,0]").cut(engine, (1, 1, 1)).tolist() == [[1, 2, 30, 40]]
    found = NameMap.from_json(names.name_map("phi3", 4, 4, ["transformer.layers.3.mlp.fc"]))
    sides = [
        {name: entry.take(tensor).tolist() for name, entry in found.entries([source]).items()}
        for source, tensor in (
            ("transformer.layers.3.mlp.fc", engine),
            ("model.layers.3.mlp.gate_up_proj", torch.tensor([[1.0, 2.0, 30.0, 40.0]])),
        )
    ]
    assert sides[0] == sides[1]
    assert sides[0]["model.layers.3.mlp.gate_up_proj.up"] == [[30, 40]]


def test_gemma3s_embedding_is_not_hugging_faces_which_scales():
    name = "transformer.vocab_embedding"
    assert names.same(name, "Gemma3ForCausalLM") == ()
    assert names.same(name, "Gemma2ForCausalLM")[0] == "model.embed_tokens"
    assert names.comparable(name, "LlamaForCausalLM")
    assert not names.comparable(name, "Gemma3ForCausalLM")
    assert names.comparable(f"{name}:in", "Gemma3ForCausalLM")


def test_norms_of_heads_have_no_partner_by_name_since_families_lay_them_out_differently():
    assert names.same("transformer.layers.3.attention.q_layernorm", "Qwen3ForCausalLM") == ()
    assert not names.comparable("transformer.layers.3.attention.k_layernorm", "Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("GPT2LMHeadModel", "gpt2"), ("Phi3ForCausalLM", "phi3"), ("Gemma3ForCausalLM", "llama"), ("", "llama")],
)
def test_the_architecture_chooses_the_names(architecture, family):
    assert names.family_of(architecture) == family


def test_an_alias_has_the_rules_of_what_it_holds():
    assert names.alias_map("llama", 4, 2, "mine", "transformer.layers.3.mlp") == {
        "names": {"mine": "model.layers.3.mlp"},
        "split": [],
    }
    joint = names.alias_map("llama", 4, 2, "joint", "transformer.layers.3.attention.qkv")["split"]
    assert [(rule["from"], rule["to"][0], rule["sizes"]) for rule in joint] == [
        ("joint", "model.layers.3.self_attn.q_proj", [4, 2, 2])
    ]


@pytest.mark.parametrize(
    ("files", "engines", "pytorch"),
    [
        (("_torch/__init__.py",), True, False),  # 0.17 to 0.21: a prototype beside the engines
        (("_torch/__init__.py", "_tensorrt_engine/__init__.py"), True, True),  # 1.0 to 1.2.1
    ],
)
def test_the_files_tell_which_backend_llm_is_whatever_the_version_says(tmp_path, monkeypatch, files, engines, pytorch):
    package(tmp_path, "0.99", *detect.ENGINE_FILES, *files)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = detect.find()
    assert (found.engines, found.pytorch) == (engines, pytorch)


def test_an_installation_without_tensorrt_does_not_run(tmp_path, monkeypatch):
    from ditto_core.backends.trtllm import TrtllmBackend
    from ditto_core.cli import doctor

    package(tmp_path, "0.16.0", *detect.ENGINE_FILES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(detect, "installed", lambda name: "")
    with pytest.raises(BackendError, match="tensorrt itself is not installed"):
        TrtllmBackend().check_runs()
    assert doctor.state(TrtllmBackend()).startswith("does not run here (tensorrt_llm 0.16.0,")
    monkeypatch.setattr(detect, "installed", lambda name: "10.7")
    assert doctor.state(TrtllmBackend()).startswith("ok (tensorrt_llm 0.16.0")


def test_a_backend_whose_module_misses_a_package_is_a_line_of_the_report_and_not_its_end(monkeypatch):
    from ditto_core.cli import doctor

    monkeypatch.setitem(sys.modules, "onnx", None)
    for name in [n for n in sys.modules if n in ("ditto_core.backends.openvino", "ditto_core.backends.onnx_file")]:
        monkeypatch.delitem(sys.modules, name)
    assert str(doctor.loaded("openvino")).startswith("no: ")
    assert doctor.loaded("trtllm").name == "trtllm"

"""What servers share: packed rows, chunks of a prompt, sites in vLLM's modules."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from ditto_core.backends.served.capture import Server, block_input, block_output
from ditto_core.backends.served.forcing import laid_out, one_hot
from ditto_core.backends.served.session import Rows, differing, joined
from ditto_core.backends.vllm.backend import VllmBackend, report
from ditto_core.backends.vllm.names import place_of
from ditto_core.backends.vllm.requests import followed
from ditto_core.backends.vllm.serving import Modules
from ditto_core.backends.vllm.vllm_options import VllmOptions
from ditto_core.errors import BackendError, SelectorError, UsageError
from ditto_core.session import Trail
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec
from ditto_core.stepping.inputs import input_differences, position_differences, weight_differences
from ditto_core.stepping.prompts import TokenBatch
from ditto_core.system.fingerprint import checksum

SERVER = Server("a server", "head", "next_norm")


def test_packed_rows_come_in_the_callers_order():
    rows = Rows(order=[2, 0, 1], counts=[1, 3, 2])
    packed = torch.tensor([20.0, 0, 1, 2, 10, 11, 99])  # the last is padding
    assert rows.sorted(packed).tolist() == [0, 1, 2, 10, 11, 20]
    assert rows.sorted(torch.tensor([[2.0], [0.0], [1.0]])).tolist() == [[0], [1], [2]]


def test_chunks_of_a_prompt_are_joined_but_for_the_logits():
    parts = [{"x": torch.zeros(2, 1), "logits": torch.zeros(1, 3)}, {"x": torch.ones(1, 1), "logits": torch.ones(1, 3)}]
    found = joined(parts)
    assert found["x"].tolist() == [[0], [0], [1]]
    assert found["logits"].tolist() == [[1, 1, 1]]


class Block(torch.nn.Module):
    def __init__(self, next_norm=None):
        super().__init__()
        self.self_attn, self.next_norm = torch.nn.Identity(), next_norm


HIDDEN, RESIDUAL = torch.tensor([1.0]), torch.tensor([10.0])


def test_a_blocks_output_is_what_the_residual_stream_holds_behind_it():
    assert block_output(SERVER, Block(), (HIDDEN, RESIDUAL)).item() == 11
    assert block_output(SERVER, Block(torch.nn.Identity()), (HIDDEN, RESIDUAL)).item() == 10
    assert block_output(SERVER, torch.nn.Identity(), (HIDDEN, RESIDUAL)).item() == 1  # a norm: normed, sum
    assert block_output(SERVER, torch.nn.Identity(), (HIDDEN, None)).item() == 1  # a projection and its bias


def test_positions_before_the_hidden_states_are_no_input():
    args = (torch.tensor([0]), HIDDEN, RESIDUAL)
    assert block_input(SERVER, Block(), args, {}).item() == 11
    assert block_input(SERVER, Block(), args[:2], {}).item() == 1


def test_tokens_stand_where_the_axes_have_them():
    rows = torch.zeros(2, 5, 4, 8)  # batch, tokens, heads, size
    assert laid_out(rows, ("batch", "head", "length", "")).shape == (2, 4, 5, 8)
    assert laid_out(rows, ("batch", "head", "total", "")).shape == (2, 4, 5, 8)
    assert laid_out(rows, ("batch", "length", "head", "")).shape == (2, 5, 4, 8)


def test_only_the_forced_token_can_win():
    assert one_hot(torch.tensor([[5.0, 9.0, 1.0]], dtype=torch.float16), torch.tensor([2])).argmax(-1).tolist() == [2]


LLAMA = Modules(
    {
        "model.embed_tokens": "VocabParallelEmbedding",
        "model.layers.0": "LlamaDecoderLayer",
        "model.layers.0.self_attn.qkv_proj": "QKVParallelLinear",
        "model.layers.0.self_attn.rotary_emb": "RotaryEmbedding",
        "model.layers.0.self_attn.attn": "Attention",
        "model.layers.0.mlp.gate_up_proj": "MergedColumnParallelLinear",
        "model.layers.0.mlp.act_fn": "SiluAndMul",
    },
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
)


@pytest.mark.parametrize(
    ("site", "value"),
    [
        ("model.layers.0", "model.layers.0"),
        ("model.layers.0:in", "model.layers.0:in"),
        ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.qkv_proj[1/3]"),
        ("model.layers.0.self_attn.k_proj:in", "model.layers.0.self_attn.qkv_proj:in"),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_up_proj[1/2]"),
        ("model.layers.0.self_attn:q_rope", "model.layers.0.self_attn.attn:q_rope"),
        ("model.layers.0.self_attn:context", "model.layers.0.self_attn.attn:context"),
    ],
)
def test_a_site_has_its_place_in_vllms_modules(site, value):
    assert place_of(Tap(site, "v"), LLAMA).value == value


@pytest.mark.parametrize(
    ("tap", "reason"),
    [
        (Tap("model.layers.0.self_attn:probs", "v"), "inside the attention kernel"),
        (Tap("model.layers.0.mlp.act_fn", "v"), "multiplies with up_proj"),
        (Tap("model.layers.0.self_attn.rotary_emb", "v"), "not cosines and sines"),
        (Tap("model.embed_tokens", "v", module_class="Gemma3TextScaledWordEmbedding"), "scales the embedding"),
        (Tap("model.layers.0.mlp.experts", "v"), "no module of that name"),
        (Tap("lm_head", "v"), "last token's logits"),
        (Tap("model.layers.0.mlp:q_rope", "v"), "no attention module"),
    ],
)
def test_a_site_without_a_place_has_a_reason(tap, reason):
    assert reason in place_of(tap, LLAMA)
    assert list(report([tap], LLAMA).refused) == [tap.site]


def test_a_module_that_serves_several_layers_is_no_place():
    modules = Modules({"transformer.h.0.mlp.act": "NewGELU"}, {}, ("transformer.h.0.mlp.act",))
    assert "serves several layers" in place_of(Tap("transformer.h.0.mlp.act", "v"), modules)


def test_phi3_keeps_its_joint_projection_under_its_own_name():
    modules = Modules(LLAMA.classes, {"qkv_proj": ("qkv_proj",)})
    assert place_of(Tap("model.layers.0.self_attn.qkv_proj", "v"), modules).value == "model.layers.0.self_attn.qkv_proj"
    assert "no module" in place_of(Tap("model.layers.0.self_attn.q_proj", "v"), modules)


def test_an_engine_without_taps_is_run_as_it_is_served():
    plain = VllmOptions.of(EngineSpec.of("m", backend="vllm"))
    assert (plain.eager(tapped=True), plain.eager(tapped=False)) == (True, False)
    off = VllmOptions.of(EngineSpec.of("m", backend="vllm", options={"compiled": "off", "engine.seed": 3}))
    assert (off.eager(tapped=False), off.engine) == (True, {"seed": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"compild": "on"}, "no option 'compild'.*compiled"), ({"compiled": "yes"}, "compiled is 'yes', expected auto")],
)
def test_a_wrong_option_is_an_error(options, message):
    with pytest.raises(UsageError, match=message):
        VllmOptions.of(EngineSpec.of("m", backend="vllm", options=options))


def test_without_vllm_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("ditto_core.backends.vllm.serving.DISTRIBUTIONS", ())
    with pytest.raises(BackendError, match="vllm is not installed: pip install vllm"):
        VllmBackend().versions()
    with pytest.raises(SelectorError, match="no raw names"):
        VllmBackend().raw_taps("fx:mm", "x")


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((2, 3, 8, 64), ("batch", "head", "total", "")),  # keys of three heads, three new tokens of eight
        ((2, 3, 3, 8), ("batch", "head", "length", "total")),
        ((2, 3, 3, 64), ("batch", "", "", "")),  # heads or tokens first: it cannot be told
        ((2, 4, 3, 64), ("batch", "head", "length", "")),
        ((2, 3, 64), ("batch", "length", "")),
    ],
)
def test_as_many_heads_as_tokens_are_not_taken_for_tokens(shape, axes):
    from ditto_core.model.summary import axes_of

    assert axes_of(shape, (2, 3), 8) == axes


class StandInServer:
    """Reads every text with a BOS before it and every conversation without the call for an answer, computes in another
    dtype, took a RoPE base of its own and did not take the penalty."""

    info = SimpleNamespace(dtype="bfloat16")

    def tokens(self, text):
        return [1, *map(ord, text)]

    def chat(self, messages):
        return [2, 72, 105]

    def settings(self):
        return {"rope_theta": 1e6, "hidden_act": "silu", "unknown_here": 3}

    def generation(self):
        return {"temperature": 0.6}


class StandInTokenizer:
    chat_template = "..."

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        return [2, *map(ord, messages[0]["content"]), *[3] * add_generation_prompt]


HI = TokenBatch(torch.tensor([[0, 72, 105], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]]), ("Hi", ""))
OWN = SimpleNamespace(
    config=SimpleNamespace(rope_theta=1e4, hidden_act="silu"),
    generation_config=GenerationConfig(temperature=0.6, repetition_penalty=1.3, eos_token_id=2),
)


def test_inputs_are_compared_before_any_tensor():
    found = list(input_differences(StandInServer(), HI, OWN, StandInTokenizer(), "float32"))
    assert [line.removeprefix("inputs differ: ") for line in found] == [
        "'Hi' is [1, 72, 105] (3 tokens) for the engine, [72, 105] (2 tokens) for the reference",
        "'Hi' of a user in the chat template is [2, 72, 105] (3 tokens) for the engine, "
        "[2, 72, 105, 3] (4 tokens) for the reference",
        "dtype is 'bfloat16' in the engine, 'float32' in the reference",
        "rope_theta is 1000000.0 in the engine, 10000.0 in the reference",
        "default repetition_penalty is None in the engine, 1.3 in the reference",
    ]
    assert list(input_differences(object(), HI, OWN, StandInTokenizer(), "float32")) == []


def test_a_server_that_does_not_tell_has_no_differences(monkeypatch):
    for name in ("tokens", "chat"):
        monkeypatch.setattr(StandInServer, name, lambda self, text: None)
    monkeypatch.setattr(StandInServer, "settings", lambda self: {})
    monkeypatch.setattr(StandInServer, "generation", lambda self: None)
    assert list(input_differences(StandInServer(), HI, OWN, StandInTokenizer(), "bfloat16")) == []
    assert list(input_differences(StandInServer(), HI, OWN, None, "bfloat16")) == []


def test_positions_are_compared_without_padding():
    ours, real = torch.tensor([[0, 0, 1], [0, 1, 2]]), torch.tensor([[0, 1, 1], [1, 1, 1]]).bool()
    assert differing(torch.tensor([0, 1, 0, 1, 2]), ours, real) == ""
    assert differing(torch.tensor([9, 9]), ours, real) == ""  # the others came from a cache
    assert (
        differing(torch.tensor([0, 1, 1, 2, 3]), ours, real)
        == "positions of row 1 are [1, 2, 3] in the engine, [0, 1, 2] in the reference"
    )
    session = SimpleNamespace(other_positions="positions of row 1 are …")
    assert list(position_differences(session)) == ["inputs differ: positions of row 1 are …"]
    assert list(position_differences(object())) == []


def test_a_request_that_is_computed_again_begins_a_new_trail():
    passes = [(0, ((0, 4),)), (1, ((9, 1), (4, 1))), (1, ((10, 1), (5, 1))), (0, ((0, 6),)), (0, ((6, 1),))]
    trail = Trail()
    for kept, step in zip([0, 1, 2, 3, 4], passes, strict=True):
        trail = followed(trail, step, kept)
    assert trail == Trail(3, tuple(passes[3:]))


class StandInWeights:
    """Holds the first weight in another order, the second with a changed number, the third in a form of its own."""

    info = SimpleNamespace(dtype="bfloat16")

    def __init__(self, module):
        first, second, third = (p.detach().bfloat16() for p in module.parameters())
        changed = second.clone()
        changed[0, 0] += 1
        self._held = {"0.weight": first.T, "1.weight": changed, "2.weight": third[:1], "3.weight": third}

    def weights(self):
        return {name: checksum(tensor) for name, tensor in self._held.items()}


def test_a_weight_that_the_engine_has_otherwise_is_said_before_any_tensor():
    module = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(3)))
    (line,) = weight_differences(StandInWeights(module), module)
    assert line == "inputs differ: 1 of 2 weights that the engine shows are others, first 1.weight"
    assert list(weight_differences(object(), module)) == []

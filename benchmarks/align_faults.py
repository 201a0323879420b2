"""Faults put into engine files of other tools: what a wrong exporter, optimizer or hand would write."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ditto_core.graphs.files import read_model

LAYER = "/model/layers.1/"


@dataclass(frozen=True)
class Fault:
    """``change`` spoils a model; the operator to be named has ``expected`` in its name."""

    tool: str
    family: str
    name: str
    expected: str
    change: Callable[[Any], None]


@contextmanager
def inserted(folder: Path, fault: Fault) -> Iterator[Path]:
    """Yield a spoilt copy of the ONNX file in a folder."""
    model = read_model(next(folder.glob("*.onnx")))
    fault.change(model.graph)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model.onnx"
        onnx.save(model, str(path))
        yield path


def node(graph: Any, name: str) -> Any:
    """Return the node of a name."""
    return next(n for n in graph.node if n.name == name)


def weight(graph: Any, of: str, place: int = 1) -> tuple[Any, Any]:
    """Return an initializer that a node reads, and its numbers."""
    name = node(graph, of).input[place]
    tensor = next(t for t in graph.initializer if t.name == name)
    return tensor, numpy_helper.to_array(tensor).copy()


def put(tensor: Any, array: Any) -> None:
    """Replace an initializer's numbers."""
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))


def edited(of: str, edit: Callable[[Any], Any], place: int = 1) -> Callable[[Any], None]:
    """Return a change of the weight of a node."""

    def change(graph: Any) -> None:
        tensor, array = weight(graph, of, place)
        put(tensor, edit(array))

    return change


def attribute(of: str, name: str, value: Any) -> Callable[[Any], None]:
    """Return a change of a node's attribute."""

    def change(graph: Any) -> None:
        found = node(graph, of)
        kept = [a for a in found.attribute if a.name != name]
        del found.attribute[:]
        found.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def exchanged(one: str, other: str, place: int = 1) -> Callable[[Any], None]:
    """Return an exchange of the weights of two nodes."""

    def change(graph: Any) -> None:
        a, b = node(graph, one), node(graph, other)
        a.input[place], b.input[place] = b.input[place], a.input[place]

    return change


def rerouted(of: str, place: int, source: str) -> Callable[[Any], None]:
    """Return a change of what a node reads: the first output of the node ``source``."""

    def change(graph: Any) -> None:
        node(graph, of).input[place] = node(graph, source).output[0]

    return change


def columns(array: Any, one: slice, other: slice) -> Any:
    """Exchange blocks of columns."""
    made = array.copy()
    made[:, one], made[:, other] = array[:, other], array[:, one]
    return made


def row_scaled(array: Any) -> Any:
    """Scale one input's row."""
    array[5] *= 1.1
    return array


def other_base(array: Any) -> Any:
    """Return the cosines of another rotary base, of a table [positions, half]."""
    positions, half = array.shape
    frequencies = 5e5 ** (-np.arange(half) / half)
    return np.cos(np.arange(positions)[:, None] * frequencies).astype(array.dtype)


def constant_scaled(of: str, place: int, by: float) -> Callable[[Any], None]:
    """Return a change of a number that a Constant node holds."""

    def change(graph: Any) -> None:
        maker = {name: n for n in graph.node for name in n.output}[node(graph, of).input[place]]
        tensor = next(a.t for a in maker.attribute if a.name == "value")
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array((array * by).astype(array.dtype), tensor.name))

    return change


def inputs_exchanged(of: str, one: int = 0, other: int = 1) -> Callable[[Any], None]:
    """Return an exchange of two inputs of a node."""

    def change(graph: Any) -> None:
        found = node(graph, of)
        found.input[one], found.input[other] = found.input[other], found.input[one]

    return change


def caches_exchanged(kind: str) -> Callable[[Any], None]:
    """Return an exchange of what two layers read (``past_key_values``) or write (``present``) as their keys."""
    names = {f"{kind}.0.key": f"{kind}.1.key", f"{kind}.1.key": f"{kind}.0.key"}

    def change(graph: Any) -> None:
        for found in graph.node:
            for side in (found.input, found.output):
                side[:] = [names.get(name, name) for name in side]

    return change


def operator(of: str, kind: str) -> Callable[[Any], None]:
    """Return a change of what a node computes."""

    def change(graph: Any) -> None:
        node(graph, of).op_type = kind

    return change


def without_input(of: str, place: int) -> Callable[[Any], None]:
    """Return the loss of an optional input."""

    def change(graph: Any) -> None:
        node(graph, of).input[place] = ""

    return change


def together(*parts: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return several changes at once."""

    def change(graph: Any) -> None:
        for part in parts:
            part(graph)

    return change


QKV, GQA = LAYER + "attn/qkv_proj/MatMul", LAYER + "attn/GroupQueryAttention"
NORM = LAYER + "post_attention_layernorm/SkipLayerNorm"
DOWN, UP, GATE = (f"{LAYER}mlp/{name}_proj/MatMul" for name in ("down", "up", "gate"))
OUT = LAYER + "attn/o_proj/MatMul"

QKV_ADD = LAYER + "attn/qkv_proj/Add"
Q_NORM, K_NORM = (f"{LAYER}attn/{name}_norm/SimplifiedLayerNormalization" for name in "qk")
GEMMA = LAYER + "post_feedforward_layernorm/LayerNorm"
EAGER, ROTARY = LAYER + "self_attn/", "/model/rotary_emb/Expand"
MHA = "Attention_1"
CONV = "/resnet/encoder/stages.1/layers.0/layer/layer.1/convolution/Conv"
NCHWC = "/resnet/encoder/stages.3/layers.0/layer/layer.2/convolution/Conv_output_0_nchwc"
VIT_NORM = "/encoder/layer.1/layernorm_after/LayerNormalization"


def on_llama(name: str, expected: str, change: Callable[[Any], None]) -> Fault:
    """Return a fault of genai's llama."""
    return Fault("genai-fp32", "llama", name, expected, change)


FAULTS: tuple[Fault, ...] = (
    on_llama("down_proj x 1.01", DOWN, edited(DOWN, lambda w: w * np.float32(1.01))),
    on_llama("down_proj x 1.001", DOWN, edited(DOWN, lambda w: w * np.float32(1.001))),
    on_llama("one input row of up_proj + 10 %", UP, edited(UP, row_scaled)),
    on_llama("gate_proj negated", GATE, edited(GATE, lambda w: -w)),
    on_llama("o_proj transposed", OUT, edited(OUT, lambda w: w.T)),
    on_llama("lm_head x 1.01", "/lm_head/MatMul", edited("/lm_head/MatMul", lambda w: w * np.float32(1.01))),
    on_llama("norm weight x 1.001", NORM, edited(NORM, lambda w: w * np.float32(1.001), 2)),
    on_llama("epsilon 1e-3", NORM, attribute(NORM, "epsilon", 1e-3)),
    on_llama(
        "Q's halves exchanged in the packed weight", QKV, edited(QKV, lambda w: columns(w, slice(0, 32), slice(32, 64)))
    ),
    on_llama(
        "K and V exchanged in the packed weight", QKV, edited(QKV, lambda w: columns(w, slice(64, 96), slice(96, 128)))
    ),
    on_llama("two Q heads exchanged", QKV, edited(QKV, lambda w: columns(w, slice(0, 16), slice(16, 32)))),
    on_llama(
        "K x 1.02 in the packed weight",
        QKV,
        edited(QKV, lambda w: np.concatenate([w[:, :64], w[:, 64:96] * np.float32(1.02), w[:, 96:]], 1)),
    ),
    on_llama("scale 0.26 for 0.25", GQA, attribute(GQA, "scale", 0.26)),
    on_llama("window of 4", GQA, attribute(GQA, "local_window_size", 4)),
    on_llama("softcap of 5", GQA, attribute(GQA, "softcap", 5.0)),
    on_llama("rotary interleaved", GQA, attribute(GQA, "rotary_interleaved", 1)),
    on_llama(
        "rotary base 5e5",
        "/model/layers.0/attn/GroupQueryAttention",
        edited("/model/layers.0/attn/GroupQueryAttention", other_base, 7),
    ),
    on_llama("gate_proj and up_proj exchanged", LAYER + "mlp", exchanged(GATE, UP)),
    on_llama("activation left out", LAYER + "mlp/Mul", rerouted(LAYER + "mlp/Mul", 0, GATE)),
    on_llama("residual of an earlier layer", NORM, rerouted(NORM, 0, "/model/embed_tokens/Gather")),
    on_llama(
        "head reads layer 0", "/lm_head/MatMul", rerouted("/lm_head/MatMul", 0, NORM.replace("layers.1", "layers.0"))
    ),
    on_llama("o_proj's weight of another layer", OUT, exchanged(OUT, OUT.replace("layers.1", "layers.2"))),
    on_llama("norm's weight of another layer", NORM, exchanged(NORM, NORM.replace("layers.1", "layers.2"), 2)),
    on_llama(
        "embedding x 1.001", "embed_tokens", edited("/model/embed_tokens/Gather", lambda w: w * np.float32(1.001), 0)
    ),
    on_llama("keys of two layers exchanged when written", "past_key_values", caches_exchanged("present")),
    on_llama("keys of two layers exchanged when read", "past_key_values", caches_exchanged("past_key_values")),
    on_llama(
        "sines negated",
        "/model/layers.0/attn/GroupQueryAttention",
        edited("/model/layers.0/attn/GroupQueryAttention", lambda table: -table, 8),
    ),
    on_llama(
        "scale and softcap", GQA, together(attribute(GQA, "scale", 0.2), attribute(GQA, "softcap", 3.0))
    ),
    Fault("genai-fp32", "qwen2", "query bias left out", QKV_ADD, edited(QKV_ADD, lambda b: b * (np.arange(128) >= 64))),
    Fault("genai-fp32", "qwen3", "weights of q_norm and k_norm exchanged", Q_NORM, exchanged(Q_NORM, K_NORM)),
    Fault("genai-fp32", "gemma2", "softcap left out", GQA, attribute(GQA, "softcap", 0.0)),
    Fault("genai-fp32", "gemma2", "scale of the head's size", GQA, attribute(GQA, "scale", 0.25)),
    Fault("genai-fp32", "gemma2", "a window in a layer without", GQA, attribute(GQA, "local_window_size", 8)),
    Fault("genai-fp32", "gemma2", "norm's weight without the 1", GEMMA, edited(GEMMA, lambda w: w - np.float32(1))),
    Fault("genai-fp32", "phi3", "gate_proj and up_proj exchanged", GATE, exchanged(GATE, UP)),
    Fault("optimum", "llama", "queries' scale x 1.02", EAGER + "Mul_8", constant_scaled(EAGER + "Mul_8", 1, 1.02)),
    Fault("optimum", "llama", "q_proj transposed", EAGER + "q_proj", edited(EAGER + "q_proj/MatMul", lambda w: w.T)),
    Fault("optimum", "llama", "rotary frequencies x 1.1", ROTARY, constant_scaled(ROTARY, 0, 1.1)),
    Fault("optimum", "llama", "mask left out", EAGER + "Softmax", rerouted(EAGER + "Softmax", 0, EAGER + "MatMul")),
    Fault(
        *("optimum", "llama", "weights of q_proj and o_proj exchanged", EAGER + "q_proj"),
        exchanged(EAGER + "q_proj/MatMul", EAGER + "o_proj/MatMul"),
    ),
    Fault("optimum", "llama", "halves of the keys exchanged", EAGER + "Concat_4", inputs_exchanged(EAGER + "Concat_4")),
    Fault(
        *("optimum", "llama", "sine for cosine in layer 1", EAGER + "Mul"),
        rerouted(EAGER + "Mul", 1, "/model/layers.0/self_attn/Unsqueeze_7"),
    ),
    Fault(
        *("ort-extended", "llama", "k_proj x 1.02", EAGER + "k_proj"),
        edited(EAGER + "k_proj/MatMul", lambda w: w * np.float32(1.02)),
    ),
    Fault(
        *("ort-transformers", "bert", "Q and K exchanged in the packed weight", "Attention_1"),
        together(
            edited("Attention_1", lambda w: columns(w, slice(0, 64), slice(64, 128))),
            edited("Attention_1", lambda b: columns(b[None], slice(0, 64), slice(64, 128))[0], 2),
        ),
    ),
    Fault("ort-transformers", "bert", "tanh for erf in the activation", "Gelu_AddBias_1", operator("Gelu_AddBias_1", "FastGelu")),
    Fault(
        *("ort-transformers", "bert", "bias left out", "SkipLayerNorm_AddBias_2"),
        edited("SkipLayerNorm_AddBias_2", lambda b: b * np.float32(0), 4),
    ),
    Fault("ort-transformers", "bert", "mask ignored (padded probes)", "Attention_1", without_input("Attention_1", 3)),
    Fault(
        *("ort-transformers", "bert", "epsilon 1e-3", "SkipLayerNorm_AddBias_2"),
        attribute("SkipLayerNorm_AddBias_2", "epsilon", 1e-3),
    ),
    Fault("ort-mha", "bert", "scale 0.3 for 0.25", MHA, attribute(MHA, "scale", 0.3)),
    Fault("ort-mha", "bert", "causal", MHA, attribute(MHA, "unidirectional", 1)),
    Fault("ort-mha", "bert", "query and key exchanged", MHA, inputs_exchanged(MHA)),
    Fault("ort-mha", "bert", "mask ignored (padded probes)", MHA, without_input(MHA, 4)),
    Fault("optimum", "resnet", "kernel flipped", CONV, edited(CONV, lambda w: w[:, :, ::-1])),
    Fault("ort-all", "resnet", "bias x 1.05 of a fused convolution", NCHWC, edited(NCHWC, lambda b: b * np.float32(1.05), 2)),
    Fault("optimum", "vit", "positions one too far", "/embeddings/Add", edited("/embeddings/Add", lambda p: np.roll(p, 1, 1))),
    Fault(
        *("ort-transformers", "vit", "bias of the norm left out", VIT_NORM),
        edited(VIT_NORM, lambda b: b * np.float32(0), 2),
    ),
)

"""The stand-in's Llama: its modules have TensorRT-LLM's names, its network is built layer by layer on TensorRT-RTX.

Layers are named in upstream's manner, with line numbers. Attention is one layer that plays the plugin: the network is
for marking outputs, it is never run.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tensorrt_rtx_bindings as trt

from standin_trtllm import engine
from standin_trtllm.engine import Tensor

DTYPES = {"float32": np.float32, "float16": np.float16}


class PretrainedConfig:
    """What a checkpoint's config.json holds."""

    def __init__(self, **fields) -> None:
        self.__dict__.update(fields)
        mapping = {"world_size": 1, "tp_size": 1, "pp_size": 1, "rank": 0, **fields.get("mapping", {})}
        self.mapping = SimpleNamespace(**mapping)

    @classmethod
    def from_json_file(cls, config_file):
        return PretrainedConfig(**json.loads(Path(config_file).read_text()))

    def to_dict(self):
        return {**self.__dict__, "mapping": dict(self.mapping.__dict__)}

    def for_rank(self, rank):
        return PretrainedConfig(**{**self.to_dict(), "mapping": {**self.mapping.__dict__, "rank": rank}})


def config_of(directory, dtype) -> PretrainedConfig:
    """Translate a Hugging Face config."""
    hf = json.loads((Path(directory) / "config.json").read_text())
    heads = hf["num_attention_heads"]
    return PretrainedConfig(
        architecture=hf["architectures"][0],
        dtype=dtype,
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_hidden_layers=hf["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=hf.get("num_key_value_heads", heads),
        head_size=hf.get("head_dim") or hf["hidden_size"] // heads,
        standin_model=str(directory),
    )


def from_hugging_face(hf_model_or_dir, dtype="auto", mapping=None, quant_config=None, **kwargs):
    return make(config_of(hf_model_or_dir, dtype))


class StandInLlama:
    """Makes models; what upstream's model class would be."""

    def __new__(cls, config):
        return make(config)

    @classmethod
    def from_checkpoint(cls, ckpt_dir, rank=None, config=None):
        return make(config)


def make(config):
    """Make a model from the stand-in's generated ``Module``, so that its methods are checked."""
    module = importlib.import_module("tensorrt_llm.module").Module
    return model_class(module)(config)


def add_layer(layer, name):
    layer.name = name
    return Tensor(layer.get_output(0))


def matmul(x, features, name):
    """Multiply by a constant matrix [in, features] of the network's dtype."""
    net = engine.current[-1]
    dtype = trt.nptype(x.trt_tensor.dtype)
    weights = np.zeros((1, x.trt_tensor.shape[-1], features), dtype)
    net.weights.append(weights)
    constant = net.trt_network.add_constant(weights.shape, trt.Weights(weights)).get_output(0)
    none = trt.MatrixOperation.NONE
    layer = net.trt_network.add_matrix_multiply(x.trt_tensor, none, constant, none)
    return add_layer(layer, f"{name}/multiply_collect_L285/matmul_L1062/MATRIX_MULTIPLY_0")


def add(a, b, name):
    layer = engine.current[-1].trt_network.add_elementwise(a.trt_tensor, b.trt_tensor, trt.ElementWiseOperation.SUM)
    return add_layer(layer, name)


def unary(x, name):
    return add_layer(engine.current[-1].trt_network.add_activation(x.trt_tensor, trt.ActivationType.SIGMOID), name)


def attention_plugin(x, features, name):
    """Play the attention plugin: a layer with the plugin's name and fields."""
    name = f"{name}/wrapper_L561/gpt_attention_L5154/PLUGIN_V2_GPTAttention_0"
    fields = {"num_heads": [4], "layer_idx": [0]}
    engine.current[-1].plugins[name] = engine.FINISHED[name] = {"plugin": "GPTAttention", "fields": fields}
    return add_layer(first(x, features), name)


def first(x, features):
    net = engine.current[-1].trt_network
    return net.add_slice(x.trt_tensor, (0, 0, 0), (*x.trt_tensor.shape[:2], features), (1, 1, 1))


ROOT = "LLaMAForCausalLM/transformer"


def plain_layers(module):
    """Define a matrix product and a norm over a base class."""

    class Linear(module):
        def __init__(self, features, name):
            super().__init__()
            self.features, self.name = features, name

        def forward(self, x):
            return matmul(x, self.features, self.name)

    class Norm(module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            return unary(x, f"{self.name}/rms_norm_L4911/ACTIVATION_SIGMOID_0")

    return Linear, Norm


def attention_layer(module, Linear):
    """Define attention."""

    class Attention(module):
        def __init__(self, config, name):
            super().__init__()
            self.width = config.num_attention_heads * config.head_size
            kv = config.num_key_value_heads * config.head_size
            self.name = name
            self.qkv = Linear(self.width + 2 * kv, f"{name}/qkv")
            self.dense = Linear(config.hidden_size, f"{name}/dense")

        def forward(self, hidden_states, use_cache=False):
            context = attention_plugin(self.qkv(hidden_states), self.width, self.name)
            out = self.dense(context)
            return (out, context) if use_cache else out

    return Attention


def feed_forwards(module, Linear):
    """Define the MLP, and the one that upstream's fusing puts in its place."""

    class Mlp(module):
        def __init__(self, config, name):
            super().__init__()
            self.name = name
            self.fc = Linear(config.intermediate_size, f"{name}/fc")
            self.gate = Linear(config.intermediate_size, f"{name}/gate")
            self.proj = Linear(config.hidden_size, f"{name}/proj")

        def forward(self, x):
            return self.proj(add(unary(self.fc(x), f"{self.name}/silu_L3"), self.gate(x), f"{self.name}/mul_L4/PROD_0"))

    class FusedMlp(module):
        def __init__(self, config, name):
            super().__init__()
            self.size = config.intermediate_size
            self.fused_fc = Linear(2 * self.size, f"{name}/fused_fc")
            self.proj = Linear(config.hidden_size, f"{name}/proj")

        def forward(self, x):
            return self.proj(Tensor(first(self.fused_fc(x), self.size).get_output(0)))

    return Mlp, FusedMlp


def block(module, Norm, Attention, Mlp):
    """Define one decoder layer."""

    class Layer(module):
        def __init__(self, config, index):
            super().__init__()
            self.name = f"{ROOT}/layers/{index}"
            self.input_layernorm = Norm(f"{self.name}/input_layernorm")
            self.attention = Attention(config, f"{self.name}/attention")
            self.post_layernorm = Norm(f"{self.name}/post_layernorm")
            self.mlp = Mlp(config, f"{self.name}/mlp")

        def forward(self, hidden_states, use_cache=True):
            out, cache = self.attention(self.input_layernorm(hidden_states), use_cache=True)
            hidden = add(hidden_states, out, f"{self.name}/__add___L325/elementwise_binary_L2901/ELEMENTWISE_SUM_0")
            fed = self.mlp(self.post_layernorm(hidden))
            hidden = add(hidden, fed, f"{self.name}/__add___L325/elementwise_binary_L2901/ELEMENTWISE_SUM_1")
            return hidden, cache

    return Layer


def stack(module, Norm, Layer):
    """Define the decoder layers of one pipeline stage."""

    class Layers(module):
        def __init__(self, config):
            super().__init__()
            stages, count = config.mapping.pp_size, config.num_hidden_layers // config.mapping.pp_size
            stage = config.mapping.rank % stages
            self.layer_list = list(range(stage * count, (stage + 1) * count))
            for local in range(count):
                setattr(self, str(local), Layer(config, local))

        def forward(self, hidden):
            for i in range(len(self.layer_list)):
                hidden, _ = getattr(self, str(i))(hidden)
            return hidden

    class Transformer(module):
        def __init__(self, config):
            super().__init__()
            self.layers = Layers(config)
            self.ln_f = Norm(f"{ROOT}/ln_f")

        def forward(self, hidden):
            return self.ln_f(self.layers.forward(hidden))  # past __call__, as upstream does

    return Transformer


def whole_model(module, Linear, FusedMlp, Transformer):
    """Define the model."""

    class Model(module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.transformer = Transformer(config)
            self.lm_head = Linear(config.vocab_size, "LLaMAForCausalLM/lm_head")

        def fuse_mlps(self):
            for layer in self.transformer.layers._modules.values():
                layer.mlp = FusedMlp(self.config, layer.mlp.name)

        def forward(self):
            net = engine.current[-1]
            dtype = {"float32": trt.float32, "float16": trt.float16}[self.config.dtype]
            hidden = Tensor(net.trt_network.add_input("hidden", dtype, (1, 8, self.config.hidden_size)))
            out = self.transformer.forward(hidden)
            self.register_network_output("hidden_for_debugging", out)
            logits = self.lm_head(out)
            net._mark_output(logits, "logits", None)
            self._network_outputs.clear() if not self.config.__dict__.get("registers") else None

    return Model


def model_class(module):
    """Define the model and its modules over a base class."""
    Linear, Norm = plain_layers(module)
    Mlp, FusedMlp = feed_forwards(module, Linear)
    Layer = block(module, Norm, attention_layer(module, Linear), Mlp)
    return whole_model(module, Linear, FusedMlp, stack(module, Norm, Layer))


NAMES = {
    "tensorrt_llm.models.MODEL_MAP": {"LlamaForCausalLM": StandInLlama},
    "tensorrt_llm.models.modeling_utils.PretrainedConfig": PretrainedConfig,
    "tensorrt_llm.models.automodel.AutoModelForCausalLM": type(
        "AutoModelForCausalLM", (), {"from_hugging_face": staticmethod(from_hugging_face)}
    ),
}

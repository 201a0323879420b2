"""The PyTorch backend's stand-in: a decoder with joint projections and residual pairs, run by a thread of its own.

Its weights are a Hugging Face Llama's. ``style`` chooses between the two ways of upstream: "llama" runs the next
layer's norm inside a layer, "qwen3" does not. Norms write into their inputs, as upstream's fused kernels do.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch
from torch import nn

from standin_trtllm.runtime import load

STYLE = {"style": "llama"}


class Norm(nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, hidden_states, residual=None):
        if residual is None:
            return self._normed(hidden_states.clone())
        residual.add_(hidden_states)
        hidden_states.copy_(self._normed(residual))
        return hidden_states, residual

    def _normed(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, hf, config, rotary) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.qkv_proj.weight = nn.Parameter(torch.cat([hf.q_proj.weight, hf.k_proj.weight, hf.v_proj.weight]))
        self.o_proj = hf.o_proj
        self.heads, self.kv, self.size = config.num_attention_heads, config.num_key_value_heads, hf.head_dim
        self.rotary = [rotary]
        self.past = None

    def forward(self, position_ids, hidden_states):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        sizes = [self.heads * self.size, self.kv * self.size, self.kv * self.size]
        q, k, v = (
            t.unflatten(-1, (-1, self.size)).transpose(0, 1)[None]
            for t in self.qkv_proj(hidden_states).split(sizes, -1)
        )
        cos, sin = self.rotary[0](v, position_ids[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if self.past is not None:
            k, v = torch.cat([self.past[0], k], 2), torch.cat([self.past[1], v], 2)
        self.past = (k, v)
        causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)
        return self.o_proj(out[0].transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    def __init__(self, hf, config) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.gate_up_proj.weight = nn.Parameter(torch.cat([hf.gate_proj.weight, hf.up_proj.weight]))
        self.down_proj = hf.down_proj

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, hf, config, rotary) -> None:
        super().__init__()
        self.self_attn = Attention(hf.self_attn, config, rotary)
        self.mlp = Mlp(hf.mlp, config)
        self.input_layernorm = Norm(hf.input_layernorm)
        self.post_attention_layernorm = Norm(hf.post_attention_layernorm)
        self.next_layer_layernorm = None

    def forward(self, position_ids, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        elif self.next_layer_layernorm is None:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(position_ids=position_ids, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        if self.next_layer_layernorm is not None:
            hidden_states, residual = self.next_layer_layernorm(hidden_states, residual)
        return hidden_states, residual


class Body(nn.Module):
    def __init__(self, hf, style) -> None:
        super().__init__()
        self.embed_tokens = hf.embed_tokens
        self.layers = nn.ModuleList([Layer(each, hf.config, hf.rotary_emb) for each in hf.layers])
        self.norm = Norm(hf.norm)
        self.style = style
        if style == "llama":
            following = [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
            for layer, norm in zip(self.layers, following, strict=True):
                layer.next_layer_layernorm = norm

    def forward(self, input_ids, position_ids):
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(position_ids=position_ids, hidden_states=hidden, residual=residual)
        return hidden if self.style == "llama" else self.norm(hidden, residual)[0]


class Model(nn.Module):
    def __init__(self, hf, style) -> None:
        super().__init__()
        self.config = hf.config
        self.model = Body(hf.model, style)
        self.lm_head = hf.lm_head

    def forward(self, input_ids, position_ids, everything):
        hidden = self.model(input_ids, position_ids)
        return self.lm_head(hidden if everything else hidden[-1:])


class Result:
    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.done = threading.Event()
        self.error = None

    def result(self, timeout=None):
        self.done.wait(timeout)
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        self.aborted.set()


class LLM:
    """Runs one request after the other in a thread, as the executor's loop does."""

    def __init__(self, model, **settings) -> None:
        self.settings = settings
        module = Model(load(model), STYLE["style"])
        engine = SimpleNamespace(model=module, is_warmup=False)
        self._executor = SimpleNamespace(engine=SimpleNamespace(model_engine=engine))
        self.module = module

    def generate_async(self, inputs, sampling_params=None):
        request = Result()
        threading.Thread(target=self._run, args=(inputs, sampling_params, request), daemon=True).start()
        return request

    def _run(self, inputs, sampling, request) -> None:
        try:
            self._generate(torch.tensor(inputs), sampling, request)
        except RuntimeError as error:
            request.error = error
        request.done.set()

    @torch.inference_mode()
    def _generate(self, ids, sampling, request) -> None:
        for layer in self.module.model.layers:
            layer.self_attn.past = None
        past = 0
        for _ in range(sampling.max_tokens):
            positions = torch.arange(past, past + len(ids))
            gathered = sampling.return_context_logits and STYLE.get("gathers", True)
            logits = self.module.forward(ids, positions, gathered)
            past += len(ids)
            if request.aborted.is_set():
                return
            ids = logits[-1:].argmax(-1)

    def shutdown(self) -> None:
        self.module = None


class SamplingParams:
    def __init__(self, max_tokens, end_id, pad_id, ignore_eos, return_context_logits) -> None:
        self.max_tokens, self.return_context_logits = max_tokens, return_context_logits


NAMES = {
    "tensorrt_llm.LLM": LLM,
    "tensorrt_llm.SamplingParams": SamplingParams,
    "tensorrt_llm.llmapi.llm.BaseLLM": LLM,
    "tensorrt_llm.executor.result.GenerationResult": Result,
}

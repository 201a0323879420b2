"""Model sources that the tests share: module-level callables, so that child processes can import them too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ditto_core import tap
from ditto_core.model.tiny import FAMILIES, tiny_decoder


def llama() -> Any:
    return tiny_decoder("llama")


def qwen3() -> Any:
    return tiny_decoder("qwen3")


def gemma3() -> Any:
    return tiny_decoder("gemma3")


def mistral() -> Any:
    return tiny_decoder("mistral")


def gpt2() -> Any:
    return tiny_decoder("gpt2")


DECODERS = {name: globals()[name] for name in FAMILIES}


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        attn_implementation="eager",
        is_decoder=False,
    )
    ids = torch.randint(0, 100, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return BertModel(config), {"input_ids": ids, "attention_mask": mask}


def conv_net() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 5)), {"input": torch.randn(2, 3, 16, 16)}


class Mlp(nn.Module):
    """Names its hidden activation with ``tap``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(tap("inter", torch.relu(self.up(x))))


class TappedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + x


def tapped_net() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return TappedNet(), {"x": torch.randn(3, 8)}


def llama31() -> Any:
    """Llama with the frequency scaling of Llama 3.1."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return tiny_decoder("llama", rope_parameters=scaling)


def loud() -> Any:
    """Llama with activations whose squares do not fit float16."""
    model = tiny_decoder("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2000)
    return model


def gemma2() -> Any:
    """Gemma 2, which caps its attention scores."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        initializer_range=0.2,
    )
    return Gemma2ForCausalLM(config).eval().requires_grad_(False)


def wide() -> Any:
    """Llama with long sums."""
    return tiny_decoder("llama", layers=1, intermediate_size=1024)


def biased() -> Any:
    """GPT-2 with biases that are not zero."""
    model = tiny_decoder("gpt2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
    return model


def many_ids() -> Any:
    """Llama with ids beyond 8 bits."""
    return tiny_decoder("llama", layers=1, vocab_size=400)


def large_vocabulary() -> Any:
    """Llama with ids beyond 16 bits."""
    return tiny_decoder("llama", layers=1, vocab_size=70_000)


class ClampedEmbedding(nn.Embedding):
    """Looks ids beyond its last row up in that row."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids.clamp(0, self.num_embeddings - 1))


def clamped_ids() -> Any:
    """Llama with an open vocabulary: an id may have 41 bits, those beyond the table are its last row."""
    model = tiny_decoder("llama", layers=1, vocab_size=400)
    table = model.get_input_embeddings().weight
    model.set_input_embeddings(ClampedEmbedding(*table.shape, _weight=table, _freeze=True))
    model.config.vocab_size = 2**41
    return model


def width_96() -> Any:
    """Llama whose table's rows do not end at a power of two."""
    return tiny_decoder("llama", layers=1, hidden_size=96)


def with_large_weights(*names: str) -> Any:
    """Llama whose projections of these names in the second layer have weights 300 times as large."""
    model = tiny_decoder("llama")
    with torch.no_grad():
        for name in names:
            model.model.layers[1].get_submodule(name).weight.mul_(300)
    return model


def beyond_half() -> Any:
    """Llama whose second MLP multiplies to more than float16 holds."""
    return with_large_weights("mlp.gate_proj", "mlp.up_proj")


def far_apart() -> Any:
    """Llama whose queries and keys multiply to more than float16 holds."""
    return with_large_weights("self_attn.q_proj", "self_attn.k_proj")


MORE = {
    "llama31": llama31,
    "loud": loud,
    "gemma2": gemma2,
    "wide": wide,
    "biased": biased,
    "many_ids": many_ids,
    "large_vocabulary": large_vocabulary,
    "clamped_ids": clamped_ids,
    "width_96": width_96,
    "beyond_half": beyond_half,
    "far_apart": far_apart,
}

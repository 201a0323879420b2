"""Names: TensorRT-LLM's modules <-> Hugging Face's sites, for engines and for the PyTorch backend.

An engine's projection of queries, keys and values is one tensor, and its MLP calls gate_proj ``fc``, up_proj ``gate``
and down_proj ``proj``. (Source: the weight loader's translation table, the same from 0.12 to 1.3.0rc3.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ditto_core.backends.served.place import Place
from ditto_core.errors import UsageError, nearest

Table = Mapping[str, tuple[str, ...]]
"""TensorRT-LLM's module -> the Hugging Face module that it is, or those whose outputs it holds side by side."""

LLAMA: Table = {
    "transformer.vocab_embedding": ("model.embed_tokens",),
    "transformer.layers.{i}": ("model.layers.{i}",),
    "transformer.layers.{i}.input_layernorm": ("model.layers.{i}.input_layernorm",),
    "transformer.layers.{i}.attention": ("model.layers.{i}.self_attn",),
    "transformer.layers.{i}.attention.qkv": tuple(f"model.layers.{{i}}.self_attn.{x}_proj" for x in "qkv"),
    "transformer.layers.{i}.attention.q_layernorm": ("model.layers.{i}.self_attn.q_norm",),
    "transformer.layers.{i}.attention.k_layernorm": ("model.layers.{i}.self_attn.k_norm",),
    "transformer.layers.{i}.attention.dense": ("model.layers.{i}.self_attn.o_proj",),
    "transformer.layers.{i}.post_layernorm": ("model.layers.{i}.post_attention_layernorm",),
    "transformer.layers.{i}.pre_feedforward_layernorm": ("model.layers.{i}.pre_feedforward_layernorm",),
    "transformer.layers.{i}.mlp": ("model.layers.{i}.mlp",),
    "transformer.layers.{i}.mlp.router": ("model.layers.{i}.mlp.gate",),
    "transformer.layers.{i}.mlp.fc": ("model.layers.{i}.mlp.gate_proj",),
    "transformer.layers.{i}.mlp.gate": ("model.layers.{i}.mlp.up_proj",),
    "transformer.layers.{i}.mlp.proj": ("model.layers.{i}.mlp.down_proj",),
    "transformer.layers.{i}.post_feedforward_layernorm": ("model.layers.{i}.post_feedforward_layernorm",),
    "transformer.ln_f": ("model.norm",),
    "lm_head": ("lm_head",),
}
GPT2: Table = {
    "transformer.vocab_embedding": ("transformer.wte",),
    "transformer.position_embedding": ("transformer.wpe",),
    "transformer.layers.{i}": ("transformer.h.{i}",),
    "transformer.layers.{i}.input_layernorm": ("transformer.h.{i}.ln_1",),
    "transformer.layers.{i}.attention": ("transformer.h.{i}.attn",),
    "transformer.layers.{i}.attention.qkv": ("transformer.h.{i}.attn.c_attn",),
    "transformer.layers.{i}.attention.dense": ("transformer.h.{i}.attn.c_proj",),
    "transformer.layers.{i}.post_layernorm": ("transformer.h.{i}.ln_2",),
    "transformer.layers.{i}.mlp": ("transformer.h.{i}.mlp",),
    "transformer.layers.{i}.mlp.fc": ("transformer.h.{i}.mlp.c_fc",),
    "transformer.layers.{i}.mlp.proj": ("transformer.h.{i}.mlp.c_proj",),
    "transformer.ln_f": ("transformer.ln_f",),
    "lm_head": ("lm_head",),
}
PHI3: Table = {
    "transformer.layers.{i}.attention.qkv": ("model.layers.{i}.self_attn.qkv_proj",),
    "transformer.layers.{i}.mlp.fc": ("model.layers.{i}.mlp.gate_up_proj",),
}
"""What Phi-3 holds jointly in Hugging Face's model, too. The rest is as in Llama."""
MIXTRAL: Table = {
    "transformer.layers.{i}.mlp": ("model.layers.{i}.block_sparse_moe",),
    "transformer.layers.{i}.mlp.router": ("model.layers.{i}.block_sparse_moe.gate",),
}
"""Transformers 4's names of experts; 5 calls them ``mlp``. The rest is as in Llama."""
SWAPPED = ("model.layers.{i}.mlp.gate_up_proj",)
"""Sites whose halves stand in the other order in the engine (up, gate)."""
HEADWISE = re.compile(r"\.[qk]_layernorm$")
"""Norms of [tokens, heads, size] in an engine, which Hugging Face has as [batch, length or heads, …] by family."""
SCALED_EMBEDDING = ("Gemma3",)
"""Architectures (their beginning) whose ``embed_tokens`` scales, which TensorRT-LLM does behind the module."""
TORCH: Table = {
    "model.layers.{i}.self_attn.qkv_proj": tuple(f"model.layers.{{i}}.self_attn.{x}_proj" for x in "qkv"),
    "model.layers.{i}.mlp.gate_up_proj": ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
}
"""The PyTorch backend keeps Hugging Face's names, save for these."""

ENGINE: tuple[Table, ...] = (LLAMA, GPT2, PHI3, MIXTRAL)
FAMILIES: Mapping[str, Table] = {"llama": LLAMA, "gpt2": GPT2, "phi3": {**LLAMA, **PHI3}, "pytorch": TORCH}
FUSED_QKV = re.compile(r"(^|\.)(attention\.qkv|self_attn\.qkv_proj)$")
_INDEX = re.compile(r"(?<=\.)\d+(?=[.:]|$)")


def place(site: str, tables: Iterable[Table]) -> Place | None:
    """Return where a Hugging Face site lives in an engine, or None when no module of TensorRT-LLM computes it.

    Only default ports and ``:in`` can be had: what happens inside the attention plugin is not observable.
    """
    path, _, port = site.partition(":")
    if port not in ("", "in"):
        return None
    general, index = generalize(path)
    for table in tables:
        for module, targets in table.items():
            if general in targets:
                part = targets.index(general)
                # the pieces have one input, which is the whole module's
                whole = len(targets) == 1 or port == "in"
                swapped = general in SWAPPED and not port
                parts = 1 if whole else len(targets)
                return Place(specialize(module, index), port, 0 if whole else part, parts, swapped)
    return None


def engine_place(site: str) -> Place | None:
    """Return where a site lives in a TensorRT engine."""
    return place(site, ENGINE)


def torch_place(site: str) -> Place | None:
    """Return where a site lives in the PyTorch backend's module."""
    return place(site, (TORCH,)) or identity(site)


def identity(site: str) -> Place | None:
    """Return the place of a site whose module has Hugging Face's name."""
    path, _, port = site.partition(":")
    return Place(path, port) if port in ("", "in") else None


def sites(module: str) -> Iterator[str]:
    """Yield the Hugging Face names of a module of an engine, in any family."""
    general, index = generalize(module)
    for table in ENGINE:
        yield from (specialize(target, index) for target in table.get(general, ()))


def same(tensor: str, architecture: str = "") -> tuple[str, ...]:
    """Return the Hugging Face sites, in any family, that are the very tensor of a name.

    A joint tensor has none, nor has one whose values or layout differ there (see :func:`unlike`).
    """
    module, colon, port = tensor.partition(":")
    general, index = generalize(module)
    if unlike(module, port, architecture) or (HEADWISE.search(module) and not port):
        return ()
    found = [table.get(general, ()) for table in ENGINE]
    alone = [targets[0] for targets in found if len(targets) == 1 and (port or targets[0] not in SWAPPED)]
    sites = [specialize(target, index) + colon + port for target in alone]
    return tuple(dict.fromkeys(sites if engine_place(tensor) is None else (tensor, *sites)))


def unlike(module: str, port: str, architecture: str) -> str:
    """Say why the values of a module are not those of the Hugging Face module of its place; empty when they are."""
    scaled = module == "transformer.vocab_embedding" and architecture.startswith(SCALED_EMBEDDING)
    return "it is scaled by sqrt(hidden) behind the module: tap model.layers.0:in" if scaled and not port else ""


def generalize(path: str) -> tuple[str, str]:
    """Replace the first number in a path by ``{i}`` and return it too."""
    found = _INDEX.search(path)
    return (path, "") if found is None else (path[: found.start()] + "{i}" + path[found.end() :], found[0])


def specialize(path: str, index: str) -> str:
    """Inverse of :func:`generalize`."""
    return path.replace("{i}", index)


def family_of(architecture: str) -> str:
    """Return the family of names of an engine's architecture."""
    starts = {"GPT2": "gpt2", "GPTForCausalLM": "gpt2", "Phi3": "phi3"}
    return next((family for start, family in starts.items() if architecture.startswith(start)), "llama")


def name_map(family: str, heads: int, kv_heads: int, present: Iterable[str]) -> dict[str, Any]:
    """Return the name map of a dump, as ``ditto compare --name-map`` reads it, for the names that are present.

    ``heads`` and ``kv_heads`` give the ratio in which the joint projection is cut. Raises :class:`UsageError` for an
    unknown family.
    """
    if family not in FAMILIES:
        raise UsageError(f"unknown family {family!r}, expected {', '.join(FAMILIES)}{nearest(family, FAMILIES)}")
    known = {generalize(name)[0] for name in present}
    names: dict[str, str] = {}
    split: list[dict[str, Any]] = []
    for module, targets in FAMILIES[family].items():
        if f"{module}:in" in known:
            names[f"{module}:in"] = f"{targets[0]}:in"
        if module in known and targets[0] in SWAPPED:
            halves = [f"{targets[0]}.{half}" for half in ("gate", "up")]
            split += [{"from": module, "to": halves[::-1], "sizes": [1, 1]}]
            split += [{"from": targets[0], "to": halves, "sizes": [1, 1]}]
        elif module in known and len(targets) == 1:
            names[module] = targets[0]
        elif module in known:
            sizes = [heads, kv_heads, kv_heads] if len(targets) == 3 else [1] * len(targets)
            split.append({"from": module, "to": list(targets), "sizes": sizes})
    return {"names": names, "split": split}


def alias_map(family: str, heads: int, kv_heads: int, alias: str, source: str) -> dict[str, Any]:
    """Return what a dump's name map says of one output that is called ``alias`` and holds the tensor ``source``."""
    general, index = generalize(source)
    found = name_map(family, heads, kv_heads, [source])
    names = {alias: specialize(found["names"][general], index)} if general in found["names"] else {}
    split = [
        {**rule, "from": alias, "to": [specialize(target, index) for target in rule["to"]]}
        for rule in found["split"]
        if rule["from"] == general
    ]
    return {"names": names, "split": split}


def comparable(tensor: str, architecture: str) -> bool:
    """Tell whether a dumped tensor of a module can be compared by its name: neither other values nor another layout."""
    module, _, port = tensor.partition(":")
    return bool(port) or not (unlike(module, port, architecture) or HEADWISE.search(module))


def why_not(site: str) -> str:
    """Say why a site has no place in an engine."""
    path, _, port = site.partition(":")
    if port not in ("", "in"):
        return f"{port!r} is inside the attention plugin, which shows none of its tensors"
    if path.endswith((".act_fn", ".rotary_emb", ".dropout")) or re.search(r"\.(act|resid_dropout|attn_dropout)$", path):
        return "TensorRT-LLM computes it without a module of its own"
    return "TensorRT-LLM has no module of that name"

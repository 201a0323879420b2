"""vLLM beside eager: tiny models of many architectures, tap by tap. `python benchmarks/served.py [FAMILY ...]`

Each family is a model with random weights, four heads of 32 (vLLM's attention on a CPU has no kernels for 16), two rows
of unequal length, five steps, every module that has a site. One line a family: sites, worst error, what is not shown.
`--dtype` chooses the dtype, `--observer` also runs the compiled engine without taps, `--model DIR` takes a saved
model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import SelectorError
from ditto_core.pair.pair import Pair, PairOptions
from ditto_core.spec import EngineSpec

SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = {
    "llama": ("LlamaConfig", GROUPED),
    "mistral": ("MistralConfig", GROUPED),
    "qwen2": ("Qwen2Config", {**SMALL, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", GROUPED),
    "gemma": ("GemmaConfig", GROUPED),
    "gemma2": ("Gemma2Config", GROUPED),
    "gemma3": ("Gemma3TextConfig", {**GROUPED, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3Config", {**SMALL, "num_key_value_heads": 4, "pad_token_id": 0}),
    "olmo2": ("Olmo2Config", {**SMALL, "num_key_value_heads": 2}),
    "gpt2": ("GPT2Config", {"vocab_size": 512, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "opt": (
        "OPTConfig",
        {**SMALL, "ffn_dim": 256, "word_embed_proj_dim": 128, "do_layer_norm_before": True},
    ),
    "gpt_neox": ("GPTNeoXConfig", SMALL),
    "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**GROUPED, **EXPERTS, "num_experts": 4, "decoder_sparse_step": 1}),
    "granite": ("GraniteConfig", {**SMALL, "num_key_value_heads": 2}),
}
PROFILE = {"batch": (1, 2, 4), "length": (1, 16, 64), "past": (0, 16, 128)}
SITES = ("**", "**:in", "**:q_rope", "**:k_rope", "**:context")
PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7]]


def save(family: str, folder: Path) -> Path:
    """Write a model with random weights and return its directory."""
    import transformers

    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{"bos_token_id": 1, "eos_token_id": 2, **settings})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    return folder / family


def run(model: Path, dtype: str, observer: bool, steps: int = 5) -> str:
    """Step vLLM beside eager and return the line of the table."""
    began = time.perf_counter()
    spec = EngineSpec.of(str(model), backend="vllm", dtype=dtype, outputs=SITES, profile=PROFILE)
    with tempfile.TemporaryDirectory() as cache:
        workspace = Workspace(Cache(Path(cache)))
        try:
            workspace.build(spec)
        except SelectorError:  # no rotary embedding
            spec = replace(spec, outputs=SITES[:2])
        pair = Pair(workspace, spec, PairOptions(observer=observer))
        try:
            found = pair.generate(PROMPTS, max_new_tokens=steps)
        finally:
            pair.close()
    worst = max(found.results, key=lambda r: r.metrics.rel_l2)
    reasons = Counter(reason.split(",")[0].split(":")[0] for reason in pair.engine.refused.values())
    bad = found.first_bad.site if found.failures else "none"
    lost = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    same = all(t.engine == t.reference for t in found.tokens)
    ports = sorted({r.site.partition(":")[2] for r in found.results} - {""})
    cells = (
        model.name,
        dtype,
        len({r.site for r in found.results}),
        f"{worst.metrics.rel_l2:.1e} at {worst.site} step {worst.step}",
        f"{bad} ({len(found.failures)})",
        "same" if same else "differ",
        ", ".join(ports),
        lost,
        f"{time.perf_counter() - began:.0f} s",
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Run the families that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--observer", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for family in [""] if given.model else given.families:
            try:
                model = given.model or save(family, Path(folder))
                print(run(model, given.dtype, given.observer), flush=True)
            except Exception as error:  # noqa: BLE001 - one family that fails must not take the others with it
                print(f"| {family} | {given.dtype} | {type(error).__name__}: {str(error)[:300]} |", flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()

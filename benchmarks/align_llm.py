"""A language model of 135 million parameters by onnxruntime-genai, float32 and 4 bits: aligned, prefill, ten steps.

python benchmarks/align_llm.py FOLDER GGUF fp32|int4  makes the checkpoint and the engine below FOLDER once
(``DITTO_FOREIGN`` as for align_files.py), and writes what was found, seconds, and the process's peak memory to stdout.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import torch
from align_files import genai, tokenizer

from ditto_core.align.aligning import concluded, study
from ditto_core.align.alignment import summary
from ditto_core.align.file import OnnxFile
from ditto_core.align.quantized import measure_costs, quantized
from ditto_core.engines.workspace import Workspace
from ditto_core.model.loading import load_model
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec, ModelSource

PROMPT = [504, 2905, 6534, 1646, 31113, 260, 1979, 28, 253, 4116, 30]
STEPS = 11
"""Prefill and ten decoding steps."""


def checkpoint(folder: Path, gguf: Path) -> Path:
    """Save the model of a GGUF file as float32 safetensors, once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    target = folder / "checkpoint"
    if not (target / "config.json").exists():
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        fields = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
        config = AutoConfig.for_model(**fields)
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(target)
        tokenizer(target)
    return target


def peak() -> float:
    """Return the largest resident size of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def said(start: float, text: str) -> None:
    """Print what was done, since when, and the memory."""
    print(f"{text}\n[{time.perf_counter() - start:.0f} s, peak {peak():.2f} GB]", flush=True)


def main(folder: Path, gguf: Path, precision: str) -> None:
    """Align, then compare a prompt and ten steps."""
    source = checkpoint(folder, gguf)
    target = folder / precision
    if not list(target.glob("*.onnx")):
        genai(source, target, precision)
    start = time.perf_counter()
    model = load_model(ModelSource.of(str(source)))
    said(start, "model loaded")
    start = time.perf_counter()
    file = OnnxFile(target)
    if file.quantization:
        whole = quantized(model, file)
        said(start, summary(concluded(whole.study), model.label))
        start = time.perf_counter()
        said(start, str(measure_costs(whole)))
        del whole
    else:
        said(start, summary(concluded(study(model, file)), model.label))
    del model
    for reference in ("eager", "weights") if file.quantization else ("eager",):
        step_beside(source, target, reference)


def step_beside(source: Path, target: Path, reference: str) -> None:
    """Step the engine beside a reference, and print the verdict and the logits' divergence by step."""
    start = time.perf_counter()
    pair = Pair(Workspace(), EngineSpec.of(str(source), engine=target), PairOptions(reference=reference))
    comparison = pair.generate([PROMPT], max_new_tokens=STEPS)
    pair.close()
    worst = max(comparison.results, key=lambda result: result.verdict.margin)
    lines = [f"against {reference}: {comparison}", f"worst: {worst.site}, step {worst.step}: {worst.verdict}"]
    lines += [f"step {m.step}: kl_mean {m.kl_mean:.1e}, top1 {m.top1_agreement:.2f}" for m in comparison.logits]
    lines += [f"engine {row.engine}, reference {row.reference}" for row in comparison.tokens]
    said(start, "\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])

"""What aligning a large engine file costs in memory: random Llamas of one width and several depths.

python benchmarks/align_large.py FOLDER LAYERS [DTYPE]  makes the checkpoint, in float32 or DTYPE, and our float32
export of it below FOLDER once, each in a process of its own, and writes seconds and memory to stdout. *anonymous* is
memory that the process has for itself; *resident* counts the pages of the checkpoint's file, too, which the system
drops when it needs them.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from pathlib import Path

import torch

from ditto_core.align.alignment import summary
from ditto_core.align.file import OnnxFile
from ditto_core.align.making import align
from ditto_core.model.loading import load_lean
from ditto_core.spec import ModelSource

SIZES = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 256}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 4}


def checkpoint(folder: Path, layers: int, dtype: str) -> None:
    """Save a random model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **HEADS, num_hidden_layers=layers)
    LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


def exported(source: Path, folder: Path) -> None:
    """Write our export of it."""
    from ditto_core.model.export import export

    folder.mkdir(parents=True, exist_ok=True)
    export(load_lean(ModelSource.of(str(source))), folder)


class Memory(threading.Thread):
    """Samples this process's memory. ``peaks``: the largest of each kind, in GB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks = {"RssAnon": 0.0, "VmRSS": 0.0}

    def run(self) -> None:
        """Sample until the process ends."""
        while True:
            for line in Path("/proc/self/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in self.peaks:
                    self.peaks[name] = max(self.peaks[name], int(value.split()[0]) / 1e6)
            time.sleep(0.1)


def main(folder: Path, layers: int, dtype: str = "float32") -> None:
    """Align one depth."""
    source, target = folder / f"llama-{layers}-{dtype}", folder / f"onnx-{layers}-{dtype}"
    spawn = multiprocessing.get_context("spawn")
    for path, make, arguments in (
        (source / "config.json", checkpoint, (source, layers, dtype)),
        (target / "model.onnx", exported, (source, target)),
    ):
        if not path.exists():
            child = spawn.Process(target=make, args=arguments)
            child.start()
            child.join()
    memory = Memory()
    memory.start()
    start = time.perf_counter()
    found = align(load_lean(ModelSource.of(str(source))), OnnxFile(target / "model.onnx"))
    seconds = time.perf_counter() - start
    print(summary(found, f"llama of {layers} layers"))
    weights = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
    peaks = memory.peaks
    print(
        f"| {layers} | {dtype} | {weights:.2f} | {peaks['RssAnon']:.2f} | {peaks['VmRSS']:.2f} | {seconds:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

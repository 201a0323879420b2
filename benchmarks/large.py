"""What a large model takes: ``large.py DIR [--size 8b] [--backend tensorrt] [--device cuda]``, resumable.

Random bfloat16 Llamas, a bfloat16 engine with taps on every block, attention, MLP and norm, a prompt of 64 tokens and
eight steps. Each part runs in a process of its own and adds one JSON line to ``DIR/SIZE.jsonl``: seconds, peak resident
bytes (and those that are no mapped file), peak bytes of the GPU, bytes of the cache. Parts that are there are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

WIDTHS = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    "1.5b": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}
LAYERS = {"tiny": 2, "1.5b": 16, "8b": 32}
OUTPUTS = ("model.layers.*", "model.layers.*.self_attn", "model.layers.*.mlp", "model.layers.*.*norm", "model.norm")
PARTS = ("make", "export", "build", "first", "second", "localize")
PROMPT = [list(range(10, 74))]
STEPS = 8


class Peak:
    """The most memory that was in use, sampled ten times a second: resident, not mapped, and the GPU's."""

    def __init__(self) -> None:
        self.seen = {"resident": 0, "anonymous": 0, "gpu": 0}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._ended.wait(0.1):
            self.look()

    def look(self) -> None:
        """Take one sample."""
        status = Path("/proc/self/status").read_text().splitlines()
        read = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in status if line.startswith(("VmHWM", "Rss"))}
        now = {"resident": read["VmHWM"], "anonymous": read["RssAnon"], "gpu": gpu_bytes()}
        self.seen = {name: max(value, now[name]) for name, value in self.seen.items()}

    def __enter__(self) -> Peak:
        self.look()  # imports torch
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.look()


def gpu_bytes() -> int:
    """Return the bytes in use on the first GPU, by whomever."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def make(directory: Path, size: str) -> dict[str, Any]:
    """Write a random checkpoint, a shard for each layer and one for the rest, without holding the model."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    vocabulary = 256 if size == "tiny" else 128256
    config = LlamaConfig(**WIDTHS[size], num_hidden_layers=LAYERS[size], vocab_size=vocabulary, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    generator, places = torch.Generator().manual_seed(0), {}
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)
    for group, names in groups.items():
        tensors = {name: drawn(shapes[name], generator) for name in names}
        save_file(tensors, directory / f"model-{group}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(names, f"model-{group}.safetensors")
    config.save_pretrained(directory)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return {}


def drawn(shape: Any, generator: Any) -> Any:
    """Return a random weight; that of a norm is near one."""
    import torch

    made = torch.randn(shape, generator=generator, dtype=torch.float32) * (0.1 if len(shape) == 1 else 0.02)
    return (made + (len(shape) == 1)).bfloat16()


@contextmanager
def pair_of(directory: Path, backend: str, device: str) -> Iterator[Any]:
    """Open the pair whose engine is measured."""
    from ditto_core.cache import Cache
    from ditto_core.engines.workspace import Workspace
    from ditto_core.pair.pair import Pair
    from ditto_core.pair.pair_options import PairOptions
    from ditto_core.spec import EngineSpec

    dtype = "bfloat16" if backend.startswith("tensorrt") else "float16"
    spec = EngineSpec.of(str(directory / "model"), backend=backend, dtype=dtype, outputs=OUTPUTS)
    workspace = Workspace(Cache(directory / "cache"))
    with closing(Pair(workspace, spec, PairOptions(device=device))) as pair:
        yield pair


def run(part: str, directory: Path, backend: str, device: str) -> dict[str, Any]:
    """Run one part."""
    with pair_of(directory, backend, device) as pair:
        if part == "export":
            return {"taps": len(pair.sessions.export.provenance.taps)}
        if part == "build":
            return {"taps": len(pair.sessions.built.taps)}
        if part == "localize":
            found = pair.localize(PROMPT, max_new_tokens=2).localization
            return {"sites": len({result.site for result in found.results}), "blamed": len(found.blamed)}
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            comparison = pair.generate(PROMPT, max_new_tokens=STEPS)
            seconds.append(time.perf_counter() - start)
        return {"runs": seconds, "results": len(comparison.results), "failures": len(comparison.failures)}


def measure(part: str, directory: Path, size: str, backend: str, device: str) -> dict[str, Any]:
    """Run one part and return what it took."""
    start = time.perf_counter()
    with Peak() as peak:
        if part == "make":
            (directory / "model").mkdir(parents=True, exist_ok=True)
            found = make(directory / "model", size)
        else:
            found = run(part, directory, backend, device)
    seconds = time.perf_counter() - start
    cached = sum(path.stat().st_size for path in (directory / "cache").rglob("*") if path.is_file())
    stored = sum(path.stat().st_size for path in (directory / "model").glob("*.safetensors"))
    return {"part": part, "seconds": seconds, **peak.seen, "cache": cached, "checkpoint": stored, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=WIDTHS, default="1.5b")
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--part", default="")
    given = parser.parse_args()
    directory = given.directory / given.size
    results = given.directory / f"{given.size}.jsonl"
    if given.part:
        line = measure(given.part, directory, given.size, given.backend, given.device)
        with results.open("a") as file:
            file.write(json.dumps(line) + os.linesep)
        print(json.dumps(line), flush=True)
        return
    done = [json.loads(line)["part"] for line in results.read_text().splitlines()] if results.exists() else []
    for part in given.parts.split(","):
        if part not in done:
            subprocess.run([sys.executable, *sys.argv, "--part", part], check=True)


if __name__ == "__main__":
    main()

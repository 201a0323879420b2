"""What a large model takes: ``large.py DIR [--size 8b] [--backend tensorrt] [--device cuda]``, resumable.

Random bfloat16 Llamas, a bfloat16 engine with taps on every block, attention, MLP and norm, a prompt of 64 tokens and
eight steps. Each part runs in a process of its own and adds one JSON line to ``DIR/SIZE.jsonl``: seconds, peak resident
bytes (and those that are no mapped file), peak bytes of the GPU, bytes of the cache that are not the checkpoint's own
files. Parts that are there are left out. ``--size 70b --sparse`` traces a checkpoint that is mostly holes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

WIDTHS = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    "1.5b": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
}
LAYERS = {"tiny": 2, "1.5b": 16, "8b": 32, "70b": 80}
OUTPUTS = ("model.layers.*", "model.layers.*.self_attn", "model.layers.*.mlp", "model.layers.*.*norm", "model.norm")
PARTS = ("make", "export", "build", "first", "second", "localize")
SPARSE = ("make", "plan", "trace", "digest")
"""What can be done with a checkpoint of holes: nothing that computes. ``trace`` exports beside the cache, so that no
time goes into digests."""
DRAWN = ("0",)
"""The files of a sparse checkpoint that hold numbers: the first layer's."""
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


def make(directory: Path, size: str, sparse: bool) -> dict[str, Any]:
    """Write a random checkpoint, a shard for each layer and one for the rest, without holding the model.

    ``sparse``: all files but those of :data:`DRAWN` are a header and a hole, which reads as zeros.
    """
    import torch
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
        file, own = directory / f"model-{group}.safetensors", {name: shapes[name] for name in names}
        write(file, own, None if sparse and group not in DRAWN else generator)
        places |= dict.fromkeys(names, f"model-{group}.safetensors")
    config.save_pretrained(directory)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return {}


def write(path: Path, shapes: Mapping[str, Any], generator: Any) -> None:
    """Write a safetensors file of bfloat16, tensor by tensor; a hole in their place without a generator."""
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + 2 * shape.numel()]}
        end += 2 * shape.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values() if generator is not None else ():
            file.write(memoryview(drawn(shape, generator).view(torch.uint8).numpy()))
        file.truncate(8 + len(text) + end)


def plan(module: Any) -> dict[str, Any]:
    """Return the bytes of a model, of its largest block, and of what is in no block, as stored."""
    from ditto_core.model.placing import blocks, only_in_blocks

    inside = only_in_blocks(module)
    sizes = {id(p): p.nbytes for p in module.parameters()}
    largest = max(sum(p.nbytes for p in block.parameters()) for block in blocks(module))
    outside = sum(size for key, size in sizes.items() if key not in inside)
    return {"whole": sum(sizes.values()), "block": largest, "outside": outside, "blocks": len(blocks(module))}


def trace(model: Any, directory: Path) -> dict[str, Any]:
    """Export a loaded model, and return the bytes that the export has of its own and those that are linked."""
    import torch

    from ditto_core.model.export import export

    directory.mkdir()
    found = export(model, directory, dtype=torch.bfloat16)
    files = [path.stat() for path in directory.iterdir()]
    linked = sum(stat.st_size for stat in files if stat.st_nlink > 1)
    own = sum(stat.st_size for stat in files if stat.st_nlink == 1)
    return {"taps": len(found.provenance.taps), "linked": linked, "own": own}


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

    dtype = "float16" if backend == "onnxruntime" else "bfloat16"
    spec = EngineSpec.of(str(directory / "model"), backend=backend, dtype=dtype, outputs=OUTPUTS)
    workspace = Workspace(Cache(directory / "cache"))
    with closing(Pair(workspace, spec, PairOptions(device=device))) as pair:
        yield pair


def run(part: str, directory: Path, backend: str, device: str) -> dict[str, Any]:
    """Run one part."""
    with pair_of(directory, backend, device) as pair:
        if part in SPARSE:
            return looked_at(part, pair, directory)
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


def looked_at(part: str, pair: Any, directory: Path) -> dict[str, Any]:
    """Run a part that computes nothing."""
    if part == "digest":
        return {"digest": pair.workspace.digest(pair.spec.model)}
    model = pair.sessions.model
    return plan(model.module) if part == "plan" else trace(model, directory / "traced")


def measure(part: str, directory: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run one part and return what it took."""
    start = time.perf_counter()
    with Peak() as peak:
        if part == "make":
            (directory / "model").mkdir(parents=True, exist_ok=True)
            found = make(directory / "model", given.size, given.sparse)
        else:
            found = run(part, directory, given.backend, given.device)
    took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time()}
    files = {path.stat().st_ino: path.stat().st_size for path in (directory / "model").glob("*.safetensors")}
    own = {path.stat().st_ino: path.stat().st_size for path in (directory / "cache").rglob("*") if path.is_file()}
    cached = sum(size for inode, size in own.items() if inode not in files)
    return {"part": part, **took, **peak.seen, "cache": cached, "checkpoint": sum(files.values()), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=WIDTHS, default="1.5b")
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sparse", action="store_true", help="a checkpoint of holes: nothing that computes is run")
    parser.add_argument("--parts", default="")
    parser.add_argument("--part", default="")
    given = parser.parse_args()
    directory = given.directory / given.size
    results = given.directory / f"{given.size}.jsonl"
    if given.part:
        line = measure(given.part, directory, given)
        with results.open("a") as file:
            file.write(json.dumps(line) + os.linesep)
        print(json.dumps(line), flush=True)
        return
    done = [json.loads(line)["part"] for line in results.read_text().splitlines()] if results.exists() else []
    for part in given.parts.split(",") if given.parts else SPARSE if given.sparse else PARTS:
        if part not in done:
            subprocess.run([sys.executable, *sys.argv, "--part", part], check=True)


if __name__ == "__main__":
    main()

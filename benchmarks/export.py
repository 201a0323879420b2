"""Peak memory and time of one export: ``export.py DIR [--layers 16] [--dtype bfloat16]``.

Makes a random bfloat16 Llama of 2,048 hidden units in DIR where there is none, exports it in a process of its own with
an empty cache, and prints one JSON line: bytes of the checkpoint, peak resident bytes, seconds.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def make(directory: Path, layers: int) -> None:
    """Write a random checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=32000)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def measure(directory: Path, dtype: str) -> None:
    """Export, and print what it took."""
    from ditto_core.cache import Cache
    from ditto_core.engines.workspace import Workspace
    from ditto_core.spec import EngineSpec

    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        Workspace(Cache(cache)).export(EngineSpec.of(str(directory), dtype=dtype))
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    checkpoint = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    print(json.dumps({"checkpoint": checkpoint, "peak": peak, "ratio": peak / checkpoint, "seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--part", choices=("make", "measure"), default="")
    given = parser.parse_args()
    if given.part == "make":
        make(given.directory, given.layers)
    elif given.part == "measure":
        measure(given.directory, given.dtype)
    else:
        parts = ["measure"] if (given.directory / "config.json").exists() else ["make", "measure"]
        for part in parts:
            subprocess.run([sys.executable, *sys.argv, "--part", part], check=True)


if __name__ == "__main__":
    main()

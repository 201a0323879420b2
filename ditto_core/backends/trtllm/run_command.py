"""``python -m ditto_core.trtllm_run ENGINE --input-ids 1,2,3 --steps 4 --dump-dir DUMP``: dump an engine's tensors.

Runs an engine with extra outputs through TensorRT-LLM's Python runtime on its own greedy tokens, and writes each step's
tensors as ``step{i}.safetensors`` under TensorRT-LLM's names, with ``names.json``, the name map by which
``ditto compare DUMP REFERENCE --name-map DUMP/names.json`` finds their partners. The first step is the prefill.
It needs neither the model nor an export, so it runs wherever the engine runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ditto_core.errors import DittoError, UsageError

NAMES_FILE = "names.json"


def dump(
    engine: Path, prompts: Sequence[Sequence[int]], steps: int, directory: Path, family: str = "llama"
) -> list[Any]:
    """Run ``steps`` steps from token ids, write each to ``directory``, and return the generated ids, one list a row.

    Raises :class:`UsageError` for an empty prompt or no step.
    """
    import torch

    from ditto_core.backends.trtllm import calls
    from ditto_core.backends.trtllm.build import engine_config
    from ditto_core.backends.trtllm.names import name_map
    from ditto_core.backends.trtllm.session import NO_END
    from ditto_core.dumps import open_dump

    if steps < 1 or not prompts or not all(prompts):
        raise UsageError(f"{steps} steps of {len(prompts)} prompts, expected at least one of each and no empty prompt")
    config = engine_config(engine)["pretrained_config"]
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    directory.mkdir(parents=True, exist_ok=True)
    runner = calls.RUNNER_FROM_DIR(engine_dir=str(engine), rank=0, debug_mode=True)
    runner.session.dump_debug_buffers = writer(runner.session, directory)
    rows = [torch.tensor(row, dtype=torch.int32) for row in prompts]
    ids = calls.RUNNER_GENERATE(runner, batch_input_ids=rows, max_new_tokens=steps, end_id=NO_END, pad_id=0)
    written = open_dump(directory).names(0)
    (directory / NAMES_FILE).write_text(json.dumps(name_map(family, heads, kv_heads, written), indent=1) + "\n")
    flat = ids.reshape(len(rows), -1).tolist()
    return [generated(row, list(prompt), steps) for row, prompt in zip(flat, prompts, strict=True)]


def generated(row: list[int], prompt: list[int], steps: int) -> list[int]:
    """Return the new ids of a row, which holds the prompt, the new ids, and padding where other rows are longer."""
    start = len(prompt) if row[: len(prompt)] == prompt else 0
    return row[start : start + steps]


def writer(session: Any, directory: Path) -> Callable[[int], None]:
    """Return what replaces the session's own dump: one file a step, in the tensors' own dtypes."""
    from safetensors.torch import save_file

    def write(step: int) -> None:
        tensors: Mapping[str, Any] = session.debug_buffer
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(plain, directory / f"step{step}.safetensors")

    return write


def main() -> None:
    """Run the command line. An error of ours is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="trtllm_run", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("engine", type=Path)
    parser.add_argument("--input-ids", action="append", required=True, help="1,2,3; repeat for more rows")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--dump-dir", type=Path, required=True)
    parser.add_argument("--family", default="llama", help="llama (also Qwen, Mistral, Gemma) or gpt2")
    given = parser.parse_args()
    try:
        rows = [[int(word) for word in text.split(",") if word.strip()] for text in given.input_ids]
        for row in dump(given.engine, rows, given.steps, given.dump_dir, given.family):
            print(row)
    except DittoError as error:
        print(f"trtllm_run: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

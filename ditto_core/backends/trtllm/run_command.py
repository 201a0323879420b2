"""``python -m ditto_core.trtllm_run ENGINE --input-ids 1,2,3 --steps 4 --dump-dir DUMP``: dump an engine's tensors.

Runs an engine with extra outputs through TensorRT-LLM's Python runtime on its own greedy tokens, and writes each step's
inputs and outputs as ``step{i}.safetensors``, and for the eye as ``step{i}.txt``, under TensorRT-LLM's names. Beside
them stands ``names.json``, the name map by which ``ditto compare DUMP REFERENCE --name-map DUMP/names.json`` finds
their partners: it renames, cuts the joint projections, tells the prompts' lengths (rows are packed) and leaves out the
engine's bookkeeping. The first step is the prefill.
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
COMPARED = ("logits", "input_ids")
"""What the runtime knows itself and a reference has, too."""


def dump(engine: Path, prompts: Sequence[Sequence[int]], steps: int, directory: Path, family: str = "") -> list[Any]:
    """Run ``steps`` steps from token ids, write each to ``directory``, and return the generated ids, one list a row.

    ``family`` is of names; without it the engine's architecture decides.
    Raises :class:`UsageError` for an empty prompt or no step.
    """
    import torch

    from ditto_core.backends.served.forcing import NO_END
    from ditto_core.backends.trtllm import calls
    from ditto_core.backends.trtllm.build import engine_config

    if steps < 1 or not prompts or not all(prompts):
        raise UsageError(f"{steps} steps of {len(prompts)} prompts, expected at least one of each and no empty prompt")
    config = engine_config(engine)["pretrained_config"]
    directory.mkdir(parents=True, exist_ok=True)
    runner = calls.RUNNER_FROM_DIR(engine_dir=str(engine), rank=0, debug_mode=True)
    shapes: dict[str, tuple[int, ...]] = {}
    runner.session.dump_debug_buffers = writer(runner.session, directory, shapes)
    rows = [torch.tensor(row, dtype=torch.int32) for row in prompts]
    ids = calls.RUNNER_GENERATE(runner, batch_input_ids=rows, max_new_tokens=steps, end_id=NO_END, pad_id=0)
    extra = set(runner.session.debug_tensors)
    names = whole_map(config, outputs_of(engine), shapes, extra, [len(row) for row in prompts], family)
    (directory / NAMES_FILE).write_text(json.dumps(names, indent=1) + "\n")
    flat = ids.reshape(len(rows), -1).tolist()
    return [generated(row, list(prompt), steps) for row, prompt in zip(flat, prompts, strict=True)]


def generated(row: list[int], prompt: list[int], steps: int) -> list[int]:
    """Return the new ids of a row, which holds the prompt, the new ids, and padding where other rows are longer."""
    start = len(prompt) if row[: len(prompt)] == prompt else 0
    return row[start : start + steps]


def outputs_of(engine: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the outputs that our build gave an engine, by name; none for an engine that was built otherwise."""
    from ditto_core.backends.trtllm.build import REPORT_FOLDER
    from ditto_core.backends.trtllm.plan import Report

    folder = engine / REPORT_FOLDER
    return Report.load(folder).outputs if (folder / Report(0).file_name).is_file() else {}


def whole_map(
    config: Mapping[str, Any],
    outputs: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    extra: set[str],
    lengths: list[int],
    family: str = "",
) -> dict[str, Any]:
    """Return the name map of a dump: names, aliases, joint projections, padding, and what is bookkeeping.

    ``config`` is the engine's ``pretrained_config``, ``outputs`` our build's, ``shapes`` those of the prefill by name,
    ``extra`` the tensors that the runtime does not know, ``lengths`` of the prompts.
    """
    from ditto_core.backends.trtllm import names

    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    architecture = str(config.get("architecture", ""))
    kind = family or names.family_of(architecture)
    sources = {
        name: str(found["source"]) for name, found in outputs.items() if name in shapes and found["source"] != name
    }
    found = names.name_map(kind, heads, kv_heads, shapes)
    aliased = [names.alias_map(kind, heads, kv_heads, alias, source) for alias, source in sources.items()]
    for each in aliased:
        found["names"] |= each["names"]
        found["split"] += each["split"]
    left_out = {name for name in shapes if name not in extra and name not in COMPARED and name not in outputs}
    left_out |= {name for name in shapes if not names.comparable(sources.get(name, name), architecture)}
    rows, tokens = len(lengths), sum(lengths)
    last = ["logits"] if shapes.get("logits", ())[:1] == (rows,) and rows != tokens else []
    found["ignore"] = sorted(left_out)
    found["padding"] = {"lengths": lengths, "side": "left", "last_token": last}
    return found


def writer(session: Any, directory: Path, shapes: dict[str, tuple[int, ...]]) -> Callable[[int], None]:
    """Return what replaces the session's own dump: a step's files, in the tensors' own dtypes.

    ``shapes`` gets those of the first step.
    """
    from safetensors.torch import save_file

    from ditto_core.trace.summary import COLUMNS, describe

    def write(step: int) -> None:
        tensors: Mapping[str, Any] = session.debug_buffer
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(plain, directory / f"step{step}.safetensors")
        width = max(map(len, plain), default=0)
        lines = [f"{name:{width}}  {describe(tensor)}" for name, tensor in plain.items()]
        (directory / f"step{step}.txt").write_text("\n".join([f"{'name':{width}}  {COLUMNS}", *lines]) + "\n")
        if not shapes:
            shapes.update({name: tuple(tensor.shape) for name, tensor in plain.items()})

    return write


def main() -> None:
    """Run the command line. An error of ours is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="trtllm_run", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("engine", type=Path)
    parser.add_argument("--input-ids", action="append", required=True, help="1,2,3; repeat for more rows")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--dump-dir", type=Path, required=True)
    parser.add_argument("--family", default="", help="of names: llama, gpt2 or phi3 [default: by the architecture]")
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

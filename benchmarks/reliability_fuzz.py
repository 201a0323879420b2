"""Files of every format that is opened, mutated: each has to open or to be refused in one line.

``python benchmarks/reliability_fuzz.py WORK FORMAT:SEED:COUNT ...`` prints a line of JSON for each chunk, so that a
native crash names the chunk. :mod:`reliability` starts it.
"""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from safetensors.torch import save

from ditto_core.align.alignment import Alignment
from ditto_core.cache import Cache
from ditto_core.compare.comparison import Comparison
from ditto_core.compare.dumps import compare_dumps
from ditto_core.compare.tolerance_files import load_tolerance
from ditto_core.debug.tactics import read_folder
from ditto_core.dumps import open_dump
from ditto_core.dumps.namemap import NameMap
from ditto_core.dumps.polygraphy import save_outputs
from ditto_core.engines.engine import Engine
from ditto_core.errors import DittoError
from ditto_core.gates import GateResult, Policy
from ditto_core.gates.baseline import Baseline
from ditto_core.gates.record import Record, Side
from ditto_core.gates.result import Identity
from ditto_core.gates.suite import load_suite
from ditto_core.graphs.graph import Graph
from ditto_core.model.checkpoint import locate
from ditto_core.model.loading import load_model, tiny_decoder
from ditto_core.pair.answers import read_samples
from ditto_core.report import history
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec, ModelSource
from ditto_core.stepping.dumps import compare_offline
from ditto_core.stepping.floor import Noise, read_floor, write_floor
from ditto_core.system.receipt import Receipt
from ditto_core.trace import TraceWriter

SLOW = 30
"""Seconds after which opening a small file counts as a hang."""
MEMORY = 24 << 30
"""Bytes of address space: a file that makes us ask for more is found."""
ODD = (None, True, -1, 0, 2**63, 10**400, 1e308, float("nan"), "", "\x1b[2J\n::error::x", [], {}, [[]], {"a": 1})


class Format(NamedTuple):
    """A valid file and what opens it. ``victim`` is the one that is mutated; the others lie beside it."""

    files: dict[str, bytes]
    victim: str
    open: Callable[[Path], Any]


def everything(work: Path) -> dict[str, Format]:
    """Make a valid file of each format."""
    return {**dumps(work / "dumps"), **results(work / "results"), **engines(work / "engines"), **texts()}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("model.layers.0.mlp", "lm_head")
    return {name: torch.randn(1, 3, 8, generator=generator) for name in names}


def dumps(work: Path) -> dict[str, Format]:
    work.mkdir(parents=True)
    held = tensors()
    arrays = {name: tensor.numpy() for name, tensor in held.items()}
    pickled, zipped, plain = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save(held, pickled)
    np.savez(zipped, **arrays)
    np.save(plain, arrays["lm_head"])
    save_outputs(work / "run.json", [held, held])
    info = SessionInfo(label="eager", backend="eager", dtype="float32", model="tiny", facts={})
    taps = [Tap(name, value=f"v{i}") for i, name in enumerate(held)]
    for stem in ("trace", "other"):
        with TraceWriter(work / stem, info, taps) as writer:
            writer.write_step({"input_ids": torch.arange(3)[None]}, {"logits": torch.randn(1, 3, 5)}, held, tokens=[1])
    trace = {path.name: path.read_bytes() for path in (work / "trace").iterdir()}

    def against(name: str) -> Callable[[Path], Any]:
        def compare(folder: Path) -> Any:
            return compare_offline(compare_dumps(folder / name if name else folder, work / "reference.safetensors"))

        return compare

    (work / "reference.safetensors").write_bytes(save(held))
    single = {"x.safetensors": save(held), "x.pt": pickled.getvalue(), "x.npz": zipped.getvalue()}
    single |= {"x.npy": plain.getvalue(), "x.json": (work / "run.json").read_bytes()}
    found = {name.replace("x.", "dump "): Format({name: data}, name, against(name)) for name, data in single.items()}
    found["dump npy"] = Format({"x.npy": single["x.npy"]}, "x.npy", lambda folder: loaded(folder / "x.npy"))
    for victim in ("manifest.json", "step0.safetensors"):
        found[f"trace {victim}"] = Format(
            trace, victim, lambda folder: compare_offline(compare_dumps(folder, work / "other"))
        )
    return found


def loaded(path: Path) -> list[torch.Tensor]:
    dump = open_dump(path)
    return [dump.load(step, name) for step in range(dump.steps) for name in dump.names(step)]


def results(work: Path) -> dict[str, Format]:
    work.mkdir(parents=True)
    torch.save(tensors(), work / "a.pt")
    torch.save({name: tensor + 1e-3 for name, tensor in tensors().items()}, work / "b.pt")
    comparison = compare_offline(compare_dumps(work / "a.pt", work / "b.pt"))
    identity = Identity("s", "d", "m", "e" * 64, "engine float32", "r" * 64, "eager float32", "float32", 4)
    receipt = Receipt(1000.0, "abc", "e" * 64, "r" * 64, "model", {"torch": "2"}, {"gpu": "none"}, {}, {"bootstrap": 0})
    records = tuple(Record(f"q{i}", Side(correct=True), Side(correct=i > 2)) for i in range(9))
    gate = GateResult(identity, Policy(resamples=100), tuple(r.id for r in records), records, (receipt,))
    gate.save(work / "gate.json")
    Baseline.of(gate).save(work / "baseline.json")
    history.update(work / "history.jsonl", {"test_x": comparison})
    write_floor(work / "floor.json", {"lm_head": {0: Noise(1e-3, 1e-2, (0.1, 0.2))}})

    def loud(line: str) -> None:
        """Take what a damaged noise floor says."""

    text = json.dumps(comparison.to_json()).encode()
    files = {name: (work / name).read_bytes() for name in ("gate.json", "baseline.json", "history.jsonl", "floor.json")}
    return {
        "comparison": Format({"c.json": text}, "c.json", lambda folder: Comparison.load(folder / "c.json")),
        "gate result": Format(files, "gate.json", lambda folder: bool(GateResult.load(folder / "gate.json"))),
        "baseline": Format(files, "baseline.json", lambda folder: Baseline.load(folder / "baseline.json")),
        "history": Format(files, "history.jsonl", lambda folder: history.read(folder / "history.jsonl")),
        "noise floor": Format(files, "floor.json", lambda folder: read_floor(folder / "floor.json", loud)),
    }


def engines(work: Path) -> dict[str, Format]:
    work.mkdir(parents=True)
    (work / "built").mkdir()
    engine = Engine(work / "built", EngineSpec.of("model", outputs=["a.*"]), (Tap("a.b", "v"),), decoder=False)
    engine.save_manifest()
    engine.copy_to(work / "copy")
    copy = {path.name: path.read_bytes() for path in (work / "copy").iterdir()}
    alone = {"engine.json": copy["engine.json"]}
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="n")
    weights = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    graph = onnx.helper.make_graph([node], "g", [value("x", 1, ["n", 4])], [value("y", 1, ["n", 4])], [weights])
    model = onnx.helper.make_model(graph).SerializeToString()
    entry = Cache(work / "cache").get_or_build(
        "engine", "k", lambda folder: (folder / "f").write_text("f") and None, describe={}
    )
    kept = {f"engine/k/{path.name}": path.read_bytes() for path in entry.iterdir()}
    tiny = tiny_decoder("llama")
    tiny.save_pretrained(work / "tiny")
    checkpoint = {path.name: path.read_bytes() for path in (work / "tiny").iterdir()}

    def again(folder: Path) -> Any:
        return Cache(folder).get_or_build(
            "engine", "k", lambda made: (made / "f").write_text("f") and None, describe={}
        )

    def model_of(folder: Path) -> Any:
        return load_model(ModelSource(str(locate(ModelSource(str(folder))))))

    return {
        "engine manifest": Format(alone, "engine.json", Engine.load),
        "engine digests": Format(copy, "digests.json", Engine.load),
        "ONNX graph": Format({"m.onnx": model}, "m.onnx", lambda folder: Graph.read(folder / "m.onnx")),
        "cache entry": Format(kept, "engine/k/entry.json", again),
        "checkpoint weights": Format(checkpoint, "model.safetensors", model_of),
        "checkpoint configuration": Format(checkpoint, "config.json", model_of),
    }


def texts() -> dict[str, Format]:
    suite = b'{"id": "a", "text": "one two"}\n{"id": "b", "prompt": [1, 2, 3], "choices": [[4], [5]], "answer": 0}\n'
    rules = b'[tolerances]\n"model.layers.*.mlp" = 1e-3\nlogits = 0.01\n'
    names = b'{"names": {"blk.{i}.ffn": "model.layers.{i}.mlp"}, "suffix": true, "ignore": ["x.{r:**}"]}'
    tactics = b'{"Layers": [{"Name": "fc", "TacticName": "k"}, "bare"]}'
    place = {"value": "v", "columns": None, "layout": "a b -> a b", "error": 0.0, "runner_up": 0.0}
    binding = {"roles": {"x": "input_ids"}, "cache": [], "dtypes": {"x": "int64"}, "ranks": {"x": 2}}
    alignment = {"file": "f", "digest": {"f": "0" * 64}, "dtype": "float32", "quantization": "", "tolerance": 1e-3}
    alignment |= {"inputs": binding, "outputs": {"logits": place}, "sites": {"a": place}}
    align = json.dumps({**alignment, "hidden": {}, "absent": {}, "ambiguous": {}}).encode()
    samples = b'{"doc_id": 0, "arguments": [["q", "a"]], "resps": [["r"]], "filtered_resps": ["r"], "target": "r"}\n'
    return {
        "suite": Format({"s.jsonl": suite}, "s.jsonl", lambda folder: load_suite(folder / "s.jsonl")),
        "tolerances": Format({"t.toml": rules}, "t.toml", lambda folder: load_tolerance(folder / "t.toml")),
        "name map": Format({"n.json": names}, "n.json", lambda folder: NameMap.load(folder / "n.json")),
        "tactics": Format({"t.json": tactics}, "t.json", read_folder),
        "alignment": Format({"a.json": align}, "a.json", lambda folder: Alignment.load(folder / "a.json")),
        "samples": Format({"a.jsonl": samples}, "a.jsonl", lambda folder: read_samples(folder / "a.jsonl")),
    }


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one to four changes of random kinds; of JSON also with other values."""
    if data[:1] in b"{[" and chance.random() < 0.5:
        lines = data.splitlines() if data.count(b"\n{") else [data]
        place = chance.randrange(len(lines))
        lines[place] = other_json(lines[place], chance)
        return b"\n".join(lines)
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        chance.choice((flip, cut, drop, insert, repeat))(changed, chance)
    return bytes(changed)


def flip(data: bytearray, chance: random.Random) -> None:
    if data:
        near = chance.random() < 0.5  # headers stand at the beginning
        data[chance.randrange(min(len(data), 200) if near else len(data))] ^= 1 << chance.randrange(8)


def cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randint(0, len(data)) :]


def drop(data: bytearray, chance: random.Random) -> None:
    start = chance.randint(0, len(data))
    del data[start : start + chance.randint(1, 16)]


def insert(data: bytearray, chance: random.Random) -> None:
    start = chance.randint(0, len(data))
    data[start:start] = chance.choice((b"\0" * 8, b"\xff" * 8, b"\n", b'"', b"[" * 5000, chance.randbytes(9)))


def repeat(data: bytearray, chance: random.Random) -> None:
    start = chance.randint(0, len(data))
    data[start:start] = data[start : start + chance.randint(1, 64)]


def other_json(text: bytes, chance: random.Random) -> bytes:
    """Put an odd value in some place of a JSON document, or take a key away."""
    try:
        data = json.loads(text)
    except ValueError:
        return text[: len(text) // 2]
    node, ways = data, []
    while isinstance(node, dict | list) and node and (not ways or chance.random() < 0.8):
        key = chance.choice([*node] if isinstance(node, dict) else range(len(node)))
        ways.append((node, key))
        node = node[key]
    if not ways:
        return b"null"
    holder, key = ways[-1]
    if isinstance(holder, dict) and chance.random() < 0.3:
        del holder[key]
    else:
        holder[key] = chance.choice(ODD)
    return json.dumps(data).encode()


def outcome(form: Format, folder: Path, seed: str) -> str:
    """Open one mutated file, the valid one without a seed: ``accepted``, ``refused``, or what else came up."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in form.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        changed = mutated(data, random.Random(seed)) if seed and name == form.victim else data
        (folder / name).write_bytes(changed)
    signal.alarm(SLOW)
    try:
        form.open(folder)
    except DittoError as error:
        return "refused" if "\n" not in str(error) else f"several lines: {error!s:.300}"
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        return f"{type(error).__name__}: {error!s:.300}"
    finally:
        signal.alarm(0)
    return "accepted"


def expired(*_: object) -> None:
    raise TimeoutError(f"still opening after {SLOW} s")


def main() -> None:
    work, *chunks = sys.argv[1:]
    signal.signal(signal.SIGALRM, expired)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    shutil.rmtree(work, ignore_errors=True)
    formats = everything(Path(work))
    wrong = [name for name, form in formats.items() if outcome(form, Path(work) / "trial", "") != "accepted"]
    if wrong:
        sys.exit(f"valid files are not accepted: {', '.join(wrong)}")
    if not chunks:
        print(json.dumps([*formats]))
    for chunk in chunks:
        name, seed, count = chunk.split(":")
        start, counts, bad = time.perf_counter(), {"accepted": 0, "refused": 0}, {}
        for i in range(int(count)):
            key = f"{name}:{seed}:{i}"
            found = outcome(formats[name], Path(work) / "trial", key)
            if found in counts:
                counts[found] += 1
            else:
                bad[key] = found
        facts = {"trial": f"fuzz {chunk}", "count": int(count), **counts, "bad": bad}
        print(json.dumps({**facts, "seconds": round(time.perf_counter() - start, 1)}), flush=True)


if __name__ == "__main__":
    main()

"""Every figure about TensorRT in benchmarks/device.md, on one GPU, in one command of less than ten minutes.

    python benchmarks/device_tensorrt.py --out $OUT [--model DIR]

Writes ``device_tensorrt.json`` and ``device_tensorrt.md`` into ``--out`` after each section, so that what was measured
survives whatever comes later. A section that fails is reported with its error; the others run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.device_bench import (  # noqa: E402 - run as a script, it has to find its own folder first
    DTYPES,
    IDS,
    PADDED,
    PROMPT,
    SHAPES,
    STEPS,
    Bench,
    announce_backends,
    by_phase,
    child_environment,
    decode,
    default_model,
    engine_bytes,
    jumps,
    markdown,
    median_seconds,
    message,
    one_thread,
    summary,
    texts,
    timed,
    times,
)


def environment(bench: Bench) -> dict[str, str]:
    import onnx
    import torch
    import transformers

    from ditto_core.backends.registry import get_backend

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "onnx": onnx.__version__}
    return {**get_backend("tensorrt").versions(), **versions, "python": sys.version.split()[0]}


def kernels(bench: Bench) -> dict[str, dict[str, str]]:
    """What the matrix kernels do, measured: in this process, and with the driver's override in another."""
    from ditto_core.backends.tensorrt.probe import measure_kernels

    found = {}
    for inner in (576, 1536, 8192):
        for dtype in ("float32", *DTYPES):
            found[f"{dtype}, inner {inner}"] = dict(measure_kernels(dtype, False, 0, inner).facts)
    found["float32, flag set"] = dict(measure_kernels("float32", True, 0).facts)
    script = "import json; from ditto_core.backends.tensorrt.probe import measure_kernels as m; "
    script += "print(json.dumps(dict(m('float32', False, 0).facts)))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**child_environment(), "NVIDIA_TF32_OVERRIDE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    found["float32, NVIDIA_TF32_OVERRIDE=0"] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def tiny_families(bench: Bench) -> list[dict[str, Any]]:
    """Five families, a left-padded batch of three, eight steps, every tap."""
    from tests.models import DECODERS

    rows = []
    for family in DECODERS:
        for dtype in ("float32", *DTYPES):
            if bench.cases and f"{family}/{dtype}" not in bench.cases:
                continue
            pair = bench.pair(bench.tiny(family, dtype))
            run = pair.generate(IDS, max_new_tokens=8)
            rows.append({"family": family, "dtype": dtype, **summary(run)})
            pair.close()
    return rows


def shapes(bench: Bench) -> list[dict[str, Any]]:
    rows = []
    for profiles in ("one", "split"):
        pair = bench.pair(bench.tiny("llama", "bfloat16", ("model.layers.*",), profiles=profiles), observer=False)
        for name, (batch, length, count) in SHAPES.items():
            prompts = [[3 + (7 * row + i) % 250 for i in range(length)] for row in range(batch)]
            run = pair.generate(prompts, max_new_tokens=count)
            rows.append({"profiles": profiles, "shape": name, "rows": batch, "length": length, **summary(run)})
        pair.close()
    return rows


def prepare(bench: Bench) -> str:
    """Start the exports of the real model in processes of their own: they take the CPU, not the GPU."""
    from ditto_core.model.export import export  # noqa: F401 - fail here, not in the children

    for dtype in DTYPES:
        command = [sys.executable, __file__, "--out", str(bench.out), "--model", str(bench.model), "--export", dtype]
        log = (bench.out / f"export-{dtype}.log").open("wb")
        bench.preparing.append(subprocess.Popen(command, stdout=log, stderr=log, env=child_environment()))
    return "started"


def export_times(bench: Bench) -> dict[str, Any]:
    codes = [child.wait(timeout=400) for child in bench.preparing]
    return {dtype: json.loads((bench.out / f"export-{dtype}.json").read_text()) for dtype in DTYPES} | {"exit": codes}


def build_times(bench: Bench) -> list[dict[str, Any]]:
    """Seconds to build cold, and to take the engine from the cache, verification of every byte included."""
    rows = []
    for dtype in DTYPES:
        variants = {"tapped": bench.spec(dtype), "plain": bench.spec(dtype, ())}
        variants["unfused"] = bench.spec(dtype, taps="unfused")
        for name, spec in variants.items():
            cold, engine = timed(lambda spec=spec: bench.workspace.build(spec))
            warm, _ = timed(lambda spec=spec: bench.workspace.build(spec))
            opened, session = timed(engine.open)
            session.close()
            facts = {k: engine.facts.get(k) for k in ("parse_s", "build_s", "layers", "engine_size")}
            row = {"dtype": dtype, "engine": name, "taps": len(engine.taps), "cold_s": cold, "from_cache_s": warm}
            rows.append({**row, "open_s": opened, **facts})
    return rows


def timing_cache(bench: Bench) -> dict[str, Any]:
    """Build once more with what the last build left behind. TensorRT-RTX times nothing at build time."""
    from ditto_core.backends.tensorrt.library import load_library

    library = load_library()
    spec = replace(bench.spec("float16"), options=(("timeout", 3599.0),))  # another key for the same engine
    seconds, engine = timed(lambda: bench.workspace.build(spec))
    return {
        "library": library.label,
        "second_build_s": seconds,
        "build_s": engine.facts.get("build_s"),
        "timing_cache": "has none (its API is a no-op)" if library.rtx else "used",
    }


def real_model(bench: Bench) -> list[dict[str, Any]]:
    """The real model, prefill and sixteen decoding steps in lockstep with eager, with the observer check."""
    rows = []
    for dtype in DTYPES:
        pair = bench.pair(bench.spec(dtype))
        run = pair.generate(PROMPT, max_new_tokens=STEPS)
        facts = dict(pair.sessions.engine.info.facts)
        run.save(bench.out / f"smollm2-{dtype}.json")
        rows.append({"dtype": dtype, **summary(run), **by_phase(run), "text": texts(run), "facts": facts})
        padded = pair.generate(PADDED, max_new_tokens=8)
        rows.append({"dtype": f"{dtype}, padded batch of 3", **summary(padded), **by_phase(padded)})
        pair.close()
    return rows


def fault(bench: Bench) -> list[dict[str, Any]]:
    """A weight scaled in the ONNX, before the engine is built, is found at its site."""
    from ditto_core.engines.engine import build_into
    from tests.faults import scale_weight

    rows = []
    for name, spec, factor in (
        ("SmolLM2", bench.spec("float16", ("model.layers.*", "model.layers.*.mlp.*_proj")), 1.25),
        ("tiny llama", bench.tiny("llama", "bfloat16", ("**",)), 1.25),
        ("tiny llama", bench.tiny("llama", "float32", ("**",)), 1.01),
    ):
        if name == "SmolLM2" and not bench.has_model:
            continue
        folder = bench.out.parent / f"fault-{spec.dtype}-{name.replace(' ', '-')}"
        shutil.rmtree(folder, ignore_errors=True)
        export = bench.workspace.export(spec)
        shutil.copytree(export.directory, folder / "export")
        faulty = replace(export, directory=folder / "export")
        scale_weight(faulty.onnx_path, "model.layers.1.mlp.down_proj", factor)
        (folder / "engine").mkdir()
        engine = replace(build_into(spec, faulty, folder / "engine"), spec=spec)
        pair = bench.pair(spec, observer=False)
        pair.sessions.built = engine
        run = pair.generate(PROMPT if name == "SmolLM2" else IDS, max_new_tokens=3)
        rows.append({"model": name, "dtype": spec.dtype, "factor": factor, **summary(run), "ranking": jumps(run)})
        pair.close()
    return rows


def unfused(bench: Bench) -> list[dict[str, Any]]:
    """The debug listener: what it delivers, what of that has a name, and whether the engine stays as it was.

    Beside it: whether two sessions of the plain engine give the same bits, for kernels are chosen when a session opens.
    """
    import torch

    def same(a: Any, b: Any) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))

    rows = []
    cases = [("tiny llama", bench.tiny("llama", "float16", taps="unfused"), IDS)]
    if bench.has_model:
        cases.append(("SmolLM2", bench.spec("float16", ("**", "**:**"), taps="unfused"), PROMPT))
    for name, spec, prompts in cases:
        pair = bench.pair(spec, observer=False)
        plain, batch = bench.workspace.build(replace(spec.untapped(), options=())), pair.encode(prompts)
        ours, (first, again) = (
            decode(pair.sessions.engine, batch, 6),
            (decode(plain.open(), batch, 6) for _ in range(2)),
        )
        run = pair.generate(prompts, max_new_tokens=6)
        bits = {"bit_identical_to_plain": same(ours, first), "plain_sessions_bit_identical": same(first, again)}
        row = {"model": name, **bits, "listener": pair.sessions.engine.info.facts.get("unfused")}
        rows.append({**row, "refused": len(pair.engine.refused), **summary(run)})
        pair.close()
    return rows


def tapping_cost(bench: Bench) -> list[dict[str, Any]]:
    """Milliseconds a decoding step, median of the last half of 32: kernels of each shape are compiled before."""
    rows = []
    for dtype in DTYPES:
        prompts = bench.pair(bench.spec(dtype)).encode(PROMPT)
        for name, spec in {
            "plain": bench.spec(dtype, ()),
            "tapped": bench.spec(dtype),
            "every module tapped": bench.spec(dtype, ("**",)),
            "unfused": bench.spec(dtype, taps="unfused"),
            "tapped, CUDA graphs": bench.spec(dtype, cuda_graphs=True),
        }.items():
            session = bench.workspace.build(spec).open()
            first = decode(session, prompts, 32)
            again = decode(session, prompts, 32)
            rows.append({"dtype": dtype, "step": name, "taps": len(session.taps), **times(first, again)})
            session.close()
        rows.append({"dtype": dtype, "step": "tapped and compared", **compared_cost(bench, dtype, prompts)})
    return rows


def compared_cost(bench: Bench, dtype: str, prompts: Any) -> dict[str, Any]:
    """Each tap measured against a stored tensor of the reference, and the whole lockstep with the reference in it."""
    from ditto_core.compare.metrics import measure

    pair = bench.pair(bench.spec(dtype), observer=False)
    stored: list[dict[str, Any]] = []

    def keep(site: str, tensor: Any) -> None:
        stored[-1][site] = tensor.float().clone()

    decode(pair.sessions.engine, prompts, 32, keep, before=lambda: stored.append({}))
    step = iter(range(32))
    current: dict[str, Any] = {}

    def compare(site: str, tensor: Any) -> None:
        measure(tensor, current[site])

    def advance() -> None:
        current.clear()
        current.update(stored[next(step)])

    again = decode(pair.sessions.engine, prompts, 32, compare, before=advance)
    stored.clear()
    seconds, run = timed(lambda: pair.generate(PROMPT, max_new_tokens=32))
    found = {"taps": len(pair.sessions.engine.taps), **times(again, again)}
    pair.close()
    return {**found, "lockstep_ms": round(1000 * seconds / run.steps, 2)}


def kept_kernels(bench: Bench) -> dict[str, Any]:
    """The first pass through eight new shapes, without and with the kernels that an earlier session compiled."""
    from ditto_core.backends.tensorrt.state import KERNELS

    engine = bench.workspace.build(bench.spec("bfloat16"))
    prompts = bench.pair(bench.spec("bfloat16")).encode(PADDED)
    shutil.rmtree(bench.workspace.cache.state(KERNELS, "any").parent, ignore_errors=True)
    found = {}
    for name in ("nothing kept", "kernels kept"):
        session = engine.open()
        steps = decode(session, prompts, 8).milliseconds
        session.close()
        found[name] = {"prefill_ms": round(steps[0], 1), "decode_sum_ms": round(sum(steps[1:]), 1)}
    files = list(bench.workspace.cache.state(KERNELS, "any").parent.glob("*.bin"))
    return {**found, "bytes": sum(file.stat().st_size for file in files)}


def metric_bandwidth(bench: Bench) -> list[dict[str, Any]]:
    """The comparison of two tensors on the GPU against a copy of them."""
    import torch

    from ditto_core.compare.metrics import measure

    rows = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        expected = torch.randn(64 << 20, device=bench.device).to(dtype)
        actual = expected * 1.001
        moved = 2 * expected.numel() * expected.element_size()
        target = torch.empty_like(expected)
        copy = median_seconds(lambda target=target, expected=expected: target.copy_(expected))
        ours = median_seconds(lambda actual=actual, expected=expected: measure(actual, expected), 5)
        speeds = {"copy_GB_s": round(moved / copy / 1e9), "measure_GB_s": round(moved / ours / 1e9, 1)}
        rows.append({"dtype": str(dtype)[6:], "elements": expected.numel(), **speeds})
    return rows


def errors_on_the_gpu(bench: Bench) -> dict[str, str]:
    """What users read when something is wrong."""
    import torch

    from ditto_core.backends.tensorrt.manifest import ENGINE_FILE
    from ditto_core.engines.engine import Engine
    from ditto_core.stepping.prompts import Sequencer, encode

    engine = bench.workspace.build(bench.tiny("llama", "float16", ("model.layers.*",)))
    session, said = engine.open(), {}
    inputs = Sequencer(encode(IDS)).inputs()
    wrong = {
        "wrong dtype": {**inputs, "input_ids": inputs["input_ids"].int()},
        "wrong shape": {**inputs, "attention_mask": inputs["attention_mask"][:, :-1]},
        "beyond the profile": {name: torch.ones(9, 7, dtype=torch.int64) for name in inputs},
    }
    for name, given in wrong.items():
        session.start(given["input_ids"].shape[0])
        said[name] = message(lambda given=given: session.step(given, lambda site, tensor: None))
    session.close()
    folder = bench.out.parent / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    engine.copy_to(folder)
    for name, content in (("truncated engine", engine_bytes(engine)[:100_000]), ("no engine", b"not an engine")):
        (folder / ENGINE_FILE).write_bytes(content)
        said[name] = message(lambda: Engine.load(folder).open())
    return said


SECTIONS: dict[str, Callable[[Bench], Any]] = {
    "environment": environment,
    "prepare": prepare,
    "kernels": kernels,
    "errors": errors_on_the_gpu,
    "shapes": shapes,
    "tiny families": tiny_families,
    "exports": export_times,
    "builds": build_times,
    "SmolLM2": real_model,
    "fault": fault,
    "unfused": unfused,
    "cost": tapping_cost,
    "kept kernels": kept_kernels,
    "metrics": metric_bandwidth,
    "timing cache": timing_cache,
}


def export_one(bench: Bench, dtype: str) -> None:
    seconds, exported = timed(lambda: bench.workspace.export(bench.spec(dtype)))
    data = {"seconds": round(seconds, 1), "sites": len(exported.provenance.sites)}
    (bench.out / f"export-{dtype}.json").write_text(json.dumps(data))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=default_model(), help="the real model's directory")
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), help="run these sections alone")
    parser.add_argument("--cases", nargs="*", default=[], help="tiny families: these alone, as FAMILY/DTYPE")
    parser.add_argument("--export", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    announce_backends(given.out.parent / "ditto-entry-points")
    bench = Bench(given.out, given.model, cases=tuple(given.cases))
    with one_thread():
        if given.export:
            export_one(bench, given.export)
            return
        for name, section in SECTIONS.items():
            if not given.only or name in given.only:
                bench.run(name, section)
    print(markdown(bench))


if __name__ == "__main__":
    main()

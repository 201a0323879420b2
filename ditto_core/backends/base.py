"""What a backend must offer, and what it may offer.

A backend must be a :class:`Backend`. Everything else is a capability: a protocol of its own, which the rest of the
library asks for with ``isinstance``. A backend has a capability when it has the protocol's methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy.typing as npt

    from ditto_core.model.loading import LoadedModel
    from ditto_core.model.program import Program
    from ditto_core.session import Session, TakesRequests
    from ditto_core.sites import Tap
    from ditto_core.spec import EngineSpec

Arrays = Mapping[str, "npt.NDArray[Any]"]


@dataclass(frozen=True)
class BuildRequest:
    """What a backend gets to build from: an ONNX file and the taps that it must expose.

    ``onnx_path`` has no taps among its outputs but every tap's value in its graph. ``outputs`` are the model's own
    final outputs. ``decoder`` tells whether the graph has KV-cache inputs ``past_key_values.{i}.key|value`` and outputs
    ``present.{i}.key|value`` besides. ``artifacts`` is a folder for readable by-products, or None. ``load`` returns the
    model in float32, loaded once a process; without it, :meth:`exported_program` loads the model itself.
    """

    spec: EngineSpec
    onnx_path: Path
    taps: tuple[Tap, ...]
    outputs: tuple[str, ...]
    decoder: bool
    directory: Path
    artifacts: Path | None = None
    load: Callable[[], LoadedModel] | None = field(default=None, repr=False, compare=False)

    def exported_program(self) -> Program:
        """Trace the model for a backend that builds from the module: the final outputs, the cache and the taps.

        It is in the spec's dtype, and its dynamic sizes are bounded by the spec's profile. Raises
        :class:`~ditto_core.errors.BuildError` when ``torch.export`` refuses the model.
        """
        from ditto_core.model.program import trace_program

        model, spec = self.model(), self.spec
        named = spec.dimensions({name: tensor.ndim for name, tensor in model.examples.items()})
        dimensions = [] if spec.later else named
        return trace_program(model, self.taps, spec.profile, dimensions, operators=spec.operators)

    def model(self) -> LoadedModel:
        """Return the eager model in the spec's dtype, on the CPU."""
        import torch

        from ditto_core.model.loading import load_model

        loaded = self.load() if self.load else load_model(self.spec.model, implementation=self.spec.attention)
        model = loaded.later_steps() if self.spec.later else loaded
        return model.cast(getattr(torch, self.spec.dtype))


@dataclass(frozen=True)
class BuildReport:
    """Result of a build: taps that the engine exposes, those it could not (site -> reason), free-form facts.

    ``partial``: the engine was asked to show only what it did not fuse. Taps that it does not deliver are then counted
    in a note and do not fail the comparison.
    """

    taps: tuple[Tap, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    partial: bool = False


class Backend(Protocol):
    """Builds engines and opens them. It knows nothing of comparison."""

    name: str
    dtypes: tuple[str, ...]

    def check(self, spec: EngineSpec) -> None:
        """Raise :class:`BackendError` with the remedy when this spec cannot be built here."""
        ...

    def versions(self) -> dict[str, str]:
        """Return what else decides the engine's bits: library, driver, GPU. Part of the cache key."""
        ...

    def build(self, request: BuildRequest) -> BuildReport:
        """Write the engine into ``request.directory``."""
        ...

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> Session:
        """Load the engine that :meth:`build` wrote."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """A backend that can tell what is in an engine it wrote, without running it."""

    def inspect(self, directory: Path) -> Inspection:
        """Describe the engine in a directory. Raises :class:`~ditto_core.errors.DittoError` when it cannot be read."""
        ...


@runtime_checkable
class WritesArtifacts(Protocol):
    """A backend that can write the readable by-products of an engine that was built before, without building again."""

    def write_artifacts(self, request: BuildRequest) -> None:
        """Write by-products into ``request.artifacts`` for the engine in ``request.directory``."""
        ...


@runtime_checkable
class HasContent(Protocol):
    """A backend whose engine is, or is made of, files that are there already."""

    def content(self, spec: EngineSpec) -> dict[str, str]:
        """Return the SHA-256 (hex) of what the engine is made of beside the model, by name. Part of the cache key."""
        ...


@runtime_checkable
class CompilesForCpu(Protocol):
    """A backend that can leave machine code of the CPU in its engines, which another CPU may be unable to run."""

    def machine_code(self, spec: EngineSpec) -> dict[str, str]:
        """Return what decides the code; nothing where it is compiled when the engine is opened. Part of the cache key.

        :data:`~ditto_core.system.cpu.INSTRUCTIONS` names the CPU's: an engine is not opened where one is missing.
        """
        ...


@runtime_checkable
class RunsElsewhere(Protocol):
    """A backend whose engine is a server that is there already, and may run another model tomorrow."""

    def running(self, spec: EngineSpec, directory: Path) -> Mapping[str, str]:
        """Return what runs there now, by the names of a session's facts. No part of the cache key."""
        ...


@runtime_checkable
class QuantizesWeights(Protocol):
    """A backend that can tell which weights an engine has."""

    def own_models(self, spec: EngineSpec, model: LoadedModel) -> tuple[LoadedModel, LoadedModel]:
        """Return the model with the engine's own quantized weights, and the same that also rounds what the engine's
        kernels round. Raises :class:`~ditto_core.errors.UsageError` for an engine whose weights are not quantized."""
        ...


@runtime_checkable
class IsolatesSessions(Protocol):
    """A backend whose engines can take their process down: ``isolation`` is where its sessions live unless told
    otherwise, ``process`` or ``none``."""

    isolation: str


@runtime_checkable
class NeedsDevice(Protocol):
    """A backend that builds engines on machines where they cannot run."""

    def check_runs(self) -> None:
        """Raise :class:`BackendError` with the reason when no engine of this backend can run here."""
        ...


@runtime_checkable
class BuildsFromSource(Protocol):
    """A backend that builds from the model source alone. No ONNX file is made for it, so its raw names are its own."""

    def raw_taps(self, name: str, alias: str) -> Sequence[Tap]:
        """Return the taps of a raw name, to be called ``alias``. Raises :class:`~ditto_core.errors.SelectorError`."""
        ...


@runtime_checkable
class ServesModes(Protocol):
    """A backend that serves in several ways, which must agree: a prefix cache, prompts in chunks."""

    def modes(self, spec: EngineSpec) -> Mapping[str, Mapping[str, Any]]:
        """Return by mode the options that it adds to a spec's. ``plain`` computes each prompt at once and whole.

        Sessions of the modes ``prefix_cache`` and ``chunked_prefill`` are :class:`~ditto_core.session.ShowsPasses`.
        """
        ...


@runtime_checkable
class ServesRequests(Protocol):
    """A backend whose engines take requests one by one."""

    def open_requests(self, spec: EngineSpec, directory: Path) -> TakesRequests:
        """Load the engine that :meth:`Backend.build` wrote, with a cache that several long requests do not fit into."""
        ...


@runtime_checkable
class StoresGraph(Protocol):
    """A backend whose engine is an ONNX file: repros are cut from it, else from the export."""

    def graph_file(self, directory: Path) -> Path:
        """Return the ONNX file of the engine in a directory."""
        ...


@runtime_checkable
class CutsEngine(Protocol):
    """A backend whose engine is no ONNX file and can take its own tensors as inputs, ``VALUE::given``."""

    def cut(self, spec: EngineSpec, directory: Path, values: Sequence[str]) -> None:
        """Change the engine in a directory, a copy of what :meth:`Backend.build` wrote, so that it takes ``values``.

        Raises :class:`~ditto_core.errors.UsageError` for an engine that takes none, and
        :class:`~ditto_core.errors.SelectorError` for a value that it does not show.
        """
        ...


@runtime_checkable
class RunsOperators(Protocol):
    """A backend that runs a few operators by themselves, in this process and in a test that needs no ditto_core."""

    def run_operators(self, spec: EngineSpec, graph: bytes, inputs: Arrays) -> npt.NDArray[Any]:
        """Run a serialized ONNX model with the settings of ``spec`` and return its only output."""
        ...

    def operators_test(self, spec: EngineSpec) -> str:
        """Return the source of a test that runs ``model.onnx`` on ``inputs.safetensors`` and calls ``check``.

        ``HERE`` is their folder, ``load_file`` reads safetensors as numpy arrays.
        """
        ...


@dataclass(frozen=True)
class FreshBuild:
    """One build from nothing: the engine file, and what it is made of.

    ``layers`` map layer -> kernel, ``timings`` timing-cache key -> tactic.
    """

    file: Path
    library: str
    layers: Mapping[str, str]
    timings: Mapping[str, str]


@runtime_checkable
class BuildsFresh(Protocol):
    """A backend that builds an ONNX file of fixed shapes again and again, without anything of an earlier build.

    ``fresh_suffix`` is that of its engine files; ``fresh_settled`` are options that mean nothing here, with the reason.
    """

    fresh_suffix: str
    fresh_settled: Mapping[str, str]

    def fresh_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of a build. Raises :class:`~ditto_core.errors.UsageError` for an unknown one."""
        ...

    def build_fresh(self, onnx_path: Path, directory: Path, options: Mapping[str, Any]) -> FreshBuild:
        """Write an engine that :meth:`Backend.open` loads. Raises :class:`~ditto_core.errors.BuildError`."""
        ...


@runtime_checkable
class Diagnosed(Protocol):
    """A backend with more to say in `ditto doctor` than whether it works."""

    def diagnose(self) -> Iterable[str]:
        """Return lines: what is installed, what clashes, what to do. Must work where the library is missing."""
        ...


@dataclass(frozen=True)
class EngineTensor:
    """A tensor at an engine's border: torch's dtype name, sizes or names of its dimensions."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class EngineLayer:
    """A layer of an engine: its kernel, the module paths whose computation it holds, the dtypes of its outputs."""

    name: str
    kind: str
    kernel: str = ""
    modules: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inspection:
    """What is in an engine. ``profiles`` map dimension names to (min, opt, max)."""

    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    layers: tuple[EngineLayer, ...] = ()
    profiles: tuple[Mapping[str, tuple[int, int, int]], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

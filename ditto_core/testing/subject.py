"""A backend under test: two tiny models, the engines that it builds of them, and what their references compute."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ditto_core.backends.base import Backend, BuildReport, BuildRequest, BuildsFromSource, NeedsDevice
from ditto_core.backends.child import open_backend
from ditto_core.backends.eager import EagerSession
from ditto_core.compare.metrics import ShapeMismatch, measure
from ditto_core.compare.tolerance import TABLE
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import UsageError
from ditto_core.model.exported import Export
from ditto_core.model.tiny import tiny_decoder
from ditto_core.profile import Range, ShapeProfile
from ditto_core.session import Session
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

Feed = Mapping[str, torch.Tensor]
PROFILE = ShapeProfile(batch=Range(1, 2, 8), length=Range(1, 5, 64), past=Range(0, 8, 128))


def decoder() -> Any:
    """Return a Llama of two layers with random weights."""
    return tiny_decoder("llama")


def classifier() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a small convolutional network, a model without a KV cache, and example images [2, 3, 8, 8]."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5))
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return module, {"input": torch.randn(2, 3, 8, 8, generator=generator)}


Model = Callable[[], Any]


@dataclass
class Step:
    """What one step delivered: final outputs by name, and (site, tensor) in the order of their delivery."""

    outputs: dict[str, torch.Tensor]
    delivered: list[tuple[str, torch.Tensor]]

    @property
    def taps(self) -> dict[str, torch.Tensor]:
        """The tensors by site."""
        return dict(self.delivered)


@dataclass(frozen=True)
class Built:
    """An engine on disk, its request and its report."""

    request: BuildRequest
    report: BuildReport

    @property
    def directory(self) -> Path:
        """Where it lies."""
        return self.request.directory


@dataclass
class Subject:
    """Builds each engine once and opens as many sessions of it as are asked for."""

    backend: Backend
    dtype: str
    options: Mapping[str, Any]
    workspace: Workspace
    isolation: str = ""
    engines: dict[tuple[Model, tuple[str, ...]], Built] = field(default_factory=dict)
    exports: dict[Model, Export] = field(default_factory=dict)

    @cached_property
    def folder(self) -> Path:
        """A folder that is deleted with this object."""
        self._temporary = tempfile.TemporaryDirectory(prefix="ditto-testing-")
        return Path(self._temporary.name)

    def new_folder(self) -> Path:
        """Return a new empty folder."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def spec(self, model: Model = decoder) -> EngineSpec:
        """Return what is built; the taps are in the request."""
        fields = {"dtype": self.dtype, "outputs": (), "profile": PROFILE, "options": dict(self.options)}
        return EngineSpec.of(model, backend=self.backend.name, **fields)

    def export(self, model: Model = decoder) -> Export:
        """Return a model's export, made once. Raises :class:`UsageError` when the backend builds from no graph."""
        if isinstance(self.backend, BuildsFromSource):
            raise UsageError(
                f"{self.backend.name} builds from the model source; the checks need a backend with a graph"
            )
        if model not in self.exports:  # asked again, the cache would repair what a backend writes into it
            self.exports[model] = self.workspace.graph(self.spec(model))
        return self.exports[model]

    def every_tap(self, model: Model = decoder) -> tuple[Tap, ...]:
        """Return a model's taps that are none of its outputs, in topological order."""
        export = self.export(model)
        return tuple(tap for tap in export.provenance.taps if tap.value not in export.outputs)

    def output_tap(self) -> Tap:
        """Return the tap whose value is the decoder's final output."""
        return next(tap for tap in self.export().provenance.taps if tap.value in self.export().finals)

    def request(self, taps: Sequence[Tap], model: Model = decoder) -> BuildRequest:
        """Return a request for an engine in a new folder."""
        export, spec = self.export(model), self.spec(model)
        return BuildRequest(
            spec,
            export.onnx_path,
            tuple(taps),
            export.finals,
            export.decoder,
            self.new_folder(),
            load=lambda: self.workspace.model(spec.model, spec.attention),
        )

    def engine(self, taps: Sequence[Tap] = (), model: Model = decoder) -> Built:
        """Return an engine, built on the first call."""
        key = model, tuple(tap.site for tap in taps)
        if key not in self.engines:
            if isinstance(self.backend, NeedsDevice):
                self.backend.check_runs()
            self.backend.check(self.spec(model))
            request = self.request(taps, model)
            self.engines[key] = Built(request, self.backend.build(request))
        return self.engines[key]

    def copy(self, built: Built) -> Built:
        """Return a copy of an engine in another folder."""
        folder = self.new_folder() / "copy"
        shutil.copytree(built.directory, folder)
        return replace(built, request=replace(built.request, directory=folder))

    @contextmanager
    def session(self, built: Built) -> Iterator[Session]:
        """Open an engine and close it."""
        made = built.request.spec, built.directory, built.report.taps
        session = open_backend(self.backend, *made, self.isolation)
        try:
            yield session
        finally:
            session.close()

    def reference(self, taps: Sequence[Tap], feeds: Sequence[Feed], model: Model = decoder) -> list[Step]:
        """Return what the eager model computes in the same dtype: a mask's smallest number is that of the dtype."""
        loaded = self.workspace.model(self.spec(model).model)
        return run(EagerSession(loaded, tuple(taps), dtype=self.dtype), feeds)

    def assert_near(self, actual: torch.Tensor | None, expected: torch.Tensor, what: str) -> None:
        """Raise unless the rel-L2 distance is within the table's bound for the dtype, twice."""
        assert actual is not None, f"{what} is not delivered"
        bound = 2 * TABLE[self.dtype]
        error = distance(actual, expected)
        assert error <= bound, f"{what}: rel_l2 {error:.1e} > {bound:.1e} (table for {self.dtype}, twice)"


def run(session: Session, feeds: Sequence[Feed]) -> list[Step]:
    """Start a sequence and run its steps; everything is copied."""
    session.start(len(next(iter(feeds[0].values()))))
    return [step(session, feed) for feed in feeds]


def step(session: Session, feed: Feed) -> Step:
    """Run one step and copy what it delivers."""
    delivered: list[tuple[str, torch.Tensor]] = []
    outputs = session.step(feed, lambda site, tensor: delivered.append((site, tensor.detach().cpu().clone())))
    return Step({name: tensor.detach().cpu().clone() for name, tensor in outputs.items()}, delivered)


def tokens(rows: int = 2, length: int = 5, steps: int = 3, *, seed: int = 0, padding: Sequence[int] = ()) -> list[Feed]:
    """Return the feeds of a prefill of ``length`` tokens and ``steps`` single ones, all int64.

    ``padding`` gives for each row how many tokens on the left are padding.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 250, (rows, length + steps), generator=generator)
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ends = [(0, length), *((length + i, length + i + 1) for i in range(steps))]
    return [
        {"input_ids": ids[:, a:b], "attention_mask": mask[:, :b], "position_ids": positions[:, a:b]} for a, b in ends
    ]


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return rel-L2, infinite where shapes differ."""
    try:
        return measure(actual, expected, threads=1).rel_l2
    except ShapeMismatch:
        return float("inf")


def same(first: Sequence[Step], second: Sequence[Step]) -> bool:
    """Tell whether two runs have the same bits."""
    return len(first) == len(second) and all(
        same_tensors(a.outputs, b.outputs) and same_tensors(a.taps, b.taps) for a, b in zip(first, second, strict=True)
    )


def same_tensors(first: Feed, second: Feed) -> bool:
    """Tell whether two sets of tensors have the same names and bits."""
    return first.keys() == second.keys() and all(
        value.shape == second[name].shape and torch.equal(value, second[name]) for name, value in first.items()
    )

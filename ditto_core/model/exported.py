"""An export on disk: what it takes, what it returns, and what it was made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.errors import UsageError
from ditto_core.model.states import state_of
from ditto_core.model.wrappers import BATCH, LENGTH, TOTAL
from ditto_core.sites import Provenance, Tap, final_site
from ditto_core.system.files import parse_json

if TYPE_CHECKING:
    import torch

ONNX_FILE = "model.onnx"
PROVENANCE_FILE = "provenance.json"
EXPORT_FILE = "export.json"
FORMAT = 11
"""Of what an export holds, site names included; part of its key."""


@dataclass(frozen=True)
class Export:
    """An export on disk: names of the graph's inputs and outputs, and whether it has a KV cache.

    ``staged``: it is one of the two kinds of steps of a model, whose states are plain inputs and outputs.
    """

    directory: Path
    decoder: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    vocab_size: int = 0
    shapes: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    """The sizes of each input's dimensions, or the names of those that are dynamic."""
    staged: bool = False
    frozen: Sequence[tuple[str, int, str]] = ()
    """The dimensions (input, index, name) that were to be dynamic and for which the model's code leaves one size."""
    held: Mapping[str, Any] = field(default_factory=dict)
    """The inputs whose numbers the model's code reads while it is traced, and those that they have to have."""

    @property
    def finals(self) -> tuple[str, ...]:
        """The model's own outputs, without the KV cache."""
        carries = self.decoder or self.staged
        return tuple(name for name in self.outputs if not (carries and state_of(name)))

    @property
    def returned(self) -> tuple[str, ...]:
        """The outputs that a session returns: of a staged model also what it carries."""
        return self.outputs if self.staged else self.finals

    def behind(self, taps: Sequence[Tap]) -> tuple[Tap, ...]:
        """Return a tap for each final output that is none of ``taps``: what is computed behind the last module."""
        known = {tap.value for tap in taps}
        sites = {tap.site: tap for tap in taps}
        wanted = [name for name in self.finals if name not in known]
        if not wanted or not self.onnx_path.exists():
            tokens = {"logits": (BATCH, LENGTH, "")} if self.decoder else {}
            return tuple(Tap(final_site(name, sites), name, axes=tokens.get(name, ())) for name in wanted)
        from ditto_core.graphs.outputs import axes_by_value

        axes = axes_by_value(self.onnx_path)
        return tuple(Tap(final_site(name, sites), name, axes=head_axis(axes[name])) for name in wanted)

    @property
    def onnx_path(self) -> Path:
        """The ONNX file; its weights lie beside it."""
        return self.directory / ONNX_FILE

    def graph_path(self) -> Path:
        """Return the ONNX file. Raises :class:`UsageError` when the engine is built from none."""
        if not self.onnx_path.exists():
            raise UsageError("operators cannot be told apart: this backend builds its engines from no ONNX graph")
        return self.onnx_path

    @property
    def provenance(self) -> Provenance:
        """Every site of the model."""
        return Provenance.load(self.directory / PROVENANCE_FILE)

    def check(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Raise :class:`UsageError` for an input whose sizes, or numbers, this export cannot take."""
        for name, tensor in inputs.items():
            if name in self.held and tensor.tolist() != self.held[name]:
                raise UsageError(
                    f"input {name!r} is held at {self.held[name]}, whose numbers the model's code reads: "
                    "give an example with others"
                )
            shape = self.shapes.get(name)
            if shape is None:
                continue
            if len(shape) != tensor.ndim:
                raise UsageError(f"input {name!r} has {tensor.ndim} dimensions, expected {len(shape)}")
            for index, (size, expected) in enumerate(zip(tensor.shape, shape, strict=True)):
                if isinstance(expected, int) and size != expected:
                    raise UsageError(
                        f"input {name!r} has size {size} in dimension {index}, {self._fixed(name, index, expected)}"
                    )

    def _fixed(self, name: str, index: int, size: int) -> str:
        """Return why a dimension has one size, and the way out."""
        for frozen, place, dimension in self.frozen:
            if (frozen, place) == (name, index):
                return f"its {dimension} is frozen to {size}: {why_frozen(size)}"
        return f"the engine was built for {size}; to let it vary give dynamic={{{name!r}: {{{index}: 'size'}}}}"

    @classmethod
    def load(cls, directory: Path) -> Export:
        """Open what :func:`export` wrote."""
        data = parse_json((directory / EXPORT_FILE).read_text())
        lists = {name: tuple(data[name]) for name in ("inputs", "outputs")}
        lists["frozen"] = tuple(map(tuple, data["frozen"]))
        return cls(directory, **{**data, **lists})

    def save(self) -> None:
        """Write the description beside the ONNX file."""
        data = {k: v for k, v in asdict(self).items() if k != "directory"}
        (self.directory / EXPORT_FILE).write_text(json.dumps(data, indent=1) + "\n")


def why_frozen(size: int) -> str:
    """Return why an export has one size only, and what to do."""
    if size == 1:
        return "give an example of at least 2"
    return "the model's code leaves no other size, as int(x.shape[0]) does, or a constant of that size"


def head_axis(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Name the head dimension of a [batch, head, length|total, …] tensor."""
    if len(axes) == 4 and axes[0] == BATCH and axes[1] == "" and axes[2] in (LENGTH, TOTAL):
        return (BATCH, "head", *axes[2:])
    if len(axes) == 4 and axes[:2] == (BATCH, LENGTH):
        return (BATCH, LENGTH, "head", axes[3])
    return axes

"""What backends that build from the exported program share: its flat signature on disk, and a session over it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ditto_core.errors import BuildError, RunError, first_line
from ditto_core.graphs.outputs import GIVEN
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap

if TYPE_CHECKING:
    from ditto_core.model.program import Program

SIGNATURE_FILE = "signature.json"

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Runs the engine on its flat inputs and returns its flat outputs."""


@dataclass(frozen=True)
class Signature:
    """The flat inputs and outputs of an engine by name, in order. ``finals`` are the outputs that are the model's own.

    ``sizes`` and ``dtypes`` (torch's names) are those of the inputs; a size that varies is None. ``empty`` has the
    shape of each input ``past_key_values.{i}.…`` for one row before the first step.
    """

    inputs: list[str]
    sizes: list[list[int | None]]
    dtypes: list[str]
    outputs: list[str]
    finals: list[str]
    empty: dict[str, list[int]]

    @classmethod
    def of(cls, program: Program, finals: Sequence[str]) -> Signature:
        """Read a traced program."""
        values = program.given
        pasts = program.inputs[len(program.inputs) - len(program.empty_past) :]
        return cls(
            list(program.inputs),
            [sizes_of(value) for value in values],
            [dtype_of(value) for value in values],
            list(program.outputs),
            list(finals),
            {name: list(past.shape) for name, past in zip(pasts, program.empty_past, strict=True)},
        )

    def save(self, directory: Path) -> None:
        """Write it beside the engine."""
        (directory / SIGNATURE_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")

    def given(self, values: Sequence[str], tensors: Sequence[torch.Tensor]) -> Signature:
        """Return the signature of the engine that also takes some of its outputs as inputs, called ``VALUE::given``."""
        inputs = [*self.inputs, *(f"{value}{GIVEN}" for value in values)]
        sizes, dtypes = [*self.sizes, *map(sizes_of, tensors)], [*self.dtypes, *map(dtype_of, tensors)]
        return replace(self, inputs=inputs, sizes=sizes, dtypes=dtypes)

    @classmethod
    def load(cls, directory: Path) -> Signature:
        """Read it. Raises :class:`BuildError` when the file is damaged."""
        path = directory / SIGNATURE_FILE
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise BuildError(f"the engine is damaged: {path.name} cannot be read ({first_line(error)})") from error


def sizes_of(tensor: torch.Tensor) -> list[int | None]:
    """Return the sizes of a traced tensor, None for each that varies."""
    from torch.fx.experimental.symbolic_shapes import is_concrete_int

    return [int(size) if is_concrete_int(size) else None for size in tensor.shape]


def dtype_of(tensor: torch.Tensor) -> str:
    """Return torch's name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


class ProgramSession:
    """Steps an engine of flat inputs and outputs, and keeps the KV cache of the sequence."""

    def __init__(self, run: Run, signature: Signature, taps: tuple[Tap, ...], info: SessionInfo) -> None:
        self._run: Run | None = run
        self._signature = signature
        self.taps = taps
        self.info = info
        self._past: dict[str, torch.Tensor] = {}

    @property
    def past(self) -> Mapping[str, torch.Tensor]:
        """The KV cache that the next step reads, by the names of its inputs."""
        return self._past

    def start(self, batch: int) -> None:
        """Give every layer an empty past of ``batch`` rows."""
        dtypes = dict(zip(self._signature.inputs, self._signature.dtypes, strict=True))
        self._past = {
            name: torch.zeros(batch, *shape[1:], dtype=getattr(torch, dtypes[name]))
            for name, shape in self._signature.empty.items()
        }

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass; see :class:`~ditto_core.session.Session`."""
        assert self._run is not None, "the session is closed"
        feed = self._feed({**inputs, **self._past})
        try:
            results = self._run(feed)
        except Exception as error:
            raise RunError(f"{self.info.backend} failed: {first_line(error)}") from error
        values = dict(zip(self._signature.outputs, results, strict=True))
        self._past = {name: values[name.replace("past_key_values", "present")] for name in self._past}
        for tap in self.taps:
            sink(tap.site, values[tap.value])
        return {name: values[name] for name in self._signature.finals}

    def _feed(self, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the flat inputs. Raises :class:`RunError` for a missing one and one of another shape."""
        feed = []
        signature = self._signature
        for name, sizes, dtype in zip(signature.inputs, signature.sizes, signature.dtypes, strict=True):
            if name not in given:
                raise RunError(f"{self.info.backend} failed: input {name!r} is not given")
            tensor = given[name]
            if tensor.ndim != len(sizes):
                raise RunError(
                    f"{self.info.backend} failed: input {name!r} is {list(tensor.shape)}, expected "
                    f"{len(sizes)} dimensions"
                )
            for index, (size, expected) in enumerate(zip(tensor.shape, sizes, strict=True)):
                if expected not in (None, size):
                    raise RunError(
                        f"{self.info.backend} failed: input {name!r} has size {size} in dimension {index}, the program "
                        f"was traced for {expected} alone: give an example of that size"
                    )
            feed.append(tensor.to(getattr(torch, dtype)).contiguous())
        return feed

    def close(self) -> None:
        """Release the engine."""
        self._past = {}
        self._run = None

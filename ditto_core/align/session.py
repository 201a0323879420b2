"""A file of any origin as a session: fed by its own inputs, its cache carried along, its values delivered as sites."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ditto_core.align.alignment import Alignment
from ditto_core.align.file import inference_session
from ditto_core.align.parts import run
from ditto_core.backends.onnxruntime import LEVELS, load_library
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec


class FileSession:
    """Implements :class:`~ditto_core.session.Session` over an ONNX file and its map.

    ``taps`` are those sites of the map that are delivered. Raises :class:`~ditto_core.errors.BuildError` when ONNX
    Runtime refuses the file, and :class:`~ditto_core.errors.RunError` when a step fails.
    """

    def __init__(self, spec: EngineSpec, path: Path, alignment: Alignment, taps: tuple[Tap, ...]) -> None:
        level, threads = spec.option("level", "all"), spec.threads()
        self._session = inference_session(path, LEVELS[level], threads)
        self._map = alignment
        self.taps = taps
        places = (
            *alignment.finals.values(),
            *(alignment.sites[name] for tap in taps if (name := mapped(tap, alignment))),
        )
        slots = (slot.output for slot in alignment.binding.cache)
        self._wanted = list(dict.fromkeys((*(place.value for place in places), *slots)))
        self._cache: dict[str, Any] = {}
        self._past = 0
        facts = {"onnxruntime": load_library().__version__, "file": alignment.file, "level": level}
        dtype = alignment.quantization or alignment.dtype
        self.info = SessionInfo(f"{alignment.file} {dtype}", "onnxruntime", dtype, "cpu", spec.model.label, facts)

    @property
    def past(self) -> dict[str, torch.Tensor]:
        """The cache that the next step reads, by the names of the file's inputs."""
        return {name: torch.from_numpy(array) for name, array in self._cache.items()}

    def start(self, batch: int) -> None:
        """Begin with an empty cache."""
        self._cache = self._map.binding.empty(batch)
        self._past = 0

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass; see :class:`~ditto_core.session.Session`."""
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in inputs.items()}
        first = next(iter(arrays.values()))
        feed = {**self._map.binding.feed(arrays, self._past), **self._cache}
        values = dict(zip(self._wanted, run(self._session, self._wanted, feed), strict=True))
        self._cache = {slot.input: values[slot.output] for slot in self._map.binding.cache}
        self._past += first.shape[1] if first.ndim > 1 else 0
        batch = first.shape[0] if first.ndim else 1
        for tap in self.taps:
            place = self._map.sites[mapped(tap, self._map)]
            sink(tap.site, place.take(torch.from_numpy(values[place.value]), batch))
        return {
            name: place.take(torch.from_numpy(values[place.value]), batch) for name, place in self._map.finals.items()
        }

    def close(self) -> None:
        """Release the engine."""
        self._cache = {}
        del self._session


def mapped(tap: Tap, alignment: Alignment) -> str:
    """Return the name, or alias, under which the map has a tap; an empty string where it has none."""
    return next((name for name in (tap.site, *tap.aliases) if name in alignment.sites), "")

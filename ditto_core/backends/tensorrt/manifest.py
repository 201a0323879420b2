"""The manifest beside an engine file: its inputs, outputs, profiles, taps and how it was built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditto_core.backends.base import EngineTensor
from ditto_core.errors import RunError
from ditto_core.profile import ShapeProfile
from ditto_core.sites import Tap

ENGINE_FILE = "engine.trt"
MANIFEST_FILE = "tensorrt.json"


@dataclass(frozen=True)
class EngineManifest:
    """Everything a session needs to know of an engine that the engine file does not say without a GPU.

    ``outputs`` are the model's own; ``profiles`` map dimension names to (min, opt, max); ``refused`` maps a site to
    the reason why it could not be tapped.
    """

    library: str
    version: str
    dtype: str
    decoder: bool
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    profiles: tuple[Mapping[str, tuple[int, int, int]], ...]
    taps: tuple[Tap, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape_profiles(self) -> tuple[ShapeProfile, ...]:
        """The optimization profiles, in the engine's order."""
        return tuple(ShapeProfile.parse(profile, profile) for profile in self.profiles)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        tensors = {side: [t.__dict__ for t in getattr(self, side)] for side in ("inputs", "outputs")}
        return {**self.__dict__, **tensors, "taps": [tap.to_json() for tap in self.taps]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EngineManifest:
        """Inverse of :meth:`to_json`."""
        tensors = {side: tuple(map(_tensor, data[side])) for side in ("inputs", "outputs")}
        taps = tuple(Tap.from_json(tap) for tap in data["taps"])
        return cls(**{**data, **tensors, "taps": taps, "profiles": tuple(data["profiles"])})

    def save(self, directory: Path) -> None:
        """Write the manifest beside the engine."""
        (directory / MANIFEST_FILE).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, directory: Path) -> EngineManifest:
        """Read the manifest of the engine in a directory. Raises :class:`RunError` when there is none."""
        try:
            return cls.from_json(json.loads((directory / MANIFEST_FILE).read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{directory} holds no TensorRT engine ({MANIFEST_FILE}: {error})") from error


def _tensor(data: Mapping[str, Any]) -> EngineTensor:
    return EngineTensor(data["name"], data["dtype"], tuple(data["shape"]))

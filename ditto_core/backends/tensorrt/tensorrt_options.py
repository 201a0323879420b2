"""The backend's own settings, as they stand in ``EngineSpec.options``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ditto_core.errors import UsageError, nearest
from ditto_core.profile import Range, ShapeProfile
from ditto_core.spec import EngineSpec
from ditto_core.system.sizes import parse_size

TAP_MODES = ("outputs", "unfused", "none")
PROFILE_SETS = ("one", "split")
MOST_WORKSPACE = 2**50
"""Bytes; TensorRT takes no more than 64 bits."""


@dataclass(frozen=True)
class TensorrtOptions:
    """How to build and run.

    ``taps``: ``outputs`` marks each tap as an output (it breaks fusions); ``unfused`` lets TensorRT hand over what it
    did not fuse (it changes nothing); ``none``. ``tf32`` allows TF32 in float32 engines. ``profiles``: ``one``,
    ``split`` (one for single tokens, one for everything), or a list of profiles (as JSON where options are text).
    ``portable``: run on later GPUs too (TensorRT-RTX engines always do). ``workspace``: limit on scratch memory
    (``4GB``). ``optimization_level``: 0 to 5. ``probe``: measure the matrix kernels when an engine is opened.
    ``isolate``: build in a child process, for at most ``timeout`` seconds.
    """

    taps: str = "outputs"
    tf32: bool = False
    profiles: Any = "one"
    portable: bool = False
    timing_cache: bool = True
    optimization_level: int | None = None
    workspace: str | None = None
    cuda_graphs: bool = False
    probe: bool = True
    isolate: bool = True
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        _one_of("taps", self.taps, TAP_MODES)
        if isinstance(self.profiles, str):
            _one_of("profiles", self.profiles, PROFILE_SETS)
        elif not isinstance(self.profiles, Sequence) or not all(isinstance(each, Mapping) for each in self.profiles):
            raise UsageError(
                f"TensorRT option profiles is {self.profiles!r}, expected one, split or a list of profiles"
            )
        elif not self.profiles:
            raise UsageError("TensorRT option profiles is an empty list, expected one profile at least")
        else:
            self.shape_profiles(ShapeProfile())  # raises for a profile that cannot be
        for name in ("tf32", "portable", "timing_cache", "cuda_graphs", "probe", "isolate"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"TensorRT option {name} is {getattr(self, name)!r}, expected true or false")
        level = self.optimization_level
        if level is not None and (type(level) is not int or level not in range(6)):
            raise UsageError(f"TensorRT option optimization_level is {level!r}, expected 0 to 5")
        if not isinstance(self.timeout, int | float) or isinstance(self.timeout, bool) or not self.timeout > 0:
            raise UsageError(f"TensorRT option timeout is {self.timeout!r}, expected seconds, more than 0")
        if self.workspace is not None and parse_size(str(self.workspace)) > MOST_WORKSPACE:
            raise UsageError(f"TensorRT option workspace is {self.workspace!r}, more than any GPU has")

    @classmethod
    def of(cls, spec: EngineSpec) -> TensorrtOptions:
        """Read the options of a spec. Raises :class:`UsageError` for an unknown name or value."""
        return cls.parse(dict(spec.options))

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> TensorrtOptions:
        """Read options whose values may be text. Raises :class:`UsageError` for an unknown name or value."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise UsageError(f"tensorrt has no option {name!r}{nearest(name, known)} (known: {', '.join(known)})")
        return cls(**{name: _plain(value) for name, value in given.items()})

    def shape_profiles(self, profile: ShapeProfile) -> list[ShapeProfile]:
        """Return the profiles to build, the narrowest first; the first that fits a step serves it."""
        if self.profiles == "one":
            return [profile]
        if self.profiles == "split":
            return [replace(profile, length=Range(1, 1, 1)), profile]
        return [ShapeProfile.parse(each, dict(profile.more)) for each in self.profiles]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


def ranges(profile: ShapeProfile) -> dict[str, tuple[int, int, int]]:
    """Return (min, opt, max) of each dimension that a profile names."""
    return {name: (r.min, r.opt, r.max) for name, r in profile.ranges.items()}


def dimension_sizes(profile: ShapeProfile) -> Mapping[str, tuple[int, int, int]]:
    """Return (min, opt, max) of each dimension of an exported graph: also ``total``, which is past + length."""
    sizes = ranges(profile)
    low, opt, high = (p + n for p, n in zip(sizes["past"], sizes["length"], strict=True))
    return {**sizes, "total": (low, opt, high)}


def _plain(value: Any) -> Any:
    """Read what a command line gives as text: ``true``, ``false``, a number, a list of profiles in JSON."""
    if isinstance(value, str) and (value in ("true", "false") or value[:1] in "[0123456789"):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"TensorRT option {name} is {value!r}, expected {', '.join(known)}{nearest(value, known)}")

"""`ditto debug diff-tactics`: what only good or only bad builds contain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditto_core.debug.builds import TACTICS_SUFFIX
from ditto_core.errors import UsageError
from ditto_core.system.files import parse_json, read_text

KINDS = ("timings", "layers")
NO_TACTICS: Mapping[str, str] = {
    "onnxruntime": "ONNX Runtime has no build-time tactics; compared are the operators of the optimized models",
    "TensorRT-RTX": "TensorRT-RTX has no build-time tactics, it compiles when an engine runs; compared are layers",
}
"""Backends that choose no tactics when they build, and what is compared there."""


@dataclass(frozen=True)
class Choice:
    """One tactic of one layer, or of one timing-cache key: in how many good and bad builds it was chosen."""

    kind: str
    key: str
    tactic: str
    good: int
    bad: int
    instead: tuple[str, ...]

    def __str__(self) -> str:
        others = f", good builds use {' or '.join(self.instead)}" if self.instead else ", absent from good builds"
        return f"{self.key}: {self.tactic} in {self.bad} bad and {self.good} good{others}"


@dataclass(frozen=True)
class TacticsDifference:
    """What only bad builds have, the most frequent first; ``certain`` ones are in all of them."""

    good: int
    bad: int
    suspects: tuple[Choice, ...]
    note: str = ""

    @property
    def certain(self) -> tuple[Choice, ...]:
        """The choices that tell good from bad exactly."""
        return tuple(choice for choice in self.suspects if choice.bad == self.bad)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {**self.__dict__, "suspects": [choice.__dict__ for choice in self.suspects]}


def diff_tactics(good: Path, bad: Path) -> TacticsDifference:
    """Compare two folders of tactics: those that `build` wrote, or JSON of TensorRT's engine inspector.

    A note says where they are of several searches: what differs may be the models'. Raises :class:`UsageError` when
    either folder holds none, or they hold those of several libraries.
    """
    sides = {"good": read_folder(good), "bad": read_folder(bad)}
    libraries = {str(item.get("library", "")) for side in sides.values() for item in side}
    if len(libraries) > 1:
        raise UsageError(f"{good} and {bad} hold builds of {' and '.join(sorted(libraries))}, expected one of them")
    notes = [NO_TACTICS[name] for name in sorted(libraries) if name in NO_TACTICS]
    if (searches := len({item.get("search") for side in sides.values() for item in side})) > 1:
        notes.append(f"builds of {searches} searches: another model, option or check may be the difference")
    found = [choice for kind in KINDS for choice in only_bad(kind, sides["good"], sides["bad"])]
    found.sort(key=lambda choice: (-choice.bad, choice.kind, choice.key))
    return TacticsDifference(len(sides["good"]), len(sides["bad"]), tuple(found), "; ".join(notes))


def only_bad(kind: str, good: Iterable[Mapping[str, Any]], bad: Iterable[Mapping[str, Any]]) -> list[Choice]:
    """Return the choices of one kind that no good build made."""
    good_counts = Counter(item for build in good for item in build[kind].items())
    bad_counts = Counter(item for build in bad for item in build[kind].items())
    others: dict[str, list[str]] = {}
    for key, tactic in sorted(good_counts):
        others.setdefault(key, []).append(tactic)
    return [
        Choice(kind, key, tactic, 0, count, tuple(others.get(key, ())))
        for (key, tactic), count in bad_counts.items()
        if (key, tactic) not in good_counts
    ]


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """Read every file of tactics in a folder."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder, expected the good or bad folder of `ditto debug build`")
    builds = [data for path in sorted(folder.glob("*.json")) if (data := read_build(path)) is not None]
    if not builds:
        raise UsageError(f"{folder} holds no tactics, expected files *{TACTICS_SUFFIX} or JSON of the engine inspector")
    return builds


def read_build(path: Path) -> dict[str, Any] | None:
    """Read our own file of tactics, or the inspector's ``{"Layers": [...]}``; None for other JSON."""
    try:
        data = parse_json(read_text(path), last=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if isinstance(data, dict) and set(KINDS) <= set(data):
        return data
    if isinstance(data, dict) and isinstance(data.get("Layers"), list):
        try:
            return {"library": "TensorRT", "timings": {}, "layers": dict(map(inspected, data["Layers"]))}
        except AttributeError as error:
            raise UsageError(f"{path} has a layer that is neither a name nor a table") from error
    return None


def inspected(layer: Any) -> tuple[str, str]:
    """Return name and kernel of one of the inspector's layers, which is a bare name without detailed verbosity."""
    if isinstance(layer, str):
        return layer, ""
    tactic = layer.get("TacticName") or layer.get("TacticValue") or layer.get("LayerType", "")
    return str(layer.get("Name", "")), str(tactic)

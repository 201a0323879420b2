"""The map from a model's sites to a file's values: found by value, saved for review, loaded without aligning again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ditto_core.align.binding import Binding
from ditto_core.align.layout import Layout
from ditto_core.errors import UsageError
from ditto_core.system.atomic import write_atomic
from ditto_core.system.files import parse_json, read_text

FORMAT = 1


@dataclass(frozen=True)
class Place:
    """Where a file holds a site: a value, or ``columns`` of its last dimension, in a ``layout``.

    ``error``: relative L2 on the worst probe. ``ratio``: the error of the next best candidate by this one's.
    """

    site: str
    value: str
    layout: Layout
    columns: tuple[int, int] | None = None
    error: float = 0.0
    ratio: float = 0.0

    def take(self, tensor: Any, batch: int) -> Any:
        """Return the site's tensor out of the value's, an array or a tensor."""
        part = tensor if self.columns is None else tensor[..., slice(*self.columns)]
        return self.layout.apply(part, batch)

    def __str__(self) -> str:
        columns = "" if self.columns is None else f"[..., {self.columns[0]}:{self.columns[1]}]"
        return f"{self.value}{columns}" + ("" if self.layout.plain else f" ({self.layout})")

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        columns = None if self.columns is None else list(self.columns)
        numbers = {"error": float(f"{self.error:.3g}"), "runner_up": float(f"{self.ratio:.3g}")}
        return {"value": self.value, "columns": columns, "layout": str(self.layout), **numbers}

    @classmethod
    def from_json(cls, site: str, data: Mapping[str, Any]) -> Place:
        """Inverse of :meth:`to_json`."""
        columns = data.get("columns")
        place = cls(site, str(data["value"]), Layout.parse(data["layout"]), tuple(columns) if columns else None)
        return replace(place, error=float(data.get("error", 0.0)), ratio=float(data.get("runner_up", 0.0)))


@dataclass(frozen=True)
class Alignment:
    """What was found about a file.

    ``finals`` are the model's own outputs, ``sites`` all others that the file holds. ``hidden`` are computed inside of
    fused operators and vouched for by what follows; ``absent`` are neither there nor vouched for, ``ambiguous`` could
    be several values, ``wrong`` have a quantized weight that is no rounding of the model's: name -> reason each.
    ``digest`` is the SHA-256 (hex) of the file and its weights by name.
    """

    file: str
    digest: Mapping[str, str]
    dtype: str
    quantization: str
    tolerance: float
    binding: Binding
    finals: Mapping[str, Place]
    sites: Mapping[str, Place] = field(default_factory=dict)
    hidden: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    ambiguous: Mapping[str, str] = field(default_factory=dict)
    wrong: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def agreeing(self) -> list[str]:
        """The sites whose values are within the tolerance."""
        return [site for site, place in self.sites.items() if place.error <= self.tolerance]

    @property
    def off(self) -> dict[str, Place]:
        """The sites, and final outputs, whose values are in the file and wrong."""
        places = {**self.sites, **self.finals}
        return {site: place for site, place in places.items() if not place.error <= self.tolerance}

    @property
    def refused(self) -> dict[str, str]:
        """The sites that cannot be compared, and why."""
        return {**self.hidden, **self.absent, **self.ambiguous}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        names = ("file", "dtype", "quantization", "tolerance")
        return {
            "format": FORMAT,
            **{name: getattr(self, name) for name in names},
            "digest": dict(self.digest),
            "inputs": self.binding.to_json(),
            "outputs": {name: place.to_json() for name, place in self.finals.items()},
            "sites": {name: place.to_json() for name, place in self.sites.items()},
            **{name: dict(getattr(self, name)) for name in ("hidden", "absent", "ambiguous", "wrong")},
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Alignment:
        """Inverse of :meth:`to_json`. Raises :class:`UsageError` for what is no map."""
        try:
            places = {
                key: {name: Place.from_json(name, place) for name, place in data[key].items()}
                for key in ("outputs", "sites")
            }
            plain = {name: data[name] for name in ("file", "digest", "dtype", "quantization", "tolerance")}
            reasons = {name: data[name] for name in ("hidden", "absent", "ambiguous")} | {
                "wrong": data.get("wrong", {})
            }
            binding = Binding.from_json(data["inputs"])
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UsageError(
                f"the map of an engine file lacks {error}, expected one that `ditto align` wrote"
            ) from error
        notes = tuple(data.get("notes", ()))
        return cls(**plain, **reasons, binding=binding, finals=places["outputs"], sites=places["sites"], notes=notes)

    def save(self, path: Path) -> None:
        """Write the map, one site a line."""
        data = self.to_json()
        blocks = [f" {json.dumps(key)}: {block(value)}" for key, value in data.items()]
        write_atomic(path, "{\n" + ",\n".join(blocks) + "\n}\n")

    @classmethod
    def load(cls, path: Path) -> Alignment:
        """Inverse of :meth:`save`. Raises :class:`UsageError` when there is no such map."""
        try:
            data = parse_json(read_text(path))
        except (OSError, ValueError) as error:
            raise UsageError(f"map {str(path)!r} cannot be read: {error}") from error
        return cls.from_json(data)

    def reused(self, digest: Mapping[str, str], known: Iterable[str]) -> Alignment:
        """Return the map for a file of other content. Raises :class:`UsageError` when it lacks a value of the map."""
        values = set(known)
        for place in (*self.sites.values(), *self.finals.values()):
            if place.value.partition("::")[0] not in values:
                raise UsageError(
                    f"the file has no value {place.value!r}, which the map has for {place.site}: align again"
                )
        if dict(digest) == dict(self.digest):
            return self
        return replace(
            self, digest=digest, wrong={}, notes=(*self.notes, "the map was made from another version of the file")
        )


def block(value: Any) -> str:
    """Return a value as JSON, a table's entries one a line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n }"


def summary(found: Alignment, label: str, most: int = 8) -> str:
    """Return what was found as text: counts first, then what needs a look."""
    total = len(found.sites) + len(found.refused)
    lines = [
        f"{found.file} ({found.quantization or found.dtype}) against {label}: "
        f"{len(found.sites)} of {total} sites matched, "
        f"{len(found.agreeing)} within {found.tolerance:.0e}, {len(found.hidden)} hidden by fusion, "
        f"{len(found.absent)} not in the file, {len(found.ambiguous)} ambiguous"
    ]
    off = sorted(found.off.values(), key=lambda place: place.site in found.finals)
    lines += listed("off", [f"{p.site}: rel_l2 {p.error:.1e} in {p}" for p in off], most)
    for name in ("absent", "ambiguous"):
        lines += listed(name, [f"{site}: {why}" for site, why in getattr(found, name).items()], most)
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def listed(title: str, rows: Sequence[str], most: int) -> list[str]:
    """Return the first rows under a title."""
    if not rows:
        return []
    more = [f"  … and {len(rows) - most} more"] if len(rows) > most else []
    return [f"{title}:", *(f"  {row}" for row in rows[:most]), *more]

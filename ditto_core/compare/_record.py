"""The record of a comparison: :class:`Metrics`, plain numbers with a strict JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from ditto_core.errors import shown

Index = tuple[int, ...]
Number = float | int | bool
NONFINITE = ("nan", "inf", "-inf")
"""Numbers that strict JSON lacks, as :func:`encode` writes them."""


class Columns(Protocol):
    """The fields of many records: a list of each, by name."""

    def __getitem__(self, name: str, /) -> Sequence[Any]:
        """Return one field of all records."""


def read_field(record: Metrics, name: str) -> Any:
    """Read a field of a record from its column and keep it. Raises ``AttributeError`` for any other name."""
    known = vars(record)
    if name not in record.__dataclass_fields__ or "_columns" not in known:
        raise AttributeError(f"Metrics has no {name!r}")
    known[name] = value = known["_columns"][name][known["_place"]]
    return value


@dataclass(frozen=True)
class Metrics:
    """What :func:`measure` found. ``actual`` is the engine's tensor a, ``expected`` the reference's b, d = a - b.

    Positions that are not valid count nowhere. NaN and Inf are counted by position and left out of every sum, mean and
    maximum. Indices are tuples, None where there is nothing to point at.

    - ``count``: elements compared. ``rel_l2``: ||d|| / ||b||, 0 for 0/0, inf for x/0, inf when a NaN or Inf stands
      where the other side has something else (a NaN equals a NaN only with ``equal_nan``).
    - ``max_abs``, ``max_abs_index``, ``max_abs_actual``, ``max_abs_expected``; ``mean_abs``; ``mse``, ``rms`` of d.
    - ``snr_db``: -20 log10 rel_l2. ``cosine``: <a,b> / (||a|| ||b||), 1 for two zero tensors, 0 for one.
    - ``max_rel``, ``mean_rel``: |d| / |b| over the elements that are not 0 on both sides; inf where only b is 0.
    - ``max_ulp``: largest |d| in units in the last place of the coarser dtype at b (1 for integers).
    - ``mismatched``: elements with |d| > atol + rtol |b|, and unequal NaN and Inf; ``mismatch_ratio`` = its share;
      ``first_mismatch``; ``worst_mismatch``: the one furthest beyond what is allowed.
    - ``p50``, ``p90``, ``p99``, ``p999``: quantiles of |d| over the finite elements, from a one-pass histogram of
      |d| rounded to bfloat16: within 2^-8 (0.4 %) of the element at rank ceil(q n); 0 is exact, ``max_abs`` the limit.
      On CUDA from the octaves below, linear inside one.
    - ``histogram``: ``(lower edge, count)`` of the non-empty octaves of |d|, ``[edge, 2 edge)``; edge 0 holds the zeros
      (rounded to bfloat16 as above).
    - ``nan_*``, ``inf_*``: how many on each side; ``nan_mismatch``: NaN on one side only; ``inf_mismatch``: Inf against
      anything but the same Inf or a NaN; ``nonfinite_mismatch``: places of a NaN or Inf whose two sides are not equal,
      NaN on both sides included unless ``equal_nan``; ``first_nonfinite``: index and ``actual``, ``expected`` or
      ``both``.
    - ``max_actual``, ``max_expected``: largest finite |x|; ``headroom``: max_actual / the dtype's largest number.
    - ``scale``: least-squares factor <a,b> / <b,b> that maps expected onto actual; ``scale_residual``: rel_l2 that
      is left after it (not resolved below about 1e-8).
    - ``psnr_db``: 20 log10(max_expected / rms).
    - ``requested``: ``(name, value)`` of what only a rule asked for: percentiles, a function of the user's.
    - ``by_row``, ``by_position``, ``by_head``: rel_l2 along the axes ``batch``, ``length`` (else ``total``, else
      ``past``) and ``head``; empty where there is no such axis.
    """

    count: int
    rel_l2: float
    max_abs: float
    max_abs_index: Index | None
    max_abs_actual: Number | None
    max_abs_expected: Number | None
    mean_abs: float
    rms: float
    mse: float
    snr_db: float
    cosine: float
    max_rel: float
    mean_rel: float
    max_ulp: float
    mismatched: int
    mismatch_ratio: float
    first_mismatch: Index | None
    worst_mismatch: Index | None
    rtol: float
    atol: float
    p50: float
    p90: float
    p99: float
    p999: float
    histogram: tuple[tuple[float, int], ...]
    nan_actual: int
    nan_expected: int
    nan_mismatch: int
    inf_actual: int
    inf_expected: int
    inf_mismatch: int
    first_nonfinite: tuple[Index, str] | None
    all_zero_actual: bool
    all_zero_expected: bool
    max_actual: float
    max_expected: float
    headroom: float
    scale: float
    scale_residual: float
    nonfinite_mismatch: int = field(default_factory=int)  # a plain default would hide the column
    by_row: tuple[float, ...] = field(default_factory=tuple)
    by_position: tuple[float, ...] = field(default_factory=tuple)
    by_head: tuple[float, ...] = field(default_factory=tuple)
    requested: tuple[tuple[str, float], ...] = field(default_factory=tuple)

    @classmethod
    def of_columns(cls, columns: Columns, place: int) -> Metrics:
        """Return a record of which each field is read from its column when it is first asked for."""
        found = object.__new__(cls)
        vars(found).update(_columns=columns, _place=place)
        return found

    __getattr__ = read_field  # a def would give a type checker every name

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the fields alone."""
        return type(self), tuple(getattr(self, item.name) for item in fields(self))

    @property
    def psnr_db(self) -> float:
        """The peak signal-to-noise ratio; the peak is the reference's largest magnitude. -inf for an unequal NaN."""
        if self.nonfinite_mismatch:
            return -math.inf
        if not self.rms:
            return math.inf
        return 20 * math.log10(self.max_expected / self.rms) if self.max_expected else -math.inf

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON: NaN and Inf become ``"nan"``, ``"inf"``, ``"-inf"``."""
        return {item.name: encode(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Metrics:
        """Inverse of :meth:`to_json`."""
        return cls(**{name: decode(value) for name, value in data.items()})


def encode(value: Any) -> Any:
    """Make a number, or nested tuples of them, fit for strict JSON."""
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def decode(value: Any) -> Any:
    """Inverse of :func:`encode`. Raises ``TypeError`` for what is no number, list or None; lists may hold names."""
    if isinstance(value, list):
        return tuple(item if isinstance(item, str) and item not in NONFINITE else decode(item) for item in value)
    if value in NONFINITE:
        return float(value)
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"{shown(value)} is no number")
    return value

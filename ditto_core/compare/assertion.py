"""``assert_close`` for tensors, arrays, scalars and nestings of them, with a message that says what went wrong."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from ditto_core.compare.findings import find
from ditto_core.compare.metrics import Metrics, ShapeMismatch, measure
from ditto_core.errors import UsageError, nearest

NARROW = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")

HINTS = 2
"""Findings that are shown; a message has at most ten lines."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a pair must hold. Elements count when a tolerance was given or there is no bound on ``rel_l2``.

    Raises :class:`UsageError` for a negative bound, a NaN, and a share above 1.
    """

    rtol: float | None
    atol: float | None
    rel_l2: float | None
    max_mismatch_ratio: float
    equal_nan: bool
    signed_zero: bool

    def __post_init__(self) -> None:
        for name, most in (("rtol", math.inf), ("atol", math.inf), ("rel_l2", math.inf), ("max_mismatch_ratio", 1.0)):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                expected = "a number of 0 or more" if most > 1 else "a share from 0 to 1"
                raise UsageError(f"{name} is {value}, expected {expected}")

    @property
    def elementwise(self) -> bool:
        """Tell whether single elements are judged."""
        return self.rel_l2 is None or self.rtol is not None or self.atol is not None

    def broken(self, found: Metrics) -> list[str]:
        """Return one clause for each bound that does not hold, with the number and the bound."""
        clauses = []
        if self.rel_l2 is not None and not found.rel_l2 <= self.rel_l2:
            clauses.append(f"rel_l2 {found.rel_l2:.2e} > {self.rel_l2:.2e}")
        if self.elementwise and found.mismatch_ratio > self.max_mismatch_ratio:
            clauses.append(share(found, self.max_mismatch_ratio))
        unequal = found.nan_mismatch + found.inf_mismatch
        if unequal and not clauses:
            clauses.append(f"{unequal} NaN or Inf on one side only")
        return clauses


def assert_close(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    rel_l2: float | None = None,
    max_mismatch_ratio: float = 0.0,
    equal_nan: bool = False,
    signed_zero: bool = False,
    name: str = "",
) -> None:
    """Assert that the engine's ``actual`` is close to the reference's ``expected``.

    Both may be torch tensors, numpy arrays, anything with DLPack, numbers, or dicts, lists and tuples of those; None on
    both sides is passed over. An element is close when |a - b| <= atol + rtol |b|; the defaults depend on the coarser
    dtype (:func:`~ditto_core.compare.ulp.tolerance`), and up to ``max_mismatch_ratio`` of the elements may be outside.
    With ``rel_l2`` alone only ||a - b|| / ||b|| is judged; with both, both. A NaN or Inf against a finite number always
    fails, and with ``signed_zero`` a 0.0 against a -0.0. Elements that a masked array as ``expected`` masks do not
    count; one that ``actual`` alone masks fails. Complex numbers are compared by magnitude. Dtypes may differ, shapes
    may not. Raises AssertionError, of at most ten lines, for different values, shapes,
    keys or lengths and when there is nothing to compare; :class:`~ditto_core.errors.UsageError` for other objects and
    for a bound that is negative or NaN.
    """
    __tracebackhide__ = True
    bounds = Bounds(rtol, atol, rel_l2, max_mismatch_ratio, equal_nan, signed_zero)
    pairs = list(walk(name, actual, expected))
    if not pairs:
        raise AssertionError(f"{name or 'comparison'}: nothing to compare, both sides hold no tensor")
    failures = [(path, message) for path, a, b, valid in pairs if (message := judge(path, a, b, valid, bounds))]
    if failures:
        lines = failures[0][1]
        if len(pairs) > 1:
            others = ", ".join(path for path, _ in failures[1:6]) + (" …" if len(failures) > 6 else "")
            lines = [
                *lines[:9],
                f"{len(failures)} of {len(pairs)} tensors differ" + (f"; also {others}" if others else ""),
            ]
        raise AssertionError("\n".join(lines))


def walk(
    path: str, actual: Any, expected: Any
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield ``(path, actual, expected, valid)`` for each leaf; ``valid``: the elements that count, None for all.

    Raises AssertionError where the structures differ.
    """
    __tracebackhide__ = True
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        same_keys(path, actual, expected)
        for key in expected:
            yield from walk(f"{path}[{key!r}]", actual[key], expected[key])
    elif is_list(actual) and is_list(expected):
        if len(actual) != len(expected):
            raise AssertionError(f"{path or 'comparison'}: {len(actual)} items, expected {len(expected)}")
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            yield from walk(f"{path}[{i}]", a, b)
    elif any(isinstance(side, Mapping) or is_list(side) for side in (actual, expected)):
        kinds = type(actual).__name__, type(expected).__name__
        raise AssertionError(f"{path or 'comparison'}: {kinds[0]} against {kinds[1]}, expected the same structure")
    elif actual is None or expected is None:
        if actual is not expected:
            kinds = type(actual).__name__, type(expected).__name__
            raise AssertionError(f"{path or 'comparison'}: {kinds[0]} against {kinds[1]}")
    else:
        yield path, as_tensor(actual), as_tensor(expected), unmasked(path, actual, expected)


def unmasked(path: str, actual: Any, expected: Any) -> torch.Tensor | None:
    """Return where ``expected`` holds a number that counts, None where neither side is a masked array.

    Raises AssertionError when ``actual`` masks what ``expected`` does not, and when nothing is left.
    """
    __tracebackhide__ = True
    if not any(isinstance(side, np.ma.MaskedArray) for side in (actual, expected)):
        return None
    hidden, left = (
        np.ma.getmaskarray(side) if isinstance(side, np.ma.MaskedArray) else np.zeros((), bool)
        for side in (expected, actual)
    )
    if hidden.shape in ((), left.shape) and (alone := int((left & ~hidden).sum())):
        raise AssertionError(f"{path or 'comparison'}: {alone} of {left.size} elements are masked in actual alone")
    if hidden.all():
        raise AssertionError(f"{path or 'comparison'}: nothing to compare, all {hidden.size} elements are masked")
    return torch.from_numpy(~hidden) if hidden.ndim else None


def is_list(value: Any) -> bool:
    """Tell whether a value is a list or tuple of further values."""
    return isinstance(value, list | tuple)


def same_keys(path: str, actual: Mapping[Any, Any], expected: Mapping[Any, Any]) -> None:
    """Raise AssertionError that names the keys which only one side has."""
    __tracebackhide__ = True
    missing = [key for key in expected if key not in actual]
    extra = [key for key in actual if key not in expected]
    if not missing and not extra:
        return
    said = [
        f"{word} {', '.join(map(repr, keys))}" for word, keys in (("missing", missing), ("unexpected", extra)) if keys
    ]
    hint = nearest(str(missing[0]), map(str, extra)) if missing and extra else ""
    raise AssertionError(f"{path or 'comparison'}: keys differ: {'; '.join(said)}{hint}")


def as_tensor(value: Any) -> torch.Tensor:
    """View a tensor, an array, an object with DLPack or a number as a tensor. Raises :class:`UsageError` for others."""
    if isinstance(value, torch.Tensor):
        found = value.detach()
    elif isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
        found = from_array(np.asarray(value))
    elif hasattr(value, "__dlpack__"):
        found = torch.utils.dlpack.from_dlpack(value)
    else:
        raise UsageError(
            f"cannot compare {type(value).__name__}: expected tensors, arrays, numbers, dicts or lists of them"
        )
    if found.is_meta or found.is_nested:
        raise UsageError(
            f"cannot compare a {'meta' if found.is_meta else 'nested'} tensor: expected one with its numbers"
        )
    found = found.dequantize() if found.is_quantized else found
    return found.to_dense() if found.layout != torch.strided else found


def from_array(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """View a numpy array, memory-mapped ones too, as a tensor; one that torch cannot view (reversed, foreign-endian,
    a field of records) is copied. A masked array gives all its numbers.

    The bfloat16 and 8-bit floats that ml_dtypes adds to numpy are viewed as torch's of the same name.
    """
    if array.dtype.name in NARROW:
        bits = np.uint8 if array.itemsize == 1 else np.int16
        return from_array(array.view(bits)).view(getattr(torch, array.dtype.name))
    if array.dtype.kind not in "biufc" or array.dtype in (np.longdouble, np.clongdouble):
        raise UsageError(f"cannot compare an array of {array.dtype}: expected numbers")
    if array.dtype.kind in "iu":  # numpy has two dtypes of 64-bit integers, torch knows one
        array = array.view(f"{array.dtype.byteorder}{array.dtype.kind}{array.itemsize}")
    odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    if odd or not array.dtype.isnative or not array.flags.aligned:
        array = array.astype(array.dtype.newbyteorder("="), copy=True)
    with warnings.catch_warnings():
        # Nothing here writes, so a read-only array is safe to view.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def judge(
    path: str, actual: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor | None, bounds: Bounds
) -> list[str]:
    """Return the lines that say why a pair fails; none when it passes."""
    try:
        found = measure(actual, expected, valid=valid, rtol=bounds.rtol, atol=bounds.atol, equal_nan=bounds.equal_nan)
    except ShapeMismatch as error:
        return [f"{path}: {error}" if path else str(error)]
    broken = bounds.broken(found)
    if bounds.signed_zero and (flipped := flipped_zeros(actual, expected, valid)):
        broken.append(f"{flipped} of {found.count} elements are zeros of the other sign")
    return explain(path, actual, expected, found, broken) if broken else []


def flipped_zeros(actual: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor | None) -> int:
    """Count the elements that are 0.0 on one side and -0.0 on the other; complex numbers have two a piece."""
    if actual.is_complex() or expected.is_complex():
        kind = torch.promote_types(actual.dtype, expected.dtype)
        actual, expected = (torch.view_as_real(side.to(kind).resolve_conj()) for side in (actual, expected))
        valid = None if valid is None else valid.unsqueeze(-1)
    expected = expected.to(actual.device)
    flipped = (actual == 0) & (expected == 0) & (actual.double().signbit() != expected.double().signbit())
    return int((flipped if valid is None else flipped & valid.to(flipped.device)).sum())


def explain(
    path: str, actual: torch.Tensor, expected: torch.Tensor, found: Metrics, broken: Sequence[str]
) -> list[str]:
    """Write the message: verdict, what was compared, greatest and first difference, NaN and Inf, hints."""
    kinds = " against ".join(dict.fromkeys(str(side.dtype).removeprefix("torch.") for side in (actual, expected)))
    lines = [
        f"{path + ': ' if path else ''}{'; '.join(broken)}",
        f"shape {list(actual.shape)}, {kinds}: rel_l2 {found.rel_l2:.2e}, cosine {found.cosine:.6f}, {units(found)}",
    ]
    if found.max_abs_index is not None:
        lines.append(
            f"greatest absolute difference {found.max_abs:.3g} {element(found.max_abs_index, actual, expected, found)}"
        )
    if found.first_mismatch not in (None, found.max_abs_index):
        lines.append(f"first mismatch {element(found.first_mismatch, actual, expected, found)}")
    if found.first_nonfinite is not None:
        lines.append(nonfinite(found))
    return lines + [f"hint: {finding.text}" for finding in find(actual, expected, found)[:HINTS]]


def share(found: Metrics, allowed: float) -> str:
    """Say how many elements are outside the tolerance, and how many may be."""
    limit = f" > {allowed:.2%} allowed" if allowed else ""
    return (
        f"{found.mismatched} of {found.count} elements ({found.mismatch_ratio:.3g} of all{limit}) "
        f"outside rtol {found.rtol:.3g}, atol {found.atol:.3g}"
    )


def units(found: Metrics) -> str:
    """Say the largest error in ULP."""
    return f"max {found.max_ulp:.3g} ULP"


def element(index: tuple[int, ...] | None, actual: torch.Tensor, expected: torch.Tensor, found: Metrics) -> str:
    """Say both values of one element, and what was allowed there."""
    assert index is not None
    a, b = actual[index].item(), expected[index].item()
    return f"at {index}: actual {value(a)}, expected {value(b)}, allowed {found.atol + found.rtol * abs(b):.3g}"


def value(number: float | int | bool) -> str:
    """Write a number: integers whole, for 64 bits have more digits than are shown of a float."""
    return str(number) if isinstance(number, int) else f"{number:.9g}"


def nonfinite(found: Metrics) -> str:
    """Say how many NaN and Inf there are on each side, and where the first is."""
    assert found.first_nonfinite is not None
    index, side = found.first_nonfinite
    where = f"first at {index} in {'both sides' if side == 'both' else side}"
    return (
        f"NaN: actual {found.nan_actual}, expected {found.nan_expected}; "
        f"Inf: actual {found.inf_actual}, expected {found.inf_expected}; {where}"
    )

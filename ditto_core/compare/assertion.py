"""``assert_close`` for tensors, arrays, scalars and nestings of them, with a message that says what went wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ditto_core.compare.findings import find
from ditto_core.compare.metrics import Metrics, ShapeMismatch, measure
from ditto_core.compare.structure import Leaf, walk
from ditto_core.errors import UsageError, check_type, shown
from ditto_core.sites import matches, no_match

LINES, HINTS, OTHERS, PATHS = 10, 2, 3, 5
"""At most: lines of a message, findings, other tensors with their verdict, and further ones by path."""

Bound = float | Mapping[str, float] | None
"""The same for all leaves, or by selector."""


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
    check_dtype: bool = False
    check_stride: bool = False
    signed_zero: bool = False

    def __post_init__(self) -> None:
        for name, most in (("rtol", math.inf), ("atol", math.inf), ("rel_l2", math.inf), ("max_mismatch_ratio", 1.0)):
            value = getattr(self, name)
            number = isinstance(value, int | float)
            if value is not None and not (number and 0 <= value <= most):
                expected = "a number of 0 or more" if most > 1 else "a share from 0 to 1"
                raise UsageError(f"{name} is {shown(value)}, expected {expected}")

    def at(self, leaf: str, tables: Mapping[str, Mapping[str, float]]) -> Bounds:
        """Return the bounds of one leaf; the last selector of a table that matches decides."""
        found = {key: bound for key, table in tables.items() for name, bound in table.items() if matches(name, leaf)}
        return replace(self, **found)  # type: ignore[arg-type]

    @property
    def elementwise(self) -> bool:
        """Tell whether single elements are judged."""
        return self.rel_l2 is None or self.rtol is not None or self.atol is not None

    def unlike(self, leaf: Leaf) -> list[str]:
        """Return one clause for a dtype, and for strides, that the two sides have to share and do not."""
        facts = [("dtype", self.check_dtype, leaf.dtypes), ("stride", self.check_stride, leaf.strides)]
        return [f"{name} {found}, expected {due}" for name, wanted, (found, due) in facts if wanted and found != due]

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
    rtol: Bound = None,
    atol: Bound = None,
    rel_l2: Bound = None,
    max_mismatch_ratio: float = 0.0,
    equal_nan: bool = False,
    check_dtype: bool = False,
    check_stride: bool = False,
    signed_zero: bool = False,
    name: str = "",
) -> None:
    """Assert that the engine's ``actual`` is close to the reference's ``expected``.

    Both may be torch tensors, numpy arrays, anything with DLPack, numbers, or dicts, lists, tuples and dataclasses of
    those, transformers' outputs and caches among them; None on both sides is passed over. Elements that a masked array
    as ``expected`` masks do not count; one that ``actual`` alone masks fails. Complex numbers are compared by
    magnitude. An element is close when |a - b| <= atol + rtol |b|; the defaults depend on the coarser dtype
    (:func:`~ditto_core.compare.ulp.tolerance`); up to ``max_mismatch_ratio`` of the elements may be outside. With
    ``rel_l2`` alone only ||a - b|| / ||b|| is judged; with both, both. Each of the three may be a dict of selectors of
    leaves, ``{"**": 1e-5, "logits": 1e-3, "layers.*.keys": 1e-2}``: the last that matches a leaf decides.

    A NaN or Inf against a finite number always fails, and with ``signed_zero`` a 0.0 against a -0.0. Dtypes and strides
    may differ unless ``check_dtype``, ``check_stride``; shapes may not.

    Raises AssertionError, of at most ten lines, for different values, shapes, masks, keys or lengths and when there is
    nothing to compare; :class:`~ditto_core.errors.UsageError` for other objects, a selector that matches no leaf, and a
    bound that is negative or NaN.
    """
    __tracebackhide__ = True
    check_type(name, str, "name", "a text")
    given = {"rtol": rtol, "atol": atol, "rel_l2": rel_l2}
    tables = {key: bound for key, bound in given.items() if isinstance(bound, Mapping)}
    same = (single(rtol), single(atol), single(rel_l2))
    bounds = Bounds(*same, max_mismatch_ratio, equal_nan, check_dtype, check_stride, signed_zero)
    try:
        leaves = list(walk(name, actual, expected))
    except RecursionError as error:
        raise UsageError("cannot compare what contains itself, or is nested about a thousand deep") from error
    if not any(leaf.expected.numel() or leaf.actual.numel() for leaf in leaves):
        what = "only empty tensors" if leaves else "no tensor"
        raise AssertionError(f"{name or 'comparison'}: nothing to compare, both sides hold {what}")
    check_selectors(tables, [dotted(leaf.path, name) for leaf in leaves])
    failures = [
        (leaf.path, lines)
        for leaf in leaves
        if (lines := judge(leaf, bounds.at(dotted(leaf.path, name), tables) if tables else bounds))
    ]
    if failures:
        raise AssertionError("\n".join(message(failures, len(leaves))))


def single(bound: Bound) -> float | None:
    """Return a bound that is the same for all leaves; None where there is none, or a table."""
    return None if isinstance(bound, Mapping) else bound


def dotted(path: str, name: str) -> str:
    """Return a leaf's path as selectors name it: ``['past'][0]`` is ``past.0``."""
    return re.sub(r"\[(['\"]?)(.*?)\1\]", r".\2", path.removeprefix(name)).removeprefix(".")


def check_selectors(tables: Mapping[str, Mapping[str, float]], leaves: Sequence[str]) -> None:
    """Raise :class:`UsageError` for a selector that matches no leaf: its bound would hold nowhere."""
    for key, table in tables.items():
        for selector in table:
            if not any(matches(selector, leaf) for leaf in leaves):
                raise UsageError(f"{key}: {no_match(selector, leaves)}")


def message(failures: Sequence[tuple[str, list[str]]], count: int) -> list[str]:
    """Return the lines about the first of ``count`` tensors that fails, and the first line about others."""
    (_, lines), *others = failures
    if count == 1:
        return lines
    shown = [f"also {of[0]}" for _, of in others[:OTHERS]]
    rest = ", ".join(path for path, _ in others[OTHERS : OTHERS + PATHS])
    rest = f"; also {rest}{' …' if len(others) > OTHERS + PATHS else ''}" if rest else ""
    return [*lines[: LINES - 1 - len(shown)], *shown, f"{len(failures)} of {count} tensors differ{rest}"]


def judge(leaf: Leaf, bounds: Bounds) -> list[str]:
    """Return the lines that say why a pair fails; none when it passes."""
    path, actual, expected, valid = leaf.path, leaf.actual, leaf.expected, leaf.valid
    try:
        found = measure(actual, expected, valid=valid, rtol=bounds.rtol, atol=bounds.atol, equal_nan=bounds.equal_nan)
    except ShapeMismatch as error:
        return [f"{path}: {error}" if path else str(error)]
    broken = [*bounds.unlike(leaf), *bounds.broken(found)]
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

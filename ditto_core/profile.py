"""The sizes that an engine serves: a range for each dimension that is dynamic. Frozen and hashable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ditto_core.errors import UsageError, check_type, nearest

STEP = ("batch", "length", "past")
"""The dimensions of a step of tokens, which every profile sizes."""
IMAGE: Mapping[str, int] = {"height": 2, "width": 3}
"""Dimensions of an image [batch, channel, height, width] that a profile may name."""


@dataclass(frozen=True)
class Range:
    """Smallest, typical and largest size of a dynamic dimension."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max:
            raise UsageError(f"a shape range needs 0 <= min <= opt <= max, got {self.min}, {self.opt}, {self.max}")

    def __contains__(self, size: int) -> bool:
        return self.min <= size <= self.max


@dataclass(frozen=True)
class ShapeProfile:
    """Sizes that an engine must serve: rows in a batch, new tokens in a step, tokens already in the cache.

    ``more`` are further dimensions, as pairs of name and range: ``height`` and ``width`` of images, and the names that
    ``dynamic`` gives.
    """

    batch: Range = Range(1, 1, 8)
    length: Range = Range(1, 16, 512)
    past: Range = Range(0, 64, 1024)
    more: tuple[tuple[str, Range], ...] = ()

    @property
    def ranges(self) -> dict[str, Range]:
        """Every dimension's range, by name."""
        return {**{name: getattr(self, name) for name in STEP}, **dict(self.more)}

    @classmethod
    def parse(cls, data: Mapping[str, Iterable[int]], named: Iterable[str] = ()) -> ShapeProfile:
        """Build a profile from ``{"batch": (1, 1, 4), ...}``; ``named`` are the dimensions that ``dynamic`` names.

        Raises :class:`UsageError` for anything else.
        """
        if not isinstance(data, Mapping):
            raise UsageError(f"profile is {data!r}, expected a table such as {{'batch': (1, 2, 4)}}")
        known = (*STEP, *IMAGE, *named)
        for name in data:
            if name not in known:
                raise UsageError(
                    f"unknown profile dimension {name!r}, expected {', '.join(known)}{nearest(name, known)}"
                )
        for name, sizes in data.items():
            if not isinstance(sizes, Sequence) or len(sizes) != 3 or not all(isinstance(size, int) for size in sizes):
                raise UsageError(f"profile of {name} is {sizes!r}, expected three sizes: min, opt, max")
        return cls.of({name: Range(*sizes) for name, sizes in data.items()})

    @classmethod
    def of(cls, ranges: Mapping[str, Range]) -> ShapeProfile:
        """Build a profile from ranges by name: the inverse of :attr:`ranges`. Raises :class:`UsageError`."""
        check_type(ranges, Mapping, "profile", "ranges by name")
        for name, size in ranges.items():
            check_type(name, str, "a profile's dimension", "a name")
            check_type(size, Range, f"profile of {name}", "a Range")
        more = tuple(sorted((name, size) for name, size in ranges.items() if name not in STEP))
        return cls(**{name: size for name, size in ranges.items() if name in STEP}, more=more)

    def check(self, batch: int, length: int, past: int) -> None:
        """Raise :class:`UsageError` when a step of this size is outside the profile."""
        for name, size in (("batch", batch), ("length", length), ("past", past)):
            allowed: Range = getattr(self, name)
            if size not in allowed:
                raise UsageError(
                    f"step needs {name} {size}, outside the engine's profile {allowed.min}..{allowed.max}; "
                    f"build with profile={{{name!r}: ({allowed.min}, {allowed.opt}, {max(size, allowed.max)})}}"
                )

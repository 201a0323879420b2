"""Find a smallest set for which a property holds, in few evaluations: guesses, bisection, then ddmin.

The last stage is Zeller and Hildebrandt's ddmin (IEEE TSE 28(2), 2002), so the result is 1-minimal: taking any single
item away loses the property. The stages before it only decide how few evaluations that costs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Holds = Callable[[frozenset[T]], bool]
Ahead = Callable[[Sequence[frozenset[T]]], None]
"""Is told which sets are likely to be asked for next, several at once; it may judge them at the same time."""

FEW = 8
"""Items of a guess up to which bisecting costs more than it saves."""


def not_ahead(sets: Sequence[frozenset[Any]]) -> None:
    """Judge nothing ahead."""


def minimize(
    items: Sequence[T], holds: Holds[T], *, guesses: Iterable[Sequence[T]] = (), ahead: Ahead[T] = not_ahead
) -> list[T]:
    """Return a 1-minimal subset of ``items`` that ``holds``, in the order of ``items``.

    ``holds(all items)`` must be True and ``holds(nothing)`` False; the caller has tested both. ``guesses`` are tried
    first, in order; the first that holds is narrowed further. ``holds`` is called once for each set. It need not be
    monotone: then the result is still 1-minimal, though there may be a smaller one. ``ahead`` does not change
    what is found.
    """
    test = Memo(holds, ahead)
    test.known[frozenset(items)] = True
    test.known[frozenset()] = False
    current = list(items)
    guesses = list(guesses)
    test.soon(guesses)
    guess = first_that_holds(guesses, test)
    if guess is not None:
        current = [item for item in items if item in set(guess)]
        if len(current) <= FEW:  # each single item has to be tried anyway
            return ddmin(current, test, len(current))
    current = bisect(current, test)
    if len(current) > 2 and test([current[0], current[-1]]):
        current = [current[0], current[-1]]
    return ddmin(current, test)


def first_that_holds(guesses: Iterable[Sequence[T]], test: Callable[[Iterable[T]], bool]) -> Sequence[T] | None:
    """Return the first guess that holds; one that lies within a guess that failed is not tried."""
    failed: list[frozenset[T]] = []
    for guess in guesses:
        items = frozenset(guess)
        if any(items <= other for other in failed):
            continue
        if test(items):
            return guess
        failed.append(items)
    return None


class Memo(Generic[T]):
    """A property that is evaluated once for each set; ``known`` holds what it came to."""

    def __init__(self, holds: Holds[T], ahead: Ahead[T] = not_ahead) -> None:
        self._holds, self._ahead = holds, ahead
        self.known: dict[frozenset[T], bool] = {}

    def __call__(self, items: Iterable[T]) -> bool:
        """Return whether the property holds for a set."""
        key = frozenset(items)
        if key not in self.known:
            self.known[key] = self._holds(key)
        return self.known[key]

    def soon(self, sets: Iterable[Iterable[T]]) -> None:
        """Announce sets that will be evaluated unless an earlier one of them ends it."""
        unknown = [key for key in dict.fromkeys(map(frozenset, sets)) if key not in self.known]
        if len(unknown) > 1:
            self._ahead(unknown)


def bisect(items: Sequence[T], test: Callable[[Iterable[T]], bool]) -> list[T]:
    """Narrow to the shortest prefix that holds, then to its shortest suffix; its last item alone is tried in between.

    log2(n) + 1 evaluations when a single item is to blame, wherever it is and however the items are connected.
    """
    prefix = shortest(len(items), lambda count: test(items[:count]))
    items = items[:prefix]
    if len(items) > 1 and test(items[-1:]):
        return list(items[-1:])
    suffix = shortest(len(items), lambda count: test(items[len(items) - count :]))
    return list(items[len(items) - suffix :])


def shortest(count: int, holds: Callable[[int], bool]) -> int:
    """Return the smallest n at which ``holds`` turns true, known to be true at ``count`` and false at 0."""
    false, true = 0, count
    while true - false > 1:
        middle = (false + true) // 2
        if holds(middle):
            true = middle
        else:
            false = middle
    return true


def ddmin(items: Sequence[T], test: Memo[T], chunks: int = 2) -> list[T]:
    """Take away chunks of shrinking size for as long as the rest holds. Each single item was tried in the end."""
    current = list(items)
    while len(current) > 1:
        parts = split(current, chunks)
        rests = [[item for item in current if item not in set(part)] for part in parts]
        test.soon(rests)  # of two parts, these are the parts themselves
        found = next((part for part in parts if test(part)), None) if chunks == 2 else None
        if found is not None:
            current, chunks = found, 2
            continue
        rest = next((rest for rest in rests if rest and test(rest)), None)
        if rest is not None:
            current, chunks = rest, max(chunks - 1, 2)
        elif chunks >= len(current):
            break
        else:
            chunks = min(2 * chunks, len(current))
    return current


def split(items: Sequence[T], chunks: int) -> list[list[T]]:
    """Cut into ``chunks`` runs whose lengths differ by one at most."""
    bounds = [round(i * len(items) / chunks) for i in range(chunks + 1)]
    return [list(items[a:b]) for a, b in pairwise(bounds) if b > a]

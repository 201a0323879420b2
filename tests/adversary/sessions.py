"""Sessions around real ones: one that runs each sequence of inputs once, and one that hands over wrong tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ditto_core.session import Session, TapSink

Tensors = dict[str, torch.Tensor]
Fault = Callable[[Tensors, Tensors, Collection[str]], Tensors]
"""Takes what a step hands over, what the step before did, and the names that it may change; returns what is handed over
instead. A name that is left out is not handed over."""


class Remembered:
    """A session that remembers what it computed: only inputs that it has not seen since ``start`` are run."""

    def __init__(self, inner: Session) -> None:
        self._inner = inner
        self._rows = 0
        self._history: list[Mapping[str, torch.Tensor]] = []
        self._key: tuple[Any, ...] = ()
        self._seen: dict[tuple[Any, ...], tuple[Tensors, Tensors]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, batch: int) -> None:
        self._rows, self._history, self._key = batch, [], (batch,)

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> Tensors:
        self._history.append(dict(inputs))
        self._key = (*self._key, tuple((name, tuple(x.shape), x.numpy().tobytes()) for name, x in inputs.items()))
        if self._key not in self._seen:
            self._run()
        taps, outputs = self._seen[self._key]
        for site, tensor in taps.items():
            sink(site, tensor)
        return dict(outputs)

    def _run(self) -> None:
        """Run the whole sequence, so that the cache of keys and values is that of these inputs."""
        self._inner.start(self._rows)
        for inputs in self._history:
            taps: Tensors = {}
            outputs = self._inner.step(inputs, lambda site, x, taps=taps: taps.update({site: x.clone()}))
        self._seen[self._key] = taps, {name: x.clone() for name, x in outputs.items()}


class Faulty:
    """A session that hands over wrong tensors under some ``names`` of taps and outputs, from step ``first`` on.

    ``changed`` counts the tensors that were not what the session computed, as :func:`changed` does.
    """

    def __init__(self, inner: Any, fault: Fault, names: Collection[str], first: int = 0) -> None:
        self._inner, self._fault, self._names, self._first = inner, fault, names, first
        self._number = -1
        self._before: tuple[Tensors, Tensors] = ({}, {})
        self.changed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, batch: int) -> None:
        self._number, self._before = -1, ({}, {})
        self._inner.start(batch)

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> Tensors:
        self._number += 1
        taps: Tensors = {}
        outputs = self._inner.step(inputs, taps.__setitem__)
        right = taps, outputs
        if self._number >= self._first:
            taps, outputs = (self._wrong(now, old) for now, old in zip(right, self._before, strict=True))
        self._before = right
        for site, tensor in taps.items():
            sink(site, tensor)
        return outputs

    def _wrong(self, right: Tensors, before: Tensors) -> Tensors:
        names = [name for name in right if name in self._names]
        if not names:
            return right
        wrong = self._fault(right, before, names)
        self.changed += changed(wrong, right)
        return wrong


def changed(wrong: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> int:
    """Count the tensors that are gone, or off by 1 % of their norm: less is within what a dtype or a budget allows."""
    return sum(name not in wrong or not near(wrong[name].double(), right[name].double()) for name in right)


def near(wrong: torch.Tensor, right: torch.Tensor) -> bool:
    """Tell whether two tensors are within 1 % of each other's norm; the same Inf or NaN on both sides is no error."""
    same = (wrong == right) | (wrong.isnan() & right.isnan())
    return bool(torch.where(same, 0.0, wrong - right).norm() <= 0.01 * right[right.isfinite()].norm())

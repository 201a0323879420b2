"""Relations of a model that takes its inputs by name: what must hold for images, sound and tables as for tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from ditto_core.compare.metrics import measure
from ditto_core.errors import UsageError, nearest
from ditto_core.relations.checks import Terms
from ditto_core.relations.feed import Captured, stacked
from ditto_core.relations.result import Relation, Side, relate
from ditto_core.sites import Tap

if TYPE_CHECKING:
    from ditto_core.session import Session

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class OneStep:
    """How a single step was fed."""

    label: str

    def steps(self) -> tuple[tuple[int, ...], ...]:
        """There is one step, and no positions of tokens."""
        return ()


@dataclass(frozen=True)
class InputRelations:
    """Checks relations of ``session`` on inputs by name; ``examples`` are those of the model, ``axes`` of its outputs.

    ``noise`` is a reference and its low-precision version: their difference on the same inputs is the noise floor.
    ``fits`` raises :class:`UsageError` for inputs of sizes that the engine was not built for.
    """

    session: Session
    examples: Inputs
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    terms: Terms = field(default_factory=Terms)
    noise: tuple[Session, Session] | None = None
    fits: Callable[[Inputs], None] = lambda inputs: None

    def check(self, inputs: Inputs | None = None, *names: str) -> tuple[Relation, ...]:
        """Check the named relations (default: all) on ``inputs``, or on the model's examples.

        Raises :class:`UsageError` for an unknown name, and for fewer than two rows where rows are compared.
        """
        given = self.examples if inputs is None else inputs
        checks: Mapping[str, Callable[[Inputs, Terms], Relation]] = {
            "row_in_batch": self._row_in_batch,
            "same_bits": self._same_bits,
        }
        for name in names:
            if name not in checks:
                raise UsageError(f"unknown relation {name!r}, expected {', '.join(checks)}{nearest(name, checks)}")
        self.fits(given)
        terms = self.terms if self.noise is None else replace(self.terms, floor=self._floor(given))
        return tuple(checks[name](given, terms) for name in names or checks)

    def assert_hold(self, inputs: Inputs | None = None, *names: str) -> tuple[Relation, ...]:
        """Check and raise ``AssertionError`` with one line for each relation that is broken."""
        __tracebackhide__ = True
        from ditto_core.relations.suite import require

        return require(self.check(inputs, *names))

    def _row_in_batch(self, inputs: Inputs, terms: Terms) -> Relation:
        rows = row_count(inputs)
        if rows < 2:
            raise UsageError(f"the inputs have {rows} row, expected at least two: each is run alone and in the batch")
        self.fits(row_of(inputs, 0, rows))
        runs = [self._capture(self.session, row_of(inputs, row, rows)) for row in range(rows)]
        alone, batch = stacked(runs), self._capture(self.session, inputs)
        sides = self._side(batch, f"in a batch of {rows}"), self._side(alone, "alone")
        name = "row alone = row in batch"
        outputs = self._outputs(alone)
        return relate(name, *sides, self._taps, tolerance=terms.tolerance, floor=terms.floor, outputs=outputs)

    def _same_bits(self, inputs: Inputs, terms: Terms) -> Relation:
        first, second = (self._capture(self.session, inputs, by_row=False) for _ in range(2))
        sides = self._side(second, "the second time"), self._side(first, "the first time")
        return relate("same run twice = same bits", *sides, self._taps, exact=True)

    def _floor(self, inputs: Inputs) -> dict[str, float]:
        assert self.noise is not None
        truth, rounded = (self._capture(session, inputs) for session in self.noise)
        both = truth.values.keys() & rounded.values.keys()
        return {s: measure(rounded.values[s], truth.values[s], axes=truth.axes[s]).rel_l2 for s in both}

    @property
    def _taps(self) -> tuple[Tap, ...]:
        known = {tap.value for tap in self.session.taps}
        outputs = (Tap(name, name, axes=axes) for name, axes in self.axes.items() if name not in known)
        return (*self.session.taps, *outputs)

    def _outputs(self, captured: Captured) -> set[str]:
        """Return the names of the model's outputs, those too whose dimensions no graph names."""
        return {*self.axes, *(captured.values.keys() - {tap.site for tap in self.session.taps})}

    def _side(self, captured: Captured, label: str) -> Side:
        return Side(self.session.info, captured, OneStep(label))

    def _capture(self, session: Session, inputs: Inputs, *, by_row: bool = True) -> Captured:
        """Run once from the start; keep the sites whose rows can be told, row first, or without ``by_row`` all."""
        seen: dict[str, torch.Tensor] = {}
        session.start(row_count(inputs))
        outputs = session.step(inputs, lambda site, tensor: seen.update({site: tensor.clone()}))
        seen = {**outputs, **seen}
        named = {tap.value for tap in self._taps}
        others = (Tap(name, name) for name in outputs if name not in named)  # no graph names their dimensions
        found = Captured()
        for tap in (*self._taps, *others):
            if tap.site not in seen:
                found.left_out[tap.site] = "not delivered"
                continue
            tensor = seen[tap.site]
            known = "batch" in tap.axes and tensor.ndim == len(tap.axes)
            if not known and not by_row:
                found.values[tap.site], found.axes[tap.site] = tensor, ("",) * tensor.ndim
                continue
            if not known:
                found.left_out[tap.site] = (
                    f"axes {', '.join(a or '?' for a in tap.axes) or 'unknown'}: no row to align by"
                )
                continue
            place = tap.axes.index("batch")
            found.values[tap.site] = tensor.movedim(place, 0)
            found.axes[tap.site] = ("batch", *tap.axes[:place], *tap.axes[place + 1 :])
        return found


def row_count(inputs: Inputs) -> int:
    """Return the number of rows: the first dimension of the first input that has one, else 1."""
    return next((tensor.shape[0] for tensor in inputs.values() if tensor.ndim), 1)


def row_of(inputs: Inputs, row: int, rows: int) -> dict[str, torch.Tensor]:
    """Return one row of the inputs; what has another first dimension belongs to all rows."""
    return {n: t[row : row + 1] if t.ndim and t.shape[0] == rows else t for n, t in inputs.items()}

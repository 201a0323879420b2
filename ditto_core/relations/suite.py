"""All relations of one session: what the fixture ``ditto_relations`` is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ditto_core.compare.metrics import measure
from ditto_core.errors import RunError, UsageError, nearest
from ditto_core.relations import checks
from ditto_core.relations.checks import Ids, Terms
from ditto_core.relations.feed import capture, feed
from ditto_core.relations.result import Relation
from ditto_core.stepping.prompts import encode, is_single

if TYPE_CHECKING:
    from ditto_core.session import Session

Check = Callable[..., Relation]
CHECKS: Mapping[str, Check] = {
    "prefill_equals_steps": checks.prefill_equals_steps,
    "chunked_prefill": checks.chunked_prefill,
    "row_in_batch": checks.row_in_batch,
    "left_padding": checks.left_padding,
    "right_padding": checks.right_padding,
    "same_bits": checks.same_bits,
    "warm_cache": checks.warm_cache,
}
"""The relations that need nothing but tokens, by name."""


@dataclass(frozen=True)
class Relations:
    """Checks relations of ``session``.

    ``noise`` is a reference and its low-precision version: their difference on the same tokens is the noise
    floor. Without it the table of dtypes gives the bounds. ``window``: the model has a sliding window, which counts
    right padding as distance. ``longest``: the model's largest position, ``vocab_size``: how many ids it has; 0: none.
    """

    session: Session
    terms: Terms = field(default_factory=Terms)
    noise: tuple[Session, Session] | None = None
    reference: Session | None = None
    window: bool = False
    longest: int = 0
    vocab_size: int = 0

    def check(self, ids: Ids, *names: str) -> tuple[Relation, ...]:
        """Check the named relations (default: all in ``CHECKS``) on the token ids of one prompt.

        Raises :class:`UsageError` for anything else, and for ids outside the vocabulary.

        ``chunked_prefill`` needs three tokens. Sizes outside the engine's profile are an error: name the relations
        that fit.
        """
        for name in names:
            if name not in CHECKS:
                raise UsageError(f"unknown relation {name!r}, expected {', '.join(CHECKS)}{nearest(name, CHECKS)}")
        ids = self._prompt(ids)
        terms = self.terms_for([ids])
        return tuple(self._one(name, ids, terms) for name in names or CHECKS)

    def check_shapes(self, ids: Ids) -> tuple[Relation, ...]:
        """Check the smallest, typical, largest and off-grid sizes of the profile, against the reference if any."""
        if self.terms.profile is None:
            raise UsageError("no profile given, expected one with the sizes that the engine serves")
        ids = self._prompt(ids)
        terms = self.terms_for([ids])
        return tuple(
            checks.shapes(
                self.session, ids, self.terms.profile, reference=self.reference, longest=self.longest, terms=terms
            )
        )

    def assert_hold(self, ids: Ids, *names: str) -> tuple[Relation, ...]:
        """Check and raise ``AssertionError`` with one line for each relation that is broken."""
        __tracebackhide__ = True
        return require(self.check(ids, *names))

    def assert_shapes(self, ids: Ids) -> tuple[Relation, ...]:
        """Check shapes and raise ``AssertionError`` with one line for each that disagrees."""
        __tracebackhide__ = True
        return require(self.check_shapes(ids))

    def terms_for(self, rows: Sequence[Ids]) -> Terms:
        """Return the terms with the noise floor measured on these rows."""
        return self.terms if self.noise is None else replace(self.terms, floor=noise_floor(*self.noise, rows))

    def _prompt(self, ids: Any) -> Ids:
        if isinstance(ids, str) or not isinstance(ids, Sequence) or not is_single(ids):
            raise UsageError(f"relations got {ids!r:.60}, expected the token ids of one prompt, such as [5, 6, 7]")
        rows: list[Ids] = encode(ids, vocab_size=self.vocab_size).input_ids.tolist()
        return rows[0]

    def _one(self, name: str, ids: Ids, terms: Terms) -> Relation:
        extra = {"decode": not self.window} if name == "right_padding" else {}
        try:
            return CHECKS[name](self.session, ids, terms=terms, **extra)
        except RunError as error:
            raise RunError(f"{name}: {error}") from error


def noise_floor(reference: Session, low_precision: Session, rows: Sequence[Ids]) -> dict[str, float]:
    """Return by site the rel-L2 error of the reference in the engine's dtype, on one prefill of the rows."""
    fed = feed(rows)
    truth, rounded = capture(reference, fed), capture(low_precision, fed)
    both = truth.values.keys() & rounded.values.keys()
    return {s: measure(rounded.values[s], truth.values[s], axes=truth.axes[s]).rel_l2 for s in both}


def require(relations: Iterable[Relation]) -> tuple[Relation, ...]:
    """Return relations that hold. Raises ``AssertionError`` with a line for each that is broken, and how many are."""
    __tracebackhide__ = True
    relations = tuple(relations)
    broken = [relation for relation in relations if not relation]
    if broken:
        lines = [str(relation) for relation in broken]
        raise AssertionError("\n".join((f"{len(broken)} of {len(relations)} relations are broken", *lines)))
    return relations

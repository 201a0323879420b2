"""The result of a comparison: its data, and the questions that users ask of it. Reports are views of the data."""

from __future__ import annotations

from dataclasses import dataclass

from ditto_core.compare.data import ComparisonData
from ditto_core.compare.notebook import notebook_html
from ditto_core.compare.text import failure_message, summary_line, token_message


@dataclass(frozen=True, repr=False)
class Comparison(ComparisonData):
    """Everything that a lockstep run found. True when every site is within its tolerance, explained, or healed.

    Iterating yields :class:`SiteResult`, worst margin first. ``missing`` maps sites that could not be compared to the
    reason, and ``steps`` to what says which steps only one side has. ``taps`` tells where each site lives; ``notes``
    are lines for people; ``localization`` is what each site adds by itself, where that was measured; ``repros`` maps
    sites to the folders of the repros that were saved. ``receipt`` tells what produced it all.
    """

    def __repr__(self) -> str:
        return f"<Comparison: {summary_line(self)}>"

    def assert_close(self) -> None:
        """Raise ``AssertionError`` with the first bad site and the worst ones, unless the comparison holds."""
        __tracebackhide__ = True
        if not self:
            raise AssertionError(failure_message(self))

    def assert_same_tokens(self) -> None:
        """Raise ``AssertionError`` when a greedy token differs and the reference did not nearly tie there, and when no
        tokens were compared at all steps, or none of them could be judged."""
        __tracebackhide__ = True
        if not any(token.judged for token in self.tokens) or any(token.flips for token in self.tokens):
            raise AssertionError(token_message(self))

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return notebook_html(self)

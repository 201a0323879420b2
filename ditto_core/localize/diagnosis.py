"""From local errors to blame and causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ditto_core.causes import LAST, Evidence, first_cause, merge, rules
from ditto_core.causes.runs import run_causes
from ditto_core.compare.blame import Blame, Cause, Localization
from ditto_core.errors import first_line
from ditto_core.localize.blaming import blame
from ditto_core.localize.explaining import explained
from ditto_core.localize.kernels import explained_notes
from ditto_core.localize.local import Localizer, is_cache
from ditto_core.localize.recording import seen

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.graphs.graph import Graph

EXAMINED = 24
"""Sites that are searched for a cause; a fault that is everywhere needs no more."""


def conclude(localizer: Localizer, comparison: Comparison | None = None, graph: Graph | None = None) -> Localization:
    """Blame sites and name causes from what a localizer took during a run."""
    blamed = blame(localizer.results, localizer.taps, comparison, graph)
    with torch.inference_mode():
        examined = {item.site: found for item in blamed[:EXAMINED] if (found := evidence_of(localizer, item))}
        named = {site: cause for site, found in examined.items() if (cause := first_cause(found, rules()))}
        by_code, failed = unnamed_explained(localizer, blamed, named)
        named |= by_code
        last = {site: first_cause(found, LAST) for site, found in examined.items() if site not in named}
    causes = [cause for item in blamed if (cause := named.get(item.site) or last.get(item.site))]
    said = (*notes(localizer, blamed), *(text for found in examined.values() for text in found.failures), *failed)
    every = merge(causes) + run_causes(comparison, blamed)
    return Localization(localizer.dtype, localizer.factor, tuple(localizer.results), blamed, every, said)


def unnamed_explained(
    localizer: Localizer, blamed: Sequence[Blame], named: Mapping[str, Cause]
) -> tuple[dict[str, Cause], tuple[str, ...]]:
    """Explain the first sites that no rule names, by changes of the model's own code: causes by site, and notes."""
    modules = {item.module for item in blamed if item.site in named}
    sites = [item.site for item in blamed[:EXAMINED] if item.site not in named and item.module not in modules]
    if not sites:
        return {}, ()
    try:
        return explained(localizer, sites)
    except Exception as error:  # noqa: BLE001 - the verdict stands, whatever an explanation of it does
        return {}, (f"{sites[0]}: no cause was searched: {type(error).__name__}: {first_line(error)}",)


def evidence_of(localizer: Localizer, item: Blame) -> Evidence | None:
    """Collect a blamed site's tensors at the first captured step that shows it; None where none was captured."""
    capture = next((c for c in localizer.captures if item.site in c.expected), None)
    if capture is None:
        return None
    judged = {result.site: result for result in localizer.results if result.step == capture.step}
    shown = seen(localizer, judged[item.site], capture, judged)
    return Evidence(
        **vars(shown),
        expected=capture.expected[item.site].double(),
        root=localizer.truth.module,
        path=item.module,
        dtype=localizer.dtype,
        cached=any(is_cache(tap) for tap in localizer.taps if tap.site == item.site),
        past=capture.previous,
    )


def notes(localizer: Localizer, blamed: Sequence[Blame]) -> Iterator[str]:
    """Say what the localization could not see, and what would see more."""
    if localizer.failure:
        yield localizer.failure
    seen = {result.site for result in localizer.results}
    unseen = [tap.site for tap in localizer.taps if tap.site not in seen]
    if unseen:
        yield f"{len(unseen)} sites are the same tensor as another or were not computed: {', '.join(unseen[:3])}"
    yield from explained_notes(localizer.results)
    if not blamed and localizer.dtype != "float32":
        yield f"nothing above {localizer.dtype} rounding; localize(fp32=True) or --fp32 shows what hides below it"

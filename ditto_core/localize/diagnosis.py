"""From local errors to blame and causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ditto_core.causes import Evidence, diagnose, merge
from ditto_core.causes.runs import run_causes
from ditto_core.compare.blame import Blame, Cause, Localization, LocalResult
from ditto_core.errors import first_line
from ditto_core.localize.blaming import blame
from ditto_core.localize.explaining import explained
from ditto_core.localize.kernels import explained_notes
from ditto_core.localize.local import Capture, Localizer, Valid

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.graphs.graph import Graph
    from ditto_core.sites import Tap

SEARCHED = 2
"""Sites without a named cause for which changes of the model's code are tried."""

EXAMINED = 24
"""Sites that are searched for a cause; a fault that is everywhere needs no more."""


def conclude(localizer: Localizer, comparison: Comparison | None = None, graph: Graph | None = None) -> Localization:
    """Blame sites and name causes from what a localizer took during a run."""
    blamed = blame(localizer.results, localizer.taps, comparison, graph)
    with torch.inference_mode():
        examined = list(evidences(localizer, blamed))
        by_rules = {evidence.site: diagnose(evidence) for evidence in examined}
        by_code, failed = unnamed_explained(localizer, blamed, by_rules)
    named = [by_rules.get(item.site) or by_code.get(item.site) for item in blamed]
    causes = merge([cause for cause in named if cause is not None]) + run_causes(comparison, blamed)
    said = (*notes(localizer, blamed), *(text for evidence in examined for text in evidence.failures), *failed)
    return Localization(localizer.dtype, localizer.factor, tuple(localizer.results), blamed, causes, said)


def unnamed_explained(
    localizer: Localizer, blamed: Sequence[Blame], by_rules: Mapping[str, Cause | None]
) -> tuple[dict[str, Cause], tuple[str, ...]]:
    """Explain the first sites that no rule names, by changes of the model's own code: causes by site, and notes."""
    modules = {item.module for item in blamed if by_rules.get(item.site) is not None}
    sites = [i.site for i in blamed[:EXAMINED] if by_rules.get(i.site) is None and i.module not in modules]
    if not sites:
        return {}, ()
    try:
        return explained(localizer, sites[:SEARCHED])
    except Exception as error:  # noqa: BLE001 - the verdict stands, whatever an explanation of it does
        return {}, (f"{sites[0]}: no cause was searched: {type(error).__name__}: {first_line(error)}",)


def evidences(localizer: Localizer, blamed: Sequence[Blame]) -> Iterator[Evidence]:
    """Yield the evidence of the blamed sites, at their first captured step each."""
    tap_of = {tap.site: tap for tap in localizer.taps}
    results = {(result.step, result.site): result for result in localizer.results}
    for item in blamed[:EXAMINED]:
        capture = next((c for c in localizer.captures if item.site in c.expected), None)
        if capture is not None:
            yield evidence_of(localizer, item, tap_of[item.site], capture, results[capture.step, item.site])


def evidence_of(localizer: Localizer, item: Blame, tap: Tap, capture: Capture, result: LocalResult) -> Evidence:
    """Collect one site's tensors; captured tensors are reachable by any of their names.

    A tensor that the replay could not put into the model (another shape than the model's own, say) was not judged, so
    nothing may be explained by it: it may hold the fault itself.
    """
    judged = {r.site for r in localizer.results if r.step == capture.step}
    names = {name: t.site for t in localizer.taps if t.site in judged for name in (t.site, *t.aliases)}
    captured = {name: capture.actual[site] for name, site in names.items() if site in capture.actual}
    return Evidence(
        blame=item,
        tap=tap,
        actual=capture.actual[item.site].double(),
        expected=capture.expected[item.site].double(),
        valid=Valid(capture.inputs).of(tap),
        root=localizer.truth.module,
        dtype=localizer.dtype,
        inputs=capture.inputs,
        captured=captured,
        past=capture.previous,
        metrics=result.metrics,
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

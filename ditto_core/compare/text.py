"""A comparison in words: the message of a failure, and one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ditto_core.compare.judging import RANDOM
from ditto_core.compare.result import STEPS
from ditto_core.compare.tolerance import EMPTY

if TYPE_CHECKING:
    from ditto_core.compare._record import Metrics
    from ditto_core.compare.data import ComparisonData
    from ditto_core.compare.result import SiteResult, TokenResult

SHOWN = 3

INPUTS_DIFFER = "inputs differ"
"""How a note begins that says what explains a failure before any tensor: it is the first line of the message."""
FIRST_WRONG = "first wrong operator on the probes"
"""How a note begins that says where an engine file goes wrong, be it shown by no site."""
NOT_SHOWN = "not compared: "
"""How a note begins that says which sites the engine has no value for."""

NO_LOGITS = "the reference has no logits"
"""How a note begins that says why tokens are not compared."""


def failure_message(comparison: ComparisonData) -> str:
    """Return why a comparison failed, in at most twelve lines; the first has the site, step, number and bound."""
    comparison = comparison.shown
    lines = [*(note for note in comparison.notes if note.startswith(INPUTS_DIFFER)), headline(comparison)]
    bad = comparison.first_bad
    if bad is not None:
        lines += [where(comparison, bad), *blamed(comparison, bad), numbers(bad), worst_sites(comparison)]
        lines += [cause(comparison) or spread(comparison, bad)]
    lines += [output_error(comparison), observer_effect(comparison), missing(comparison)]
    lines += [dump(comparison), advice(comparison)]
    first, *rest = filter(None, lines)
    return "\n".join([first, *(f"  {line}" for line in rest)])


def headline(comparison: ComparisonData) -> str:
    """Return the verdict in one line."""
    comparison = comparison.shown
    bad = comparison.first_bad
    if bad is not None:
        return f"engine diverges at {bad.site}, step {bad.step}: {bad.verdict}"
    step, verdict = next(((s, v) for s, v in comparison.logits_verdicts if not v.ok), (0, None))
    if verdict is not None:
        return f"engine diverges at the logits, step {step}: {verdict}"
    return no_verdict(comparison) or agreement(comparison)


def no_verdict(comparison: ComparisonData) -> str:
    """Return what could not be judged or compared at all; empty where nothing is in the way of a verdict."""
    if len(comparison) and not comparison.measured and not any(r.tied for r in comparison.results):
        return f"nothing was compared: the tensors of all {len(comparison.sites)} sites are empty"
    if comparison.unjudged_outputs:
        output = comparison.unjudged_outputs[0]
        return f"the output {output.site}, step {output.step}, could not be judged: {output.verdict}"
    if comparison.missing:
        return not_compared(comparison)
    if not len(comparison):
        return "nothing was compared: the engine has no outputs in common with its reference"
    if not comparison.decided:
        return f"nothing was judged: {comparison.inconclusive[0].verdict.rule}"
    return ""


def not_compared(comparison: ComparisonData) -> str:
    """Return how many sites could not be compared, with the reason of the first, and which steps."""
    sites = {site: why for site, why in comparison.missing.items() if site != STEPS}
    known = {*sites, *comparison.sites}  # a site may be missing at one step alone
    first = (f"{len(sites)} of {len(known)} sites could not be compared: {site}: {why}" for site, why in sites.items())
    steps = comparison.missing.get(STEPS)
    return "; ".join(filter(None, (next(first, ""), steps and f"not all steps could be compared: {steps}")))


def agreement(comparison: ComparisonData) -> str:
    """Return the worst result of a comparison in which nothing failed."""
    worst = comparison.worst
    assert worst is not None
    return f"engine agrees: worst is {worst.site}, step {worst.step}: {worst.verdict}"


def where(comparison: ComparisonData, result: SiteResult) -> str:
    """Return the module class and the eager source line of a site."""
    tap = comparison.tap_of.get(result.site)
    if tap is None:
        return "first bad site: a final output; every tap before it is within its bound"
    kind = tap.module_class.rsplit(".", 1)[-1]
    return "first bad site: " + ", ".join(filter(None, (kind, tap.source))) if kind or tap.source else ""


def blamed(comparison: ComparisonData, bad: SiteResult) -> Iterator[str]:
    """Yield where the error comes from, where the local errors say more than the first bad site does: another site, or
    a line of the model that no site shows."""
    yield from (note for note in comparison.notes if note.startswith(FIRST_WRONG))
    first = comparison.localization.first if comparison.localization else None
    if first is None:
        return
    if first.site != bad.site:
        yield "the error is added at " + ", ".join(filter(None, (first.site, first.source)))
    elif first.between:
        yield "or before it: " + "; or ".join(first.between[:SHOWN])


def numbers(result: SiteResult) -> str:
    """Return the largest difference at a site, with both values, or what is not finite there."""
    m = result.metrics
    if m.nonfinite_mismatch:
        place = f", first at {list(m.first_nonfinite[0])} ({m.first_nonfinite[1]})" if m.first_nonfinite else ""
        return (
            f"not finite: engine {m.nan_actual} NaN and {m.inf_actual} Inf, reference {m.nan_expected} NaN and "
            f"{m.inf_expected} Inf of {m.count}{place}"
        )
    if m.max_abs_index is None:
        return ""
    if m.all_zero_actual:
        return f"there: the engine's tensor is all zeros, the reference's reaches {m.max_expected:.3g}: overflow?"
    sides = ", ".join(f"{n} {v}" if isinstance(v, int) else f"{n} {v:.5g}" for n, v in both_sides(m))
    place = f"there: max abs {m.max_abs:.1e} at {list(m.max_abs_index)} ({sides})"
    return f"{place}, cosine {m.cosine:.6f}, scale {m.scale:.5f}"


def both_sides(m: Metrics) -> tuple[tuple[str, Any], ...]:
    """Return the two values at the largest error: integers and bool whole, for ids differ in their last digit."""
    return ("engine", m.max_abs_actual), ("reference", m.max_abs_expected)


def cause(comparison: ComparisonData) -> str:
    """Return the likeliest named cause, where the comparison was localized and one was found."""
    found = comparison.localization.cause if comparison.localization else None
    return "" if found is None else f"cause ({found.confidence:.0%}): {found}; {found.next_step}"


def worst_sites(comparison: ComparisonData) -> str:
    """Return the worst sites that make a comparison fail, each once, with value / bound."""
    worst: dict[str, SiteResult] = {}
    for result in comparison:
        if not result.ok:
            worst.setdefault(result.site, result)
    top = list(worst.values())[:SHOWN]
    return "worst: " + "; ".join(f"{r.site} step {r.step} ({r.verdict.margin:.3g} x bound)" for r in top)


def spread(comparison: ComparisonData, bad: SiteResult) -> str:
    """Return how many sites are bad, how many healed, and how good the sites before the first bad one are."""
    before = [r.verdict.margin for r in comparison.results if r.step == bad.step and r.order < bad.order]
    sites = len({r.site for r in comparison.failures})
    healed = len({r.site for r in comparison.healed})
    text = f"bad: {sites} of {len(comparison.sites)} sites in {comparison.steps} steps; recovered downstream: {healed}"
    return text + (f"; before it at most {max(before):.2g} x bound" if before else "; nothing before it")


def final_result(comparison: ComparisonData, step: int) -> SiteResult | None:
    """Return the worst of the model's outputs at a step; the last tensor where none is known to be an output."""
    found = [r for r in comparison.results if r.step == step]
    outputs = [r for r in found if r.final]
    if outputs:
        return max(outputs, key=lambda r: (not r.verdict.ok, not r.verdict.judged, r.verdict.margin))
    return max(found, key=lambda r: r.order, default=None)


def output_error(comparison: ComparisonData) -> str:
    """Return the error of the model's output at its worst step, and how many greedy tokens agree."""
    finals = filter(None, (final_result(comparison, step) for step in range(comparison.steps)))
    worst = max(finals, key=lambda r: r.verdict.margin, default=None)
    if worst is None:
        return ""
    name = "logits" if comparison.logits else "output"
    text = f"at the {name}: {worst.site} step {worst.step}, {worst.verdict}"
    total = sum(len(t.reference) for t in comparison.tokens)
    wrong = sum(len(t.differences) for t in comparison.tokens)
    return text + (f"; {total - wrong} of {total} greedy tokens agree" if total else "") + prompt_perplexity(comparison)


def prompt_perplexity(comparison: ComparisonData) -> str:
    """Return the perplexity of the prompt on both sides, where it was measured."""
    first = next(iter(comparison.logits), None)
    if first is None or first.perplexity_actual is None or first.perplexity_expected is None:
        return ""
    return f"; perplexity of the prompt {first.perplexity_actual:.4g}, the reference's {first.perplexity_expected:.4g}"


def observer_effect(comparison: ComparisonData) -> str:
    """Return what tapping does to the engine's outputs."""
    effect = comparison.observer
    if effect is None and from_dumps(comparison):
        return ""
    if effect is None:
        return "observer effect: not measured"
    if not effect.changed:
        return "observer effect: none, the engine without taps gives the same outputs"
    return f"observer effect: taps change {effect.output} by rel_l2 {effect.rel_l2:.1e} at step {effect.step}"


def missing(comparison: ComparisonData) -> str:
    """Return what was not compared, when the headline speaks of something else, and how many sites were not judged."""
    lines = [unjudged(comparison), *(note for note in comparison.notes if note.startswith(NOT_SHOWN))]
    if comparison.missing and comparison.first_bad is not None:
        lines.append(not_compared(comparison))
    return "; ".join(filter(None, lines))


def unjudged(comparison: ComparisonData) -> str:
    """Return how many sites could not be judged, and why; empty when all were."""
    sites = {r.site for r in comparison.inconclusive}
    if not sites:
        return ""
    return f"not judged: {len(sites)} of {len(comparison.sites)} sites, {comparison.inconclusive[0].verdict.rule}"


def from_dumps(comparison: ComparisonData) -> bool:
    """Tell whether both sides were read from files: nothing ran, so there is nothing to tap or to dump."""
    return comparison.engine.recorded and comparison.reference.recorded


def dump(comparison: ComparisonData) -> str:
    """Return where the tensors lie."""
    if from_dumps(comparison):
        return ""
    return f"dump: {comparison.dump}" if comparison.dump else "dump: none, pytest --ditto-dump-dir DIR keeps them"


def advice(comparison: ComparisonData) -> str:
    """Return what to do next."""
    bad, effect = comparison.first_bad, comparison.observer
    if bad is None:
        return advice_without_bad_site(comparison)
    if effect is not None and effect.rel_l2 > bad.verdict.bound:
        return f"next: the taps themselves disturb this engine; tap less, for instance outputs=[{bad.site!r}]"
    if comparison.dump:
        return f"next: ditto compare {comparison.dump}/engine {comparison.dump}/reference"
    return "next: check what the engine was built from at the first bad site; what comes after inherits its error"


def advice_without_bad_site(comparison: ComparisonData) -> str:
    """Return what to do next where no site diverges."""
    if not comparison.logits_ok:
        return "next: this quantization loses more than healthy ones do; keep sensitive layers in a wider dtype"
    if len(comparison) and not comparison.measured:
        return "next: give inputs of at least one row"
    if any(output.verdict.rule.startswith(RANDOM) for output in comparison.unjudged_outputs):
        return "next: let forward repeat itself: eval(), no dropout, a fixed seed, nothing kept in a class or a global"
    if comparison.unjudged_outputs:
        output = comparison.unjudged_outputs[0]
        allow = f"give inputs for which it has some, or a tolerance of infinity for {output.site!r}"
        wider = "run this model in a dtype that holds its numbers, or give a tolerance for this output"
        return f"next: {allow if output.verdict.rule == EMPTY else wider}"
    if from_dumps(comparison):
        return "next: a name map aligns names and layouts, --ignore-missing leaves out names of one side only"
    return "next: leave these sites out of outputs=, or take a reference that has them"


def token_message(comparison: ComparisonData) -> str:
    """Return where the greedy tokens part, in at most ten lines."""
    comparison = comparison.shown
    if not comparison.tokens:
        why = (note for note in comparison.notes if note.startswith(NO_LOGITS))
        return f"no tokens were compared: {next(why, 'only generate(prompts) has any')}"
    if not any(token.judged for token in comparison.tokens):
        return "no token could be judged: all of them differ and depend on experts that nearly tie in the reference"
    rows = [(i, token) for i, token in enumerate(comparison.tokens) if token.flips]
    row, token = min(rows, key=lambda item: item[1].flips[0])
    step = token.flips[0]
    lines = [
        f"engine generates another token at step {step}, row {row}: {token.engine[step]}, expected "
        f"{token.reference[step]} (no near tie)",
        f"  {sum(len(t.flips) for _, t in rows)} flips in {len(rows)} of {len(comparison.tokens)} rows, "
        f"{sum(len(t.near_ties) for t in comparison.tokens)} near ties",
        *(f"  {line}" for line in texts(token)),
    ]
    bad = comparison.first_bad
    where_bad = f"first bad site: {bad.site}, step {bad.step}: {bad.verdict}" if bad else "every site is in bounds"
    lines.append(f"  {where_bad}")
    return "\n".join(lines)


def texts(token: TokenResult) -> Iterator[str]:
    """Yield both sides' texts, or token ids where there is no tokenizer, cut to a line."""
    sides = (("engine   ", token.engine_text, token.engine), ("reference", token.reference_text, token.reference))
    for name, text, ids in sides:
        yield f"{name}: {shorten(repr(text) if text else ' '.join(map(str, ids)))}"


def shorten(text: str, width: int = 100) -> str:
    """Cut a text to a width."""
    return text if len(text) <= width else text[: width - 1] + "…"


def summary_line(comparison: ComparisonData) -> str:
    """Return a comparison in one line, whatever came of it."""
    comparison = comparison.shown
    sides = f"{comparison.engine.label} against {comparison.reference.label}"
    said = bool(comparison.unjudged_outputs) and comparison.first_bad is None
    found = "; ".join(filter(None, (headline(comparison), "" if said else unjudged(comparison))))
    return f"{sides}, {comparison.steps} steps, {len(comparison.sites)} sites: {found}"

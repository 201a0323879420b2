"""Step an engine beside its reference on the same tokens; compare each tap within its step and drop it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from ditto_core.compare.comparison import Comparison
from ditto_core.compare.judging import judge, unjudged
from ditto_core.compare.metrics import measure
from ditto_core.compare.result import ObserverEffect, SiteResult, TokenResult
from ditto_core.compare.text import NO_LOGITS
from ditto_core.compare.tolerance import Tolerance, quantized_bounds
from ditto_core.errors import RunError
from ditto_core.model.forward import DECODED
from ditto_core.session import Session, Staged, TapSink
from ditto_core.sites import final_site
from ditto_core.stepping.choosing import flips_of
from ditto_core.stepping.comparer import Comparer, same_tensor
from ditto_core.stepping.floor import Floor
from ditto_core.stepping.measured import Measured
from ditto_core.stepping.prompts import SourceBatch, TokenBatch, likeliest
from ditto_core.stepping.sides import Recorder, Sides

Scores = Callable[[torch.Tensor], torch.Tensor]
"""Logits [batch, length, vocab] -> those of the next token [batch, vocab], -inf where it may not be chosen."""


def lockstep(
    sides: Sides,
    batch: TokenBatch | SourceBatch,
    *,
    steps: int,
    forced: bool = True,
    tolerance: Tolerance | None = None,
    floor: Floor | None = None,
    decode: Callable[[list[int]], str] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> tuple[Comparison, Floor]:
    """Run ``steps`` forward passes (a prefill, then decoding) on both sides and compare every tap of each.

    ``forced``: both sides get the reference's greedy token. Otherwise each gets its own, and the run ends where they
    part. ``floor`` is a noise floor measured earlier; without one, ``sides.low_precision`` measures it on the way.
    Returns the comparison and the floor. Memory holds one step's taps of the engine and, of the reference, one large
    tensor and copies of the small ones.
    """
    found = Measured(floor=floor or {})
    tolerance = tolerance or Tolerance()
    sides.start(batch.rows)
    engine_side, reference_side = batch.sequencer(), batch.sequencer()
    for step in range(steps):
        engine_inputs = engine_side.inputs()
        scores = engine_side.scores, reference_side.scores
        ours, theirs = run_step(sides, step, engine_inputs, reference_side.inputs(), found, tolerance, scores)
        if "logits" not in theirs:
            found.note(f"{NO_LOGITS}: both sides follow the engine's tokens, which are not compared")
        mine, other = (score(each["logits"]) for score, each in zip(scores, (ours, {**ours, **theirs}), strict=True))
        found.engine_tokens.append(likeliest(mine).tolist())
        found.reference_tokens.append(likeliest(other).tolist())
        if isinstance(batch, SourceBatch) and batch.allowed is not None and found.logits:
            last = found.logits[-1]
            found.flips[step] = flips_of(mine, other, getattr(torch, last.dtype), last.near_tie_ulp)
        if on_step is not None:
            on_step(step)
        chosen = torch.tensor(found.reference_tokens[-1])
        if not forced and found.engine_tokens[-1] != found.reference_tokens[-1]:
            found.note(f"free-running: the two sides part after step {step}")
            break
        engine_side.advance(chosen)
        reference_side.advance(chosen)
    whole = len(found.logits) == len(found.engine_tokens)  # else some are the engine's own on both sides
    tokens = token_results(sides, found, batch, tolerance, decode) if whole else ()
    return conclude(sides, found, tolerance, tokens), found.floor


def single_step(
    sides: Sides, inputs: Mapping[str, torch.Tensor], *, tolerance: Tolerance | None = None, floor: Floor | None = None
) -> tuple[Comparison, Floor]:
    """Compare one forward pass of a model without a KV cache; final outputs are compared as sites of their own."""
    found = Measured(floor=floor or {})
    sides.start(rows_of(inputs))
    tolerance = tolerance or Tolerance()
    run_step(sides, 0, inputs, inputs, found, tolerance)
    return conclude(sides, found, tolerance, ()), found.floor


def rows_of(inputs: Mapping[str, torch.Tensor]) -> int:
    """Return the number of rows of a batch: the first dimension of its first tensor that has one, else 1."""
    return next((t.shape[0] for t in inputs.values() if t.ndim), 1)


def run_step(
    sides: Sides,
    step: int,
    engine_inputs: Mapping[str, torch.Tensor],
    reference_inputs: Mapping[str, torch.Tensor],
    found: Measured,
    tolerance: Tolerance,
    scores: tuple[Scores, Scores] | None = None,
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Run one step on every side and add what it shows to ``found``; return both sides' final outputs.

    ``scores``: where tokens are generated, how each side's next ones are chosen.
    """
    engine, generated = sides.engine, scores is not None
    ours_by, theirs_by = scores or (None, None)
    axes = {"logits": ("batch", "length", "")} if generated and DECODED not in reference_inputs else sides.axes
    comparer = Comparer(
        engine.taps,
        step,
        reference_inputs,
        found,
        tolerance,
        engine.info.dtype,
        generated=generated,
        axes=axes,
        every_token=quantized_bounds(engine.info.beside(sides.reference.info).judged_as) is not None,
    )
    comparer.outputs = recorded(engine, engine_inputs, sides.engine_recorder, comparer.take_engine, ours_by)
    ours = comparer.outputs
    comparer.idle = engine.idle if isinstance(engine, Staged) else frozenset()
    if generated and "logits" not in ours:
        raise RunError(
            f"{engine.info.label} returned no logits at step {step}: it has {', '.join(ours) or 'no outputs'}"
        )
    if sides.localizer is not None:
        sites = {tap.site: tap for tap in engine.taps}
        finals = {final_site(name, sites): tensor for name, tensor in ours.items()}
        sides.localizer.take(step, engine_inputs, {**finals, **comparer.engine})
    if sides.low_precision is not None:
        if step == 0 and not sides.reference.info.recorded:
            run_once_before(sides.reference, reference_inputs, comparer)
        noisy = (sides.low_precision, *sides.samples)
        comparer.noisy_outputs = [each.step(reference_inputs, comparer.take_noisy) for each in noisy]
    theirs = recorded(sides.reference, reference_inputs, sides.reference_recorder, comparer.take_reference, theirs_by)
    comparer.finish(theirs, recorded=sides.reference.info.recorded)
    if sides.untapped is not None:
        deployed = sides.untapped.step(engine_inputs, lambda site, tensor: None)
        observe(found, step, ours, deployed)
        comparer.finish_untapped(deployed, theirs)
    return ours, theirs


def run_once_before(reference: Session, inputs: Mapping[str, torch.Tensor], comparer: Comparer) -> None:
    """Run the first step of the reference once for itself: where the next run differs, it draws random numbers, or
    remembers in a class, a global or another package's object, which :class:`Buffers` does not give back."""
    for name, tensor in reference.step(inputs, comparer.take_repeated).items():
        comparer.take_repeated(comparer.output_site(name), tensor)
    reference.start(rows_of(inputs))


def recorded(
    session: Session,
    inputs: Mapping[str, torch.Tensor],
    recorder: Recorder | None,
    sink: TapSink,
    scores: Scores | None,
) -> dict[str, torch.Tensor]:
    """Step a session; where there is a recorder, it sees every tap before the sink does, and the token chosen."""
    if recorder is None:
        return session.step(inputs, sink)
    with recorder.step(inputs) as writer:

        def both(site: str, tensor: torch.Tensor) -> None:
            writer.tap(site, tensor)
            sink(site, tensor)

        outputs = session.step(inputs, both)
        chosen = likeliest(scores(outputs["logits"])).tolist() if scores and "logits" in outputs else ()
        writer.finish(outputs, chosen)
    return outputs


def observe(
    found: Measured, step: int, tapped: Mapping[str, torch.Tensor], untapped: Mapping[str, torch.Tensor]
) -> None:
    """Keep the largest difference between the tapped and the untapped engine's final outputs; NaN in both is none."""
    for name, expected in untapped.items():
        if name not in tapped:
            continue
        same = same_tensor(tapped[name], expected)
        error = 0.0 if same else measure(tapped[name], expected, equal_nan=True).rel_l2
        effect = ObserverEffect(error, step, name)
        if found.observer is None or effect.rel_l2 > found.observer.rel_l2:
            found.observer = effect


def token_results(
    sides: Sides,
    found: Measured,
    batch: TokenBatch | SourceBatch,
    tolerance: Tolerance,
    decode: Callable[[list[int]], str] | None,
) -> tuple[TokenResult, ...]:
    """Collect the generated tokens row by row, with the steps at which the reference nearly tied."""
    decode = decode or (lambda ids: "")
    names = {"logits", *(tap.site for tap in sides.engine.taps if tap.value == "logits")}
    noise = {r.step: noise_of(r, tolerance) for r in found.results if r.final and r.site in names}
    rows, steps = [], len(found.engine_tokens)
    for row in range(batch.rows):
        ours = tuple(tokens[row] for tokens in found.engine_tokens)
        theirs = tuple(tokens[row] for tokens in found.reference_tokens)
        flips = ((step, flip) for step, flips in found.flips.items() for flip in flips if flip.index[0] == row)
        since = found.tied[row].step if row in found.tied else steps
        ties = tuple(s for s, flip in flips if flip.near_tie or flip.gap <= noise.get(s, 0.0))
        prompt, left_out = batch.texts[row] if batch.texts else "", tuple(range(since, steps))
        rows.append(TokenResult(prompt, ours, theirs, decode(list(ours)), decode(list(theirs)), ties, left_out))
    return tuple(rows)


def noise_of(logits: SiteResult, tolerance: Tolerance) -> float:
    """Return the gap between two of the reference's logits below which its own noise decides; 0 where not known.

    The noise floor gives the usual error of one logit as a share of the logits' root mean square; the difference of
    two has sqrt(2) of it, and four times that is as likely as one in ten thousand.
    """
    if logits.floor is None or not tolerance.usable(logits.floor) or not 0 < logits.metrics.rel_l2 < math.inf:
        return 0.0
    size = logits.metrics.rms / logits.metrics.rel_l2
    return 4 * math.sqrt(2) * logits.floor * size


def conclude(sides: Sides, found: Measured, tolerance: Tolerance, tokens: tuple[TokenResult, ...]) -> Comparison:
    """Judge what was found."""
    taps = sides.engine.taps
    info = sides.engine.info.beside(sides.reference.info)
    results = judge(found.results, tolerance, taps, info)
    return Comparison(
        engine=sides.engine.info,
        reference=sides.reference.info,
        results=results,
        tolerance=tolerance,
        tokens=tokens,
        logits=tuple(found.logits),
        observer=found.observer,
        missing=unjudged(info.judged_as, results, found.logits, taps, generated=bool(tokens)) | found.missing,
        taps=taps,
        notes=(*found.notes, *tolerance.idle(r.step for r in results)),
    )

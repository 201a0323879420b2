"""Step an engine beside its reference on the same tokens; compare each tap and drop it at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ditto_core.backends.base import Session, TapSink
from ditto_core.compare.comparison import Comparison, ObserverEffect, SiteResult, TokenResult, judge
from ditto_core.compare.metrics import Metrics, ShapeMismatch, measure
from ditto_core.compare.tokens import Flip, LogitsMetrics, measure_logits
from ditto_core.compare.tolerance import WITHIN, Tolerance, Verdict
from ditto_core.generate import Sequencer, TokenBatch, greedy, valid_elements

if TYPE_CHECKING:
    from ditto_core.sites import Tap
    from ditto_core.trace import StepWriter

Floor = dict[str, dict[int, float]]
"""Noise floor: the reference's own rel-L2 error in the engine's dtype, by site and step."""

UNJUDGED = Verdict(WITHIN, "rel_l2", 0.0, 0.0, "not judged yet")


class Recorder(Protocol):
    """Takes what one side of a run produces; :class:`ditto_core.trace.TraceWriter` is one."""

    def step(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Enter a context that yields an object with ``tap(site, tensor)`` and ``finish(outputs, tokens)``."""
        ...

    def close(self) -> None:
        """Mark the recording as complete."""
        ...


class TapReader(Protocol):
    """Reads the engine's taps of each step before they are dropped; :class:`ditto_core.localize.Localizer` is one."""

    def start(self) -> None:
        """Begin a new sequence."""
        ...

    def take(self, step: int, inputs: Mapping[str, torch.Tensor], captured: Mapping[str, torch.Tensor]) -> None:
        """Read the taps of a step, by site."""
        ...


@dataclass
class Sides:
    """The sessions of a run. ``noisy`` is the reference in the engine's dtype (measures the noise floor); ``plain`` is
    the engine without taps (observer check). The recorders write the engine's and the reference's traces; ``localizer``
    measures local errors."""

    engine: Session
    reference: Session
    noisy: Session | None = None
    plain: Session | None = None
    engine_recorder: Recorder | None = None
    reference_recorder: Recorder | None = None
    localizer: TapReader | None = None

    def start(self, rows: int) -> None:
        """Begin a new sequence on every side."""
        if self.localizer is not None:
            self.localizer.start()
        for session in (self.engine, self.reference, self.noisy, self.plain):
            if session is not None:
                session.start(rows)


@dataclass
class Findings:
    """What a run has measured so far."""

    results: list[SiteResult] = field(default_factory=list)
    logits: list[LogitsMetrics] = field(default_factory=list)
    floor: Floor = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    observer: ObserverEffect | None = None
    engine_tokens: list[list[int]] = field(default_factory=list)
    reference_tokens: list[list[int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add what the user should know, once."""
        if text not in self.notes:
            self.notes.append(text)


def lockstep(
    sides: Sides,
    batch: TokenBatch,
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
    part. ``floor`` is a noise floor measured earlier; without one, ``sides.noisy`` measures it on the way. Returns the
    comparison and the floor. Memory holds one step's taps of the engine and one tensor of the reference.
    """
    found = Findings(floor=floor or {})
    tolerance = tolerance or Tolerance()
    sides.start(batch.rows)
    engine_side, reference_side = Sequencer(batch), Sequencer(batch)
    for step in range(steps):
        engine_inputs = engine_side.inputs()
        ours, theirs = run_step(sides, step, engine_inputs, reference_side.inputs(), found, tolerance, generated=True)
        if "logits" not in theirs:
            found.note("the reference has no logits: both sides follow the engine's tokens, which are not compared")
        found.engine_tokens.append(greedy(ours["logits"]).tolist())
        found.reference_tokens.append(greedy(theirs.get("logits", ours["logits"])).tolist())
        if on_step is not None:
            on_step(step)
        chosen = torch.tensor(found.reference_tokens[-1])
        if not forced and found.engine_tokens[-1] != found.reference_tokens[-1]:
            found.note(f"free-running: the two sides part after step {step}")
            break
        engine_side.advance(chosen)
        reference_side.advance(chosen)
    tokens = token_results(found, batch, decode) if found.logits else ()
    return conclude(sides, found, tolerance, tokens), found.floor


def single_step(
    sides: Sides, inputs: Mapping[str, torch.Tensor], *, tolerance: Tolerance | None = None, floor: Floor | None = None
) -> tuple[Comparison, Floor]:
    """Compare one forward pass of a model without a KV cache; final outputs are compared as sites of their own."""
    found = Findings(floor=floor or {})
    sides.start(next((t.shape[0] for t in inputs.values() if t.ndim), 1))
    tolerance = tolerance or Tolerance()
    run_step(sides, 0, inputs, inputs, found, tolerance, generated=False)
    return conclude(sides, found, tolerance, ()), found.floor


def run_step(
    sides: Sides,
    step: int,
    engine_inputs: Mapping[str, torch.Tensor],
    reference_inputs: Mapping[str, torch.Tensor],
    found: Findings,
    tolerance: Tolerance,
    *,
    generated: bool,
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Run one step on every side and add what it shows to ``found``; return both sides' final outputs."""
    comparer = Comparer(sides, step, reference_inputs, found, tolerance)
    ours = recorded(sides.engine, engine_inputs, sides.engine_recorder, comparer.take_engine, generated)
    if sides.localizer is not None:
        sides.localizer.take(step, engine_inputs, comparer.engine)
    if sides.noisy is not None:
        comparer.noisy_outputs = sides.noisy.step(reference_inputs, comparer.take_noisy)
    theirs = recorded(sides.reference, reference_inputs, sides.reference_recorder, comparer.take_reference, generated)
    comparer.finish(ours, theirs)
    if sides.plain is not None:
        observe(found, step, ours, sides.plain.step(engine_inputs, lambda site, tensor: None))
    return ours, theirs


def recorded(
    session: Session, inputs: Mapping[str, torch.Tensor], recorder: Recorder | None, sink: TapSink, generated: bool
) -> dict[str, torch.Tensor]:
    """Step a session; where there is a recorder, it sees every tap before the sink does."""
    with ExitStack() as stack:
        writer: StepWriter | None = stack.enter_context(recorder.step(inputs)) if recorder else None

        def both(site: str, tensor: torch.Tensor) -> None:
            if writer is not None:
                writer.tap(site, tensor)
            sink(site, tensor)

        outputs = session.step(inputs, both)
        if writer is not None:
            writer.finish(outputs, greedy(outputs["logits"]).tolist() if generated and "logits" in outputs else ())
    return outputs


class Comparer:
    """Compares one step: holds the engine's taps until the reference delivers each, then drops both."""

    def __init__(
        self, sides: Sides, step: int, inputs: Mapping[str, torch.Tensor], found: Findings, tolerance: Tolerance
    ) -> None:
        self._tolerance = tolerance
        self._taps = {tap.site: (i, tap) for i, tap in enumerate(sides.engine.taps)}
        self._step = step
        self._found = found
        self._mask = inputs.get("attention_mask")
        self._length = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
        self.engine: dict[str, torch.Tensor] = {}
        self._delivered: set[str] = set()
        self._noisy: dict[str, torch.Tensor] = {}
        self.noisy_outputs: Mapping[str, torch.Tensor] = {}

    def take_engine(self, site: str, tensor: torch.Tensor) -> None:
        """Hold a tap of the engine."""
        self.engine[site] = tensor
        self._delivered.add(site)

    def take_noisy(self, site: str, tensor: torch.Tensor) -> None:
        """Hold a tap of the reference in the engine's dtype."""
        self._noisy[site] = tensor.clone()

    def take_reference(self, site: str, tensor: torch.Tensor) -> None:
        """Compare a tap of the reference with what the others hold."""
        actual = self.engine.pop(site, None)
        if actual is None:
            return
        order, tap = self._taps[site]
        noisy = self._noisy.pop(site, None)
        self._compare(order, tap, actual, tensor, noisy)

    def finish(self, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
        """Compare the final outputs, and note what only one side had."""
        from ditto_core.sites import Tap

        covered = {tap.value for _, tap in self._taps.values()}
        for i, (name, actual) in enumerate(ours.items()):
            if name in theirs and name not in covered:
                axes = ("batch", "length", "") if name == "logits" else ("batch",) + ("",) * (actual.ndim - 1)
                order = len(self._taps) + i
                self._compare(order, Tap(name, name, axes=axes), actual, theirs[name], self.noisy_outputs.get(name))
        if "logits" in ours and "logits" in theirs:
            last = (ours["logits"][:, -1], theirs["logits"][:, -1])
            dtype = str(ours["logits"].dtype).removeprefix("torch.")
            self._found.logits.append(measure_logits(*last, dtype=dtype))
        for site in self.engine:
            self._found.missing.setdefault(site, "the reference did not compute it")
        for site in self._taps.keys() - self._delivered:
            self._found.missing.setdefault(site, f"the engine did not deliver it at step {self._step}")

    def _compare(
        self, order: int, tap: Tap, actual: torch.Tensor, expected: torch.Tensor, noisy: torch.Tensor | None
    ) -> None:
        valid = None if self._mask is None else valid_elements(tap.axes, self._mask, self._length)
        if tap.value == "logits" and actual.shape != expected.shape:
            actual, expected, noisy, valid = self._last_tokens(actual, expected, noisy, valid)
        try:
            metrics = self._measure(actual, expected, tap, valid)
            if noisy is not None:
                floor = self._measure(noisy, expected, tap, valid).rel_l2
                self._found.floor.setdefault(tap.site, {})[self._step] = floor
        except ShapeMismatch as error:
            self._found.missing.setdefault(tap.site, str(error))
            return
        known = self._found.floor.get(tap.site, {}).get(self._step)
        self._found.results.append(SiteResult(self._step, tap.site, order, metrics, UNJUDGED, known))

    def _last_tokens(
        self,
        actual: torch.Tensor,
        expected: torch.Tensor,
        noisy: torch.Tensor | None,
        valid: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Cut logits [batch, length, vocab] to the last token where one side computed no others."""
        if 1 not in (actual.shape[1], expected.shape[1]):
            return actual, expected, noisy, valid
        self._found.note("one side has the last token's logits only: the others' are not compared")
        return actual[:, -1:], expected[:, -1:], None if noisy is None else noisy[:, -1:], None

    def _measure(self, actual: torch.Tensor, expected: torch.Tensor, tap: Tap, valid: torch.Tensor | None) -> Metrics:
        if is_mask(expected):
            actual, expected = actual < 0, expected < 0
        rule = self._tolerance.rule_for((tap.site, *tap.aliases), self._step)
        rtol, atol = (rule.rtol, rule.atol) if rule else (None, None)
        return measure(actual, expected, axes=tap.axes, valid=valid, rtol=rtol, atol=atol)


def is_mask(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is an additive attention mask: zeros and the dtype's most negative number only."""
    if not tensor.is_floating_point() or tensor.ndim != 4 or not tensor.numel():
        return False
    lowest = torch.finfo(tensor.dtype).min
    return bool(((tensor == 0) | (tensor <= lowest / 2)).all())


def observe(found: Findings, step: int, tapped: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]) -> None:
    """Keep the largest difference between the tapped and the plain engine's final outputs."""
    for name, expected in plain.items():
        effect = ObserverEffect(measure(tapped[name], expected).rel_l2, step, name)
        if found.observer is None or effect.rel_l2 > found.observer.rel_l2:
            found.observer = effect


def token_results(
    found: Findings, batch: TokenBatch, decode: Callable[[list[int]], str] | None
) -> tuple[TokenResult, ...]:
    """Collect the generated tokens row by row, with the steps at which the reference nearly tied."""
    decode = decode or (lambda ids: "")
    rows = []
    for row in range(batch.rows):
        ours = tuple(tokens[row] for tokens in found.engine_tokens)
        theirs = tuple(tokens[row] for tokens in found.reference_tokens)
        ties = tuple(
            s for s, m in enumerate(found.logits) if any(f.index[0] == row and tied(found, s, f) for f in m.flips)
        )
        prompt = batch.texts[row] if batch.texts else ""
        rows.append(TokenResult(prompt, ours, theirs, decode(list(ours)), decode(list(theirs)), ties))
    return tuple(rows)


def tied(found: Findings, step: int, flip: Flip) -> bool:
    """Tell whether a flip says nothing: the reference's gap is within rounding, or within its own noise.

    The noise floor gives the usual error of one logit; the difference of two has sqrt(2) of it, and four times that
    is as likely as one in ten thousand.
    """
    if flip.near_tie:
        return True
    final = max((r for r in found.results if r.step == step), key=lambda r: r.order, default=None)
    if final is None or final.floor is None or not 0 < final.metrics.rel_l2 < math.inf:
        return False
    size = final.metrics.rms / final.metrics.rel_l2
    return flip.gap <= 4 * math.sqrt(2) * final.floor * size


def conclude(sides: Sides, found: Findings, tolerance: Tolerance, tokens: tuple[TokenResult, ...]) -> Comparison:
    """Judge what was found."""
    taps = sides.engine.taps
    info = sides.engine.info
    return Comparison(
        engine=info,
        reference=sides.reference.info,
        results=judge(found.results, tolerance, taps, info),
        tolerance=tolerance,
        tokens=tokens,
        logits=tuple(found.logits),
        observer=found.observer,
        missing=found.missing,
        taps=taps,
        notes=tuple(found.notes),
    )


@contextmanager
def recording(sides: Sides, writers: tuple[Recorder, Recorder] | None) -> Iterator[None]:
    """Attach trace writers to both sides for the time of a run, and complete the traces when it ends well."""
    if writers is None:
        yield
        return
    sides.engine_recorder, sides.reference_recorder = writers
    try:
        yield
        for writer in writers:
            writer.close()
    finally:
        sides.engine_recorder = sides.reference_recorder = None

"""Compares the taps of one step as they arrive, and keeps what a run has found; each tensor is dropped at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ditto_core.compare.metrics import Metrics, ShapeMismatch, measure
from ditto_core.compare.result import ObserverEffect, SiteResult
from ditto_core.compare.tokens import LogitsMetrics, measure_logits, next_tokens, perplexities, rounded_as
from ditto_core.compare.tolerance import INTEGERS, Tolerance
from ditto_core.compare.ulp import coarser
from ditto_core.compare.verdict import UNJUDGED
from ditto_core.sites import Tap, final_site
from ditto_core.spec import DTYPES
from ditto_core.stepping.floor import Floor
from ditto_core.stepping.prompts import valid_elements


@dataclass(frozen=True)
class Elementwise:
    """What counts as a mismatched element where no rule says so; None: the dtype's usual tolerance."""

    rtol: float | None = None
    atol: float | None = None
    equal_nan: bool = False


@dataclass
class Measured:
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


class Comparer:
    """Compares one step: holds the engine's taps until the reference delivers each, then drops both.

    ``dtype`` is the engine's; near ties go by it where the logits are stored in a finer one. ``generated``: the logits
    are of the tokens that follow, so that the prompt has a perplexity.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        step: int,
        inputs: Mapping[str, torch.Tensor],
        found: Measured,
        tolerance: Tolerance,
        dtype: str = "",
        *,
        generated: bool = True,
        elementwise: Elementwise = Elementwise(),
    ) -> None:
        self._elementwise = elementwise
        self._tolerance = tolerance
        self._dtype = dtype
        self._taps = {tap.site: (i, tap) for i, tap in enumerate(taps)}
        self.by_site = {tap.site: tap for tap in taps}
        self.step = step
        self._generated = generated
        self._found = found
        self._mask = of_tokens(inputs, "attention_mask")
        self._ids = of_tokens(inputs, "input_ids")
        self._encoder = any(name.startswith("decoder_") for name in inputs)
        self._length = 0 if self._ids is None else self._ids.shape[1]
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
        self.compare(order, tap, actual, tensor, noisy)

    def finish(self, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
        """Compare the final outputs, and note what only one side had."""
        covered = {tap.value for _, tap in self._taps.values()}
        for i, (name, actual) in enumerate(ours.items()):
            if name in theirs and name not in covered:
                # The mask of an encoder-decoder is about the encoder's tokens.
                by_token = name == "logits" and actual.ndim == 3 and not self._encoder
                axes = ("batch", "length", "") if by_token else (("batch",) + ("",) * actual.ndim)[: actual.ndim]
                order = len(self._taps) + i
                site = final_site(name, self.by_site)
                self.compare(order, Tap(site, name, axes=axes), actual, theirs[name], self.noisy_outputs.get(name))
        if "logits" in ours and "logits" in theirs:
            self.compare_logits(ours["logits"], theirs["logits"])
        for site, tensor in self.engine.items():
            if ":in." in site and is_mask(tensor):  # eager builds no mask where nothing is to be hidden
                self._found.note(f"{site} is a mask that only the engine has; it is not compared")
            else:
                self._found.missing.setdefault(site, "the reference did not compute it")
        for site in self._taps.keys() - self._delivered:
            self._found.missing.setdefault(site, f"the engine did not deliver it at step {self.step}")

    def compare_logits(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Measure the last token's logits of [batch, length, vocab], all of [tokens, vocab], once a step."""
        if ours.dim() < 2 or not ours.numel() or any(found.step == self.step for found in self._found.logits):
            return
        kind, actual, expected = judged_dtype(ours.dtype, theirs.dtype), last_logits(ours), last_logits(theirs)
        # Logits of two shapes: the comparison of the site, or of the output, says so by name.
        if actual.shape == expected.shape and name_of(kind) in DTYPES:
            found = measure_logits(actual, expected, dtype=rounded_as(kind, self._dtype), step=self.step)
            self._found.logits.append(self._with_perplexity(found, ours, theirs))

    def _with_perplexity(self, found: LogitsMetrics, actual: torch.Tensor, expected: torch.Tensor) -> LogitsMetrics:
        """Add the perplexity of the prompt on both sides, where both computed the logits of all its tokens."""
        if self.step or not self._generated or self._ids is None or self._mask is None:
            return found
        if self._mask.shape != self._ids.shape or not actual.shape[:2] == expected.shape[:2] == self._ids.shape:
            return found
        ours, theirs = perplexities(actual, expected, next_tokens(self._ids, self._mask))
        return replace(found, perplexity_actual=ours, perplexity_expected=theirs)

    def compare(
        self, order: int, tap: Tap, actual: torch.Tensor, expected: torch.Tensor, noisy: torch.Tensor | None = None
    ) -> None:
        """Measure one tensor; ``noisy`` is the reference's in the engine's dtype. Two shapes make the site missing."""
        valid = None if self._mask is None else valid_elements(tap.axes, self._mask, self._length)
        if tap.value == "logits" and actual.shape != expected.shape:
            actual, expected, noisy, valid = self._last_tokens(actual, expected, noisy, valid)
        try:
            metrics = self._measure(actual, expected, tap, valid)
            if noisy is not None:
                floor = self._measure(noisy, expected, tap, valid).rel_l2
                self._found.floor.setdefault(tap.site, {})[self.step] = floor
        except ShapeMismatch as error:
            self._found.missing.setdefault(tap.site, str(error))
            return
        known = self._found.floor.get(tap.site, {}).get(self.step)
        self._found.results.append(SiteResult(self.step, tap.site, order, metrics, UNJUDGED, known))

    def _last_tokens(
        self,
        actual: torch.Tensor,
        expected: torch.Tensor,
        noisy: torch.Tensor | None,
        valid: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Cut logits [batch, length, vocab] to the last token where one side computed no others."""
        if actual.dim() != 3 or expected.dim() != 3 or 1 not in (actual.shape[1], expected.shape[1]):
            return actual, expected, noisy, valid
        self._found.note("one side has the last token's logits only: the others' are not compared")
        return actual[:, -1:], expected[:, -1:], None if noisy is None else noisy[:, -1:], None

    def _measure(self, actual: torch.Tensor, expected: torch.Tensor, tap: Tap, valid: torch.Tensor | None) -> Metrics:
        actual, expected = as_masks(actual, expected)
        rtol, atol = self._tolerance.elementwise((tap.site, *tap.aliases), self.step)
        usual = self._elementwise
        if tap.dtype in INTEGERS:  # a dump may hold ids as floats
            usual = Elementwise(0.0, 0.0, usual.equal_nan)
        return measure(
            actual,
            expected,
            axes=tap.axes,
            valid=valid,
            rtol=usual.rtol if rtol is None else rtol,
            atol=usual.atol if atol is None else atol,
            equal_nan=usual.equal_nan,
        )


def of_tokens(inputs: Mapping[str, torch.Tensor], name: str) -> torch.Tensor | None:
    """Return an input [batch, tokens]; None where there is none, or a model gives the name to something else."""
    found = inputs.get(name)
    return found if found is not None and found.dim() == 2 else None


def judged_dtype(actual: torch.dtype, expected: torch.dtype) -> torch.dtype:
    """Return the coarser dtype, or that of the side with integers: ids are ids though the other tool wrote them as
    floats. An 8-bit integer beside a float is a quantized number, and no id.
    """
    for one, other in ((actual, expected), (expected, actual)):
        if name_of(one) in INTEGERS and one.itemsize > 1 and other.is_floating_point:
            return one
    return coarser(actual, expected)


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without its prefix."""
    return str(dtype).removeprefix("torch.")


def last_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's logits: those of the last token of [batch, length, vocab], all of [batch, classes]."""
    return logits[:, -1] if logits.dim() == 3 else logits


def as_masks(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what two additive attention masks hide, as bool, for engines hide with other numbers than the reference.

    One whose numbers are too weak shows in the attention's weights. Where the engine's tensor is no mask (NaN, a number
    above 0) both come back as they are.
    """
    if is_mask(expected) and bool((actual <= 0).all()):
        return actual < 0, expected < 0
    return actual, expected


def is_mask(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is an additive attention mask: zeros and the dtype's most negative number only."""
    if not tensor.is_floating_point() or tensor.itemsize == 1 or tensor.ndim != 4 or not tensor.numel():
        return False
    lowest = torch.finfo(tensor.dtype).min
    return bool(((tensor == 0) | (tensor <= lowest / 2)).all())

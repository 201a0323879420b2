"""Compares the taps of one step as they arrive; each tensor is dropped at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ditto_core.compare.judging import UNTAPPED, output_names
from ditto_core.compare.masks import as_masks, is_mask
from ditto_core.compare.metrics import Metrics, ShapeMismatch, measure
from ditto_core.compare.requested import measure_requested
from ditto_core.compare.result import SiteResult
from ditto_core.compare.row import RowError
from ditto_core.compare.rows import SMALL, row_errors, worst_row
from ditto_core.compare.tokens import LogitsMetrics, measure_logits, next_tokens, perplexities, rounded_as
from ditto_core.compare.tolerance import EPSILON, INTEGERS, TABLE, Tolerance
from ditto_core.compare.ulp import coarser
from ditto_core.compare.verdict import UNJUDGED
from ditto_core.model.forward import DECODED
from ditto_core.sites import Tap, is_operator
from ditto_core.spec import DTYPES
from ditto_core.stepping.choices import Choices
from ditto_core.stepping.floor import Noise
from ditto_core.stepping.measured import Elementwise, Measured
from ditto_core.stepping.prompts import valid_elements
from ditto_core.stepping.ties import is_class_map, without_ties


class Comparer:
    """Compares one step: holds the engine's taps until the reference delivers each, then drops both.

    ``dtype`` is the engine's; near ties go by it where the logits are stored in a finer one. ``generated``: the logits
    are of the tokens that follow, so that the prompt has a perplexity. ``axes`` names the dimensions of the model's
    outputs; with ``every_token`` the logits of all tokens count, not the last alone. What else is judged about a
    tensor, row by row for instance, is measured in :meth:`compare`.
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
        elementwise: Elementwise | None = None,
        axes: Mapping[str, tuple[str, ...]] | None = None,
        every_token: bool = False,
    ) -> None:
        self._every_token = every_token
        self._axes = axes or {}
        self._elementwise = elementwise or Elementwise()
        self._tolerance = tolerance
        self._dtype = dtype
        self._taps = {tap.site: (i, tap) for i, tap in enumerate(taps)}
        self.step = step
        decoded = DECODED in inputs  # what has logits is not what ``input_ids`` and the mask speak of
        self._generated = generated and not decoded
        self._masked_logits = not decoded
        self._found = found
        self._mask = of_tokens(inputs, "attention_mask")
        self._ids = of_tokens(inputs, "input_ids")
        self._length = 0 if self._ids is None else self._ids.shape[1]
        self.engine: dict[str, torch.Tensor] = {}
        self._delivered: set[str] = set()
        self._noisy: dict[str, torch.Tensor] = {}
        self.noisy_outputs: Mapping[str, torch.Tensor] = {}
        self._repeated: dict[str, torch.Tensor] = {}
        self.idle: frozenset[str] = frozenset()
        """The sites among the taps that are not computed in this step."""
        self._choices = (
            None if self._ids is None else Choices(step, (len(self._ids), self._length), found.tied, generated)
        )
        self.outputs: Mapping[str, torch.Tensor] = {}
        """The engine's final outputs: taps of the same values are kept until the reference has its own."""
        self._held: dict[str, tuple[Tap, torch.Tensor, torch.Tensor]] = {}

    def take_engine(self, site: str, tensor: torch.Tensor) -> None:
        """Hold a tap of the engine."""
        self.engine[site] = tensor
        self._delivered.add(site)

    def take_noisy(self, site: str, tensor: torch.Tensor) -> None:
        """Hold a tap of the reference in the engine's dtype."""
        self._noisy[site] = tensor.clone()

    def take_repeated(self, site: str, tensor: torch.Tensor) -> None:
        """Hold a tensor of a first run of the reference, which the second has to repeat."""
        self._repeated[site] = tensor.clone()

    def take_reference(self, site: str, tensor: torch.Tensor) -> None:
        """Compare a tap of the reference with what the others hold."""
        actual = self.engine.pop(site, None)
        if actual is None:
            return
        order, tap = self._taps[site]
        noisy = self._noisy.pop(site, None)
        if tap.value in self.outputs:
            self._held[tap.value] = tap, actual, tensor
        self.compare(order, tap, actual, tensor, noisy)

    def finish(self, theirs: Mapping[str, torch.Tensor], *, recorded: bool = False) -> None:
        """Compare the final outputs with the reference's, each under its own name, and note what only one side had.

        One that a tap delivered on both sides is judged there. A ``recorded`` reference may lack outputs.
        """
        ours = self.outputs
        # Class maps come last: the noise floor of their scores is known then.
        for i, (name, expected) in sorted(enumerate(theirs.items()), key=lambda item: is_class_map(item[1][1])):
            if name not in ours:
                self._found.missing.setdefault(name, "the engine does not return this output")
            elif not self._is_tapped(name, expected):
                tap = self._output(name if name not in self._taps else f"output:{name}", name, expected)
                actual = self._without_ties(name, ours[name], theirs)
                self.compare(len(self._taps) + i, tap, actual, expected, self.noisy_outputs.get(name), final=True)
        for name in ours.keys() - theirs.keys():
            if recorded:
                self._found.note(f"the reference has no output {name!r}: it is not compared")
            else:
                self._found.missing.setdefault(name, "the reference does not return this output")
        if "logits" in ours and "logits" in theirs:
            self.compare_logits(ours["logits"], theirs["logits"])
        for site, tensor in self.engine.items():
            if ":in." in site and is_mask(tensor):  # eager builds no mask where nothing is to be hidden
                self._found.note(f"{site} is a mask that only the engine has; it is not compared")
            elif is_operator(site):  # the code asks whether it is exported
                self._found.note(f"{site} is computed in the exported model alone; it is not compared")
            else:
                self._found.missing.setdefault(site, "the reference did not compute it")
        for site in self._taps.keys() - self._delivered - self.idle:
            self._found.missing.setdefault(site, f"the engine did not deliver it at step {self.step}")

    def finish_untapped(self, deployed: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
        """Compare the outputs of the engine without taps, which is what gets deployed, where they are others."""
        order = len(self._taps) + len(theirs)
        for i, (name, expected) in enumerate(theirs.items()):
            site = name + UNTAPPED
            if name in self.outputs and name not in deployed:
                self._found.missing.setdefault(site, "the untapped engine does not return this output")
            elif name in deployed and not same_tensor(deployed[name], self.outputs.get(name)):
                actual = self._without_ties(name, deployed[name], theirs)
                self.compare(order + i, self._output(site, name, expected), actual, expected, final=True)

    def _without_ties(self, name: str, actual: torch.Tensor, theirs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return an output; a class map has the reference's class where the reference's scores nearly tie."""
        expected = theirs[name]
        if not is_class_map(expected) or actual.shape != expected.shape or torch.equal(actual, expected):
            return actual
        known = ((other, self._found.floor.get(other, {}).get(self.step)) for other in theirs)
        floors = {other: noise.rel_l2 for other, noise in known if noise and self._tolerance.usable(noise.rel_l2)}
        settled = without_ties(actual, expected, theirs, floors)
        if ties := int((settled != actual).sum()):
            self._found.note(f"{name}, step {self.step}: {ties} of {actual.numel()} classes are near ties")
        return settled

    def _is_tapped(self, name: str, expected: torch.Tensor) -> bool:
        """Tell whether a tap was this very output on both sides; its result is then the output's."""
        if name not in self._held:
            return False
        tap, actual, tapped = self._held.pop(name)
        if not same_tensor(actual, self.outputs[name]) or not same_tensor(tapped, expected):
            return False
        for i, result in enumerate(self._found.results):
            if (result.step, result.site) == (self.step, tap.site):
                self._found.results[i] = replace(result, final=True)
                known = self._found.floor.get(tap.site, {}).get(self.step)
                if known is not None:
                    self._found.floor.setdefault(name, {})[self.step] = known
        return True

    def _output(self, site: str, name: str, tensor: torch.Tensor) -> Tap:
        """Describe a final output as a tap, with the names of its dimensions where they are known."""
        axes = self._axes.get(name, ())
        if len(axes) != tensor.ndim:
            axes = ("batch", *("",) * (tensor.ndim - 1)) if tensor.ndim else ()
        return Tap(site, name, axes=axes)

    def compare_logits(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Measure the last token's logits of [batch, length, vocab], all of [tokens, vocab], once a step.

        Of a quantized engine, which is judged by them, those of every token count.
        """
        if ours.dim() < 2 or not ours.numel() or any(found.step == self.step for found in self._found.logits):
            return
        kind, actual, expected = judged_dtype(ours.dtype, theirs.dtype), last_logits(ours), last_logits(theirs)
        # Logits of two shapes: the comparison of the site, or of the output, says so by name.
        if actual.shape == expected.shape and name_of(kind) in DTYPES:
            found = measure_logits(actual, expected, dtype=rounded_as(kind, self._dtype), step=self.step)
            self._found.flips[self.step] = found.flips
            if self._every_token and ours.dim() == 3 and ours.shape == theirs.shape:
                actual, expected = self._real_tokens(ours), self._real_tokens(theirs)
                found = measure_logits(actual, expected, dtype=rounded_as(kind, self._dtype), step=self.step)
            self._found.logits.append(self._with_perplexity(found, ours, theirs))

    def _real_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [tokens, vocab] of a batch [batch, length, vocab] without its padding."""
        mask = self._mask[:, -logits.shape[1] :].bool() if self._masked_logits and self._mask is not None else None
        if mask is None or mask.shape != logits.shape[:2]:
            return logits.flatten(0, 1)
        return logits[mask.to(logits.device)]

    def _with_perplexity(self, found: LogitsMetrics, actual: torch.Tensor, expected: torch.Tensor) -> LogitsMetrics:
        """Add the perplexity of the prompt on both sides, where both computed the logits of all its tokens."""
        if self.step or not self._generated or self._ids is None or self._mask is None:
            return found
        if self._mask.shape != self._ids.shape or not actual.shape[:2] == expected.shape[:2] == self._ids.shape:
            return found
        ours, theirs = perplexities(actual, expected, next_tokens(self._ids, self._mask))
        return replace(found, perplexity_actual=ours, perplexity_expected=theirs)

    def compare(
        self,
        order: int,
        tap: Tap,
        actual: torch.Tensor,
        expected: torch.Tensor,
        noisy: torch.Tensor | None = None,
        *,
        final: bool = False,
    ) -> None:
        """Measure one tensor; ``noisy`` is the reference's in the engine's dtype, ``final``: an output of the model.

        Two shapes make the site missing.
        """
        valid = None if self._mask is None else valid_elements(tap.axes, self._mask, self._length)
        valid, tied = self._without_choices(tap, expected, valid)
        if tap.value == "logits" and actual.shape != expected.shape:
            actual, expected, noisy, valid = self._last_tokens(actual, expected, noisy, valid)
        try:
            metrics = self._measure(actual, expected, tap, valid, final=final)
            metrics = self._with_requests(metrics, actual, expected, tap, valid)
            if noisy is not None:
                noise = self._floor(noisy, expected, tap, valid)
                self._found.floor.setdefault(tap.site, {})[self.step] = noise
        except ShapeMismatch as error:
            self._found.missing.setdefault(tap.site, str(error))
            return
        floors = self._found.floor.get(tap.site) or self._found.floor.get(tap.value, {})
        known = floors.get(self.step)
        if self._choices is not None and known is not None and self._tolerance.usable(known.rel_l2):
            self._choices.take(tap, actual, expected, noisy, known.rel_l2)
        self._found.results.append(
            SiteResult(
                self.step,
                tap.site,
                order,
                metrics,
                UNJUDGED,
                None if known is None else known.rel_l2,
                final=final,
                dtype=self._own_dtype(actual, expected, tap),
                row=self._row(actual, expected, known, tap, valid) if metrics.rel_l2 else None,
                element=None if known is None else known.max_abs,
                tied=tied,
            )
        )

    def _without_choices(
        self, tap: Tap, tensor: torch.Tensor, valid: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, str]:
        """Return what of a tap is judged where experts nearly tied, and the reason where nothing of it is left."""
        if self._choices is None:
            return valid, ""
        left = self._choices.left(tap, tensor, valid)
        if left is valid or left is None:
            return valid, ""
        self._found.note(f"{self._choices.reason()}: what depends on it is not judged")
        return left, "" if bool(left.any()) else self._choices.reason()

    def _row(
        self,
        actual: torch.Tensor,
        expected: torch.Tensor,
        noise: Noise | None,
        tap: Tap,
        valid: torch.Tensor | None,
    ) -> RowError | None:
        """Return the row furthest beyond its floor; without floors small rows are measured against the usual row."""
        floors = torch.tensor(noise.rows, dtype=torch.float64) if noise and noise.rows else None
        a, b = as_masks(actual, expected)
        errors = row_errors(a, b, tap.axes, valid, least=1.0 if floors is None else SMALL)
        if errors is None or (floors is not None and len(floors) != len(errors)):
            return None
        return worst_row(errors.cpu(), floors, b.shape, tap.axes)

    def _floor(self, noisy: torch.Tensor, expected: torch.Tensor, tap: Tap, valid: torch.Tensor | None) -> Noise:
        """Return the reference's own error; NaN where it is random."""
        first = self._repeated.pop(tap.site, None)
        if first is not None:
            if first.dim() == 3:  # the engine may have the last token's logits only
                first = first[:, -expected.shape[1] :]
            twice = measure(first, expected, axes=tap.axes, valid=valid, equal_nan=True)
            if not twice.rel_l2 <= TABLE.get(name_of(expected.dtype), 0.0):
                self._found.random.add(tap.site)
        if tap.site in self._found.random:
            return Noise(math.nan)
        found = self._measure(noisy, expected, tap, valid)
        if self._own_dtype(noisy, expected, tap) in INTEGERS:
            return Noise(found.mismatch_ratio)
        rows = row_errors(*as_masks(noisy, expected), tap.axes, valid)
        # Three digits, so that a floor read from its file gives the same verdict.
        digits = () if rows is None else tuple(float(f"{error:.2e}") for error in rows.tolist())
        return Noise(found.rel_l2, found.max_abs, digits)

    def _own_dtype(self, actual: torch.Tensor, expected: torch.Tensor, tap: Tap) -> str:
        """Return the dtype whose bounds are a tensor's own: integers', and any where the engine's is not known.

        A reference that was recorded in a coarser dtype than the engine's has its own rounding.
        """
        if tap.dtype in INTEGERS:  # a dump may hold ids as floats
            return tap.dtype
        masks = as_masks(actual, expected)
        kind = name_of(judged_dtype(masks[0].dtype, masks[1].dtype))
        recorded = EPSILON.get(name_of(expected.dtype), 0.0) > EPSILON.get(self._dtype, math.inf)
        return kind if kind in INTEGERS or recorded or not self._dtype else ""

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

    def _measure(
        self,
        actual: torch.Tensor,
        expected: torch.Tensor,
        tap: Tap,
        valid: torch.Tensor | None,
        *,
        final: bool = False,
    ) -> Metrics:
        actual, expected = as_masks(actual, expected)
        names = self._names(tap)
        if final or tap.value in self.outputs:
            names = (*names, tap.value)
        rtol, atol = self._tolerance.elementwise(names, self.step)
        usual = self._elementwise
        if self._own_dtype(actual, expected, tap) in INTEGERS:
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

    def _names(self, tap: Tap) -> tuple[str, ...]:
        """Return the names by which a rule may mean a tensor; an output of the untapped engine has the tapped one's."""
        return (*output_names(tap.site, (other for _, other in self._taps.values())), *tap.aliases)

    def _with_requests(
        self, metrics: Metrics, actual: torch.Tensor, expected: torch.Tensor, tap: Tap, valid: torch.Tensor | None
    ) -> Metrics:
        """Add what rules ask for by any name under which the tensor may be judged: its own, or the output's."""
        rules = self._tolerance.requests((*self._names(tap), tap.value), self.step)
        if not rules:
            return metrics
        return replace(metrics, requested=measure_requested(rules, metrics, *as_masks(actual, expected), valid))


def same_tensor(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    """Tell whether two tensors hold the same numbers; cheap where they share memory."""
    if second is None or first.shape != second.shape or first.dtype != second.dtype:
        return False
    shared = first.data_ptr() == second.data_ptr() and first.stride() == second.stride()
    return shared or (first.device == second.device and torch.equal(first, second))


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

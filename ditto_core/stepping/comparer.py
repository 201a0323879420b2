"""Brings the taps of one step together; each pair is measured and dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from ditto_core.compare.judging import OUTPUT, UNTAPPED, output_names
from ditto_core.compare.masks import is_mask
from ditto_core.compare.packed import is_small
from ditto_core.compare.tolerance import Tolerance
from ditto_core.model.forward import DECODED
from ditto_core.sites import Tap, is_operator
from ditto_core.stepping.choices import Choices, in_order
from ditto_core.stepping.logits import LogitsOfStep
from ditto_core.stepping.measured import Elementwise, Measured
from ditto_core.stepping.measuring import Measuring, StepPair
from ditto_core.stepping.prompts import valid_elements
from ditto_core.stepping.ties import is_class_map, without_ties

NOT_DELIVERED = "the engine did not deliver it"
"""How the reason begins where a tap that was promised did not come."""


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
        self._axes = axes or {}
        self._tolerance = tolerance
        self._measuring = Measuring(step, found, tolerance, dtype, elementwise or Elementwise())
        self._taps = {tap.site: (i, tap) for i, tap in enumerate(taps)}
        self.step = step
        self._found = found
        mask, ids = of_tokens(inputs, "attention_mask"), of_tokens(inputs, "input_ids")
        decoded = DECODED in inputs  # what has logits is not what ``input_ids`` and the mask speak of
        tokens = (None, None) if decoded else (ids, mask)
        self._logits = LogitsOfStep(step, found, dtype, *tokens, generated=generated, every_token=every_token)
        self._mask = None if mask is None or bool(mask.all()) else mask
        self._masks: dict[tuple[str, ...], torch.Tensor | None] = {}
        self._length = 0 if ids is None else ids.shape[1]
        self.engine: dict[str, torch.Tensor] = {}
        self._delivered: set[str] = set()
        self._noisy: dict[str, list[torch.Tensor]] = {}
        self.noisy_outputs: Sequence[Mapping[str, torch.Tensor]] = ()
        self._repeated: dict[str, torch.Tensor] = {}
        self.idle: frozenset[str] = frozenset()
        """The sites among the taps that are not computed in this step."""
        self._choices = None if ids is None else Choices(step, (ids.shape[0], ids.shape[1]), found.tied, generated)
        self.outputs: Mapping[str, torch.Tensor] = {}
        """The engine's final outputs: taps of the same values are kept until the reference has its own."""
        self._held: dict[str, tuple[Tap, torch.Tensor, torch.Tensor]] = {}

    def take_engine(self, site: str, tensor: torch.Tensor) -> None:
        """Hold a tap of the engine."""
        self.engine[site] = tensor
        self._delivered.add(site)

    def take_noisy(self, site: str, tensor: torch.Tensor) -> None:
        """Hold a tap of the reference in the engine's dtype: one sample of several."""
        self._noisy.setdefault(site, []).append(tensor.clone())

    def take_repeated(self, site: str, tensor: torch.Tensor) -> None:
        """Hold a tensor of a first run of the reference, which the second has to repeat."""
        self._repeated[site] = tensor.clone()

    def output_site(self, name: str) -> str:
        """Return what a final output is judged as: its name, unless a module has that."""
        return OUTPUT + name if name in self._taps else name

    def take_reference(self, site: str, tensor: torch.Tensor) -> None:
        """Compare a tap of the reference with what the others hold."""
        actual = self.engine.pop(site, None)
        if actual is None:
            return
        order, tap = self._taps[site]
        noisy = self._noisy.pop(site, [])
        if tap.value in self.outputs:
            self._held[tap.value] = tap, actual, tensor
        self.compare(order, tap, actual, tensor, noisy)

    def finish(self, theirs: Mapping[str, torch.Tensor], *, recorded: bool = False) -> None:
        """Compare the final outputs with the reference's, each under its own name, and note what only one side had.

        One that a tap delivered on both sides is judged there. A ``recorded`` reference may lack outputs.
        """
        self.flush()
        ours = self.outputs
        # Class maps come last: the noise floor of their scores is known then.
        for i, (name, expected) in sorted(enumerate(theirs.items()), key=lambda item: is_class_map(item[1][1])):
            if name not in ours:
                self._found.missing.setdefault(name, "the engine does not return this output")
            elif not self._is_tapped(name, expected):
                tap = self._output(self.output_site(name), name, expected)
                actual = self._without_ties(name, ours[name], theirs)
                noisy = [outputs[name] for outputs in self.noisy_outputs if name in outputs]
                self.compare(len(self._taps) + i, tap, actual, expected, noisy, final=True)
        for name in ours.keys() - theirs.keys():
            if recorded:
                self._found.note(f"the reference has no output {name!r}: it is not compared")
            else:
                self._found.missing.setdefault(name, "the reference does not return this output")
        self.flush()
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
            self._found.missing.setdefault(site, f"{NOT_DELIVERED} at step {self.step}")

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
        self.flush()

    def flush(self) -> None:
        """Measure what waits for others of its kind."""
        self._measuring.flush()

    def _without_ties(self, name: str, actual: torch.Tensor, theirs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return an output; a class map has the reference's class where the reference's scores nearly tie."""
        expected = theirs[name]
        if not is_class_map(expected) or actual.shape != expected.shape or torch.equal(actual, expected):
            return actual
        self.flush()
        known = ((other, self._found.floor.get(self.output_site(other), {}).get(self.step)) for other in theirs)
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
        results = self._found.results
        for i in range(len(results) - 1, -1, -1):
            if results[i].step != self.step:
                break
            if results[i].site == tap.site:
                results[i] = replace(results[i], final=True)
                known = self._found.floor.get(tap.site, {}).get(self.step)
                if known is not None:
                    self._found.floor.setdefault(self.output_site(name), {})[self.step] = known
        return True

    def _output(self, site: str, name: str, tensor: torch.Tensor) -> Tap:
        """Describe a final output as a tap, with the names of its dimensions where they are known."""
        axes = self._axes.get(name, ())
        if len(axes) != tensor.ndim:
            axes = ("batch", *("",) * (tensor.ndim - 1)) if tensor.ndim else ()
        return Tap(site, name, axes=axes)

    def compare_logits(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Measure the logits of both sides."""
        self._logits.compare(ours, theirs)

    def compare(
        self,
        order: int,
        tap: Tap,
        actual: torch.Tensor,
        expected: torch.Tensor,
        noisy: Sequence[torch.Tensor] = (),
        *,
        final: bool = False,
    ) -> None:
        """Measure one tensor, at the latest with :meth:`flush`. Two shapes make the site missing.

        ``noisy`` are the reference's in the engine's dtype, ``final``: an output of the model.
        """
        waits = is_small(expected)
        kept = expected.clone() if waits else expected  # the model may overwrite it
        pair = partial(self._pair, order, tap, actual, kept, noisy, final)
        self._measuring.add(pair, kept.numel() if waits else None)
        if tap.choice and self._choices is not None:
            self._measuring.flush()  # what is judged behind a choice depends on it
            floor = self._measuring.floor(tap)
            if floor is not None and self._tolerance.usable(floor.rel_l2):
                self._choices.take(tap, actual, expected, noisy, floor.rel_l2)

    def _pair(
        self,
        order: int,
        tap: Tap,
        actual: torch.Tensor,
        expected: torch.Tensor,
        noisy: Sequence[torch.Tensor],
        final: bool,
    ) -> StepPair:
        """Bring the sides of a tensor into line, and tell which of its elements count."""
        valid, tied = self._without_choices(tap, expected, self._valid(tap.axes))
        if valid is not None and not tied and not bool(valid.any()):
            tied = "padding covers all of it"
        if tap.value == "logits" and actual.shape != expected.shape:
            actual, expected, noisy, valid = self._last_tokens(actual, expected, noisy, valid)
        actual, noisy = in_order(actual, expected, tap.axes), [in_order(each, expected, tap.axes) for each in noisy]
        names = self._names(tap, final) if self._tolerance.rules else ()
        first = self._repeated.pop(tap.site, None) if noisy else None
        return StepPair(order, tap, actual, expected, noisy, first, valid, names, final, tied)

    def _names(self, tap: Tap, final: bool) -> tuple[str, ...]:
        """Return every name by which a rule may mean a tensor."""
        names = (*output_names(tap.site, (other for _, other in self._taps.values())), *tap.aliases)
        return (*names, tap.value) if final or tap.value in self.outputs else names

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

    def _valid(self, axes: tuple[str, ...]) -> torch.Tensor | None:
        """Return which elements of a tap with these axes count, one mask for all of them; None: all do."""
        if self._mask is None:
            return None
        if axes not in self._masks:
            self._masks[axes] = valid_elements(axes, self._mask, self._length)
        return self._masks[axes]

    def _last_tokens(
        self,
        actual: torch.Tensor,
        expected: torch.Tensor,
        noisy: Sequence[torch.Tensor],
        valid: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], torch.Tensor | None]:
        """Cut logits [batch, length, vocab] to the last token where one side computed no others."""
        if actual.dim() != 3 or expected.dim() != 3 or 1 not in (actual.shape[1], expected.shape[1]):
            return actual, expected, noisy, valid
        self._found.note("one side has the last token's logits only: the others' are not compared")
        return actual[:, -1:], expected[:, -1:], [each[:, -1:] for each in noisy], None


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

"""The logits of a step on both sides: flips, divergence, perplexity of the prompt."""

from __future__ import annotations

from dataclasses import replace

import torch

from ditto_core.compare.tokens import LogitsMetrics, measure_logits, next_tokens, perplexities, rounded_as
from ditto_core.spec import DTYPES
from ditto_core.stepping.measured import Measured
from ditto_core.stepping.measuring import judged_dtype, name_of


class LogitsOfStep:
    """Measures the logits of a step into ``found``, once.

    ``dtype`` is the engine's; near ties go by it where the logits are stored in a finer one. ``ids`` and ``mask``
    [batch, tokens] are those that the logits follow. ``generated``: the prompt has a perplexity; ``every_token``: the
    logits of all tokens count, not the last alone.
    """

    def __init__(
        self,
        step: int,
        found: Measured,
        dtype: str,
        ids: torch.Tensor | None,
        mask: torch.Tensor | None,
        *,
        generated: bool,
        every_token: bool,
    ) -> None:
        self._step = step
        self._found = found
        self._dtype = dtype
        self._ids = ids
        self._mask = mask
        self._generated = generated
        self._every_token = every_token
        self._measured: list[LogitsMetrics] = []

    def compare(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Measure the last token's logits of [batch, length, vocab], all of [tokens, vocab].

        Where a step has logits under several names, all that differ from each other count.
        Of a quantized engine, which is judged by them, those of every token count.
        """
        if ours.dim() < 2 or not ours.numel():
            return
        kind, actual, expected = judged_dtype(ours.dtype, theirs.dtype), last_logits(ours), last_logits(theirs)
        # Logits of two shapes: the comparison of the site, or of the output, says so by name.
        if actual.shape == expected.shape and name_of(kind) in DTYPES:
            found = measure_logits(actual, expected, dtype=rounded_as(kind, self._dtype), step=self._step)
            self._found.flips[self._step] = found.flips
            if self._every_token and ours.dim() == 3 and ours.shape == theirs.shape:
                actual, expected = self._real_tokens(ours), self._real_tokens(theirs)
                found = measure_logits(actual, expected, dtype=rounded_as(kind, self._dtype), step=self._step)
            measured = self._with_perplexity(found, ours, theirs)
            if measured not in self._measured:
                self._measured.append(measured)
                self._found.logits.append(measured)

    def _real_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [tokens, vocab] of a batch [batch, length, vocab] without its padding."""
        mask = None if self._mask is None else self._mask[:, -logits.shape[1] :].bool()
        if mask is None or mask.shape != logits.shape[:2]:
            return logits.flatten(0, 1)
        return logits[mask.to(logits.device)]

    def _with_perplexity(self, found: LogitsMetrics, actual: torch.Tensor, expected: torch.Tensor) -> LogitsMetrics:
        """Add the perplexity of the prompt on both sides, where both computed the logits of all its tokens."""
        if self._step or not self._generated or self._ids is None or self._mask is None:
            return found
        if self._mask.shape != self._ids.shape or not actual.shape[:2] == expected.shape[:2] == self._ids.shape:
            return found
        ours, theirs = perplexities(actual, expected, next_tokens(self._ids, self._mask))
        return replace(found, perplexity_actual=ours, perplexity_expected=theirs)


def last_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's logits: those of the last token of [batch, length, vocab], all of [batch, classes]."""
    return logits[:, -1] if logits.dim() == 3 else logits

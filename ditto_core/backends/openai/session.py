"""A server stepped beside a reference: each step asks for the log-probabilities of one token after all before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ditto_core.backends.openai.openai_options import OpenAIOptions
from ditto_core.backends.openai.server import next_logprobs, served_model, tokenized, told
from ditto_core.backends.packing import prompts
from ditto_core.backends.served.forcing import LOGITS
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec


class OpenAISession:
    """Implements :class:`~ditto_core.session.Session` without taps. ``logits`` are log-probabilities.

    They differ from logits by a constant of each row, so that the server is judged as a quantized engine is: by KL and
    by the tokens that it would choose.
    """

    taps: tuple[Tap, ...] = ()

    def __init__(self, spec: EngineSpec, vocabulary: int) -> None:
        self._options = OpenAIOptions.of(spec)
        self._model = served_model(self._options)
        self._vocabulary = vocabulary
        self._rows: list[list[int]] = []
        facts = {"server": self._options.url, "served model": self._model, **told(self._options, self._model)}
        if 0 <= self._options.top < vocabulary:
            facts["log-probabilities"] = f"{self._options.top} of {vocabulary} tokens, the rest in equal shares"
        label = f"openai {self._model}"
        self.info = SessionInfo(label, "openai", spec.dtype, "server", spec.model.label, facts, quantized=True)

    def start(self, batch: int) -> None:
        """Forget the rows."""
        self._rows = []

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Ask for the next token of each row; see :class:`~ditto_core.session.Session`."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        new = [row.tolist() for row in prompts(ids, mask[:, -ids.shape[1] :])]
        self._rows = [[*old, *tokens] for old, tokens in zip(self._rows or [[] for _ in new], new, strict=True)]
        return {LOGITS: next_logprobs(self._options, self._model, self._rows, self._vocabulary)}

    def tokens(self, text: str) -> Sequence[int] | None:
        """Return the ids that the server makes of a text; None where it does not tell."""
        return tokenized(self._options, self._model, prompt=text, content=text)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int] | None:
        """Return the ids that the server makes of a conversation; None where it does not tell."""
        return tokenized(self._options, self._model, messages=messages)

    def settings(self) -> Mapping[str, object]:
        """Return nothing: a server does not tell its model's configuration."""
        return {}

    def generation(self) -> None:
        """Return None: a server does not tell what it samples with."""

    def close(self) -> None:
        """Nothing is held open."""

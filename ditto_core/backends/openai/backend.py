"""The backend: a running server, asked over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ditto_core.backends.base import BuildReport, BuildRequest
from ditto_core.backends.openai.openai_options import OpenAIOptions
from ditto_core.errors import SelectorError
from ditto_core.session import Session
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

MANIFEST = "openai.json"
REASON = "a server shows its log-probabilities alone"


class OpenAIBackend:
    """An OpenAI-compatible server: vLLM, SGLang, llama.cpp, TensorRT-LLM's. Settings:
    :class:`~ditto_core.backends.openai.openai_options.OpenAIOptions`."""

    name = "openai"
    dtypes = ("float32", "float16", "bfloat16")

    def check(self, spec: EngineSpec) -> None:
        """Raise when an option is unknown or the address is missing."""
        OpenAIOptions.of(spec)

    def versions(self) -> dict[str, str]:
        """Return nothing: what the server runs is its own affair, and is asked when a session is opened."""
        return {}

    def raw_taps(self, name: str, alias: str) -> Sequence[Tap]:
        """Raise: a server has no names inside."""
        raise SelectorError(f"openai has no raw names, got {name!r}: {REASON}")

    def build(self, request: BuildRequest) -> BuildReport:
        """Note the vocabulary's size; there is nothing to build."""
        from ditto_core.model.checkpoint import vocab_size
        from ditto_core.model.loading import load_model

        model = request.load() if request.load else load_model(request.spec.model)
        size = {"vocabulary": vocab_size(model.module.config)}
        (request.directory / MANIFEST).write_text(json.dumps(size) + "\n")
        return BuildReport((), {tap.site: REASON for tap in request.taps}, {})

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> Session:
        """Ask the server for its model."""
        from ditto_core.backends.openai.session import OpenAISession

        return OpenAISession(spec, int(json.loads((directory / MANIFEST).read_text())["vocabulary"]))

    def running(self, spec: EngineSpec, directory: Path) -> Mapping[str, str]:
        """Return the server's model and what else it tells. Raises :class:`BackendError` when it does not answer."""
        return self.open(spec, directory, ()).info.facts

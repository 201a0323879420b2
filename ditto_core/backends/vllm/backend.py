"""The backend: checks a spec, finds out which modules run, opens sessions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ditto_core.backends.base import BuildReport, BuildRequest
from ditto_core.backends.served.source import model_facts, served_model
from ditto_core.backends.vllm import serving
from ditto_core.backends.vllm.names import place_of
from ditto_core.backends.vllm.vllm_options import VllmOptions
from ditto_core.errors import BackendError, SelectorError
from ditto_core.session import Session, TakesRequests
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec
from ditto_core.system.fingerprint import directory_digest

MANIFEST = "vllm.json"
MODULES = "modules.json"
BLOCK = 32
"""Tokens of a block of the cache where requests compete for it or share it."""
CHUNK = 16
"""Tokens of a pass that cuts prompts."""


class VllmBackend:
    """vLLM in this process. Settings: :class:`~ditto_core.backends.vllm.vllm_options.VllmOptions`."""

    name = "vllm"
    dtypes = ("float32", "float16", "bfloat16")

    def check(self, spec: EngineSpec) -> None:
        """Raise when vLLM is missing, lacks the dtype, or an option is unknown."""
        VllmOptions.of(spec)
        self.versions()
        if spec.dtype not in self.dtypes:
            raise BackendError(f"vllm has no {spec.dtype} kernels, expected {', '.join(self.dtypes)}")

    def versions(self) -> dict[str, str]:
        """Return the version of vLLM. Raises :class:`BackendError` when it is not installed."""
        found = serving.installed()
        if not found:
            raise BackendError(f"vllm is not installed: {serving.HINT}")
        return found

    def content(self, spec: EngineSpec) -> dict[str, str]:
        """Return the digest of the checkpoint that is served in the model's place; nothing where that is the model."""
        checkpoint = VllmOptions.of(spec).checkpoint
        return {"checkpoint": directory_digest(Path(checkpoint))} if checkpoint else {}

    def raw_taps(self, name: str, alias: str) -> Sequence[Tap]:
        """Raise: vLLM's modules have the names of sites, and no others."""
        raise SelectorError(f"vllm has no raw names, got {name!r}: ask for the model's own modules")

    def modes(self, spec: EngineSpec) -> Mapping[str, Mapping[str, Any]]:
        """Return the options of each way of serving whose numbers must agree with the plain one's."""
        block, rows = block_size(spec), spec.profile.batch.max
        # a new prefix is cut where its blocks end, so that what is behind a cached one runs in the same shapes
        cached = {"engine.enable_prefix_caching": True, "engine.block_size": block, **chunks(-(-rows // block) * block)}
        return {"plain": {}, "prefix_cache": cached, "chunked_prefill": chunks(max(CHUNK, rows))}

    def build(self, request: BuildRequest) -> BuildReport:
        """Find the taps among the modules that run. vLLM builds nothing ahead: each session loads the model."""
        spec, directory = request.spec, request.directory
        facts = {} if VllmOptions.of(spec).checkpoint else model_facts(request, self.name)
        (directory / MANIFEST).write_text(json.dumps(facts) + "\n")
        if not request.taps:
            return BuildReport((), {}, {"compiled": not VllmOptions.of(spec).eager(tapped=False)})
        llm = serving.start(spec, model_of(spec, directory), tapped=True)
        try:
            modules = serving.explore(llm)
        finally:
            serving.stop(llm)
        modules.save(directory / MODULES)
        return report(request.taps, modules)

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> Session:
        """Load the model into a vLLM engine in this process."""
        from ditto_core.backends.vllm.session import VllmSession

        model = model_of(spec, directory)
        return VllmSession(spec, model, taps)

    def open_requests(self, spec: EngineSpec, directory: Path) -> TakesRequests:
        """Load the model as it is served: prefixes cached, prompts cut, and blocks for one request of full length."""
        from ditto_core.backends.vllm.requests import VllmRequests

        model = model_of(spec, directory)
        limit = serving.limit(spec, model)
        block = block_size(spec)
        settings = {
            "engine.block_size": block,
            "engine.num_gpu_blocks_override": -(-limit // block) + 2,  # vLLM keeps one for itself
            "engine.enable_prefix_caching": True,
            **chunks(max(CHUNK, spec.profile.batch.max)),
        }
        options = tuple(sorted({**settings, **dict(spec.options)}.items()))
        return VllmRequests(replace(spec, options=options), model)


def model_of(spec: EngineSpec, directory: Path) -> str:
    """Return the directory that vLLM loads: the checkpoint of the options, or the model."""
    manifest = json.loads((directory / MANIFEST).read_text())
    return VllmOptions.of(spec).checkpoint or served_model(manifest, spec, directory)


def block_size(spec: EngineSpec) -> int:
    """Return how many tokens a block of the cache holds."""
    return int(dict(spec.options).get("engine.block_size", BLOCK))


def chunks(tokens: int) -> dict[str, Any]:
    """Return the options under which a pass takes so many tokens at most, and cuts a prompt that has more."""
    return {"engine.enable_chunked_prefill": True, "engine.max_num_batched_tokens": tokens}


def report(taps: Iterable[Tap], modules: serving.Modules) -> BuildReport:
    """Return the taps with their places, and a reason for each site that vLLM computes nowhere."""
    shown: list[Tap] = []
    refused: dict[str, str] = {}
    for tap in taps:
        place = place_of(tap, modules)
        if isinstance(place, str):
            refused[tap.site] = place
        else:
            shown.append(replace(tap, value=place.value))
    return BuildReport(tuple(shown), refused, {"modules": len(modules.classes)})

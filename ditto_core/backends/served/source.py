"""The Hugging Face directory that a server loads: the model that is named, or one written beside the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ditto_core.backends.base import BuildRequest
from ditto_core.cache import Cache
from ditto_core.errors import BuildError, UsageError
from ditto_core.model.checkpoint import identity_of, is_gguf, locate
from ditto_core.spec import EngineSpec, ModelSource
from ditto_core.system.fingerprint import directory_digest

MODEL_FOLDER = "model"


def model_facts(request: BuildRequest, backend: str) -> dict[str, str]:
    """Return what an engine's manifest says of its model: the digest of the files that it is served from.

    No path: in the cache one engine serves every model of the same content. A factory's module, and a GGUF file's in
    float32, is saved beside the engine.

    TensorRT-LLM also takes a module in memory, but not in 0.12 and 0.13, and later only with its converter off.
    """
    from ditto_core.model.loading import load_model

    source = request.spec.model
    if source.factory is None and not is_gguf(locate(source)):
        return {"digest": files_digest(source)}
    loaded = request.load() if request.load else load_model(source)
    if not loaded.decoder:
        raise UsageError(f"{backend} runs decoders, {source.label} is not a decoder")
    module: Any = loaded.module
    module.save_pretrained(request.directory / MODEL_FOLDER)
    return {"model": MODEL_FOLDER}


def served_model(facts: Mapping[str, Any], spec: EngineSpec, directory: Path) -> str:
    """Return the directory of the model that an engine serves.

    Raises :class:`BuildError` where the model that the spec names is not what the engine was built of.
    """
    if facts.get("model") == MODEL_FOLDER:
        return str(directory / MODEL_FOLDER)
    found = locate(spec.model)
    if facts.get("digest", "") not in ("", files_digest(spec.model)):
        raise BuildError(
            f"the engine in {directory} serves another model than {spec.model.location} is now: build the engine "
            "again, or put back the model"
        )
    return str(found)


def files_digest(source: ModelSource) -> str:
    """Return the digest of a model's files; an unchanged one is read once."""
    return directory_digest(*identity_of(source), Cache.at().memo)

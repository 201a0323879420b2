"""The Hugging Face directory that a server loads: the one that is given, or one written beside the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ditto_core.backends.base import BuildRequest
from ditto_core.errors import BackendError

MODEL_FOLDER = "model"


def model_directory(request: BuildRequest, backend: str) -> str:
    """Return a Hugging Face directory of the model. A factory's module, and a GGUF file's in float32, is saved beside
    the engine.

    TensorRT-LLM also takes a module in memory, but not in 0.12 and 0.13, and later only with its converter off.
    """
    from ditto_core.model.checkpoint import is_gguf, locate
    from ditto_core.model.loading import load_model

    spec, folder = request.spec, request.directory / MODEL_FOLDER
    if spec.model.factory is None:
        found = locate(spec.model)
        if not is_gguf(found):
            return str(found)
    loaded = request.load() if request.load else load_model(spec.model)
    if not loaded.decoder:
        raise BackendError(f"{backend} runs decoders, {spec.model.label} is none")
    module: Any = loaded.module
    module.save_pretrained(folder)
    return MODEL_FOLDER


def resolve_model(model: str, directory: Path) -> str:
    """Return the directory of a model that may lie beside the engine."""
    return str(directory / MODEL_FOLDER) if model == MODEL_FOLDER else model

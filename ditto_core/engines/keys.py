"""What an export and an engine are cached under: digests of all that decides their bytes."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from ditto_core.backends.base import Backend, CompilesForCpu, HasContent
from ditto_core.errors import ModelError
from ditto_core.model.checkpoint import has_adapter, locate
from ditto_core.system.fingerprint import fingerprint
from ditto_core.system.receipt import version

if TYPE_CHECKING:
    from ditto_core.spec import EngineSpec, ModelSource


def graph_key(spec: EngineSpec, model: str) -> str:
    """Return the key of an export with an ONNX graph; ``model`` is the digest of the model's content."""
    sizes = [spec.dynamic, [name for name, _ in spec.profile.more], spec.later, spec.operators]
    versions = [*export_versions(), *adapter_versions(spec.model)]
    return fingerprint(model, spec.dtype, spec.attention, spec.opset, sizes, versions)


def outline_key(spec: EngineSpec, model: str) -> str:
    """Return the key of an export without a graph, for a backend that builds from the source."""
    import transformers

    from ditto_core.model.exported import FORMAT
    from ditto_core.version import __version__

    versions = [__version__, FORMAT, transformers.__version__, *adapter_versions(spec.model)]
    return fingerprint("outline", model, spec.dtype, spec.attention, versions)


def dequantized_key(model: str) -> str:
    """Return the key of a GGUF file's float32 copy: transformers and gguf decide what is made of the file's bytes.

    Raises :class:`ModelError` where gguf is not installed.
    """
    try:
        versions = [metadata.version(name) for name in ("transformers", "gguf")]
    except metadata.PackageNotFoundError as error:
        hint = "pip install 'pytest-ditto-engine[gguf]'"
        raise ModelError(f"a GGUF file needs the package {error.name}: {hint}") from error
    return fingerprint("dequantized", model, versions)


def content_key(export: str, digest: str) -> str:
    """Return what stands for an export in its engines' keys: the ``digest`` of its files where it has a graph.

    An outline has no weights and gets no ``digest``: its own key, ``export``, stands for them.
    """
    return fingerprint(digest, export_versions()) if digest else export


def engine_key(spec: EngineSpec, backend: Backend, content: str) -> str:
    """Return the key of an engine; ``content`` as :func:`content_key` gives it."""
    facts = {name: value for name, value in spec.to_json().items() if name != "model"}  # the export has its content
    own = backend.content(spec) if isinstance(backend, HasContent) else {}
    return fingerprint(content, facts, {**versions_of(spec, backend), **own})


def versions_of(spec: EngineSpec, backend: Backend) -> dict[str, str]:
    """Return what decides an engine's bits beside model and spec: the libraries, and whose machine code it has."""
    return {**backend.versions(), **(backend.machine_code(spec) if isinstance(backend, CompilesForCpu) else {})}


def adapter_versions(source: ModelSource) -> list[str]:
    """Return peft's version where it puts an adapter on a model's weights."""
    adapted = source.factory is None and has_adapter(locate(source))
    return [f"peft {version('peft')}"] if adapted else []


@cache
def export_versions() -> tuple[str | int, ...]:
    """Return what decides an export beside the model. Importing onnxscript for its version would take seconds."""
    import torch
    import transformers

    from ditto_core.model.exported import FORMAT
    from ditto_core.version import __version__

    return __version__, FORMAT, torch.__version__, transformers.__version__, metadata.version("onnxscript")

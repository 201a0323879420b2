"""Load an engine file, and say why when this GPU does not take it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditto_core.backends.tensorrt.library import Library, Messages
from ditto_core.backends.tensorrt.manifest import ENGINE_FILE
from ditto_core.backends.tensorrt.state import KERNELS, read_state, state_file, update_state
from ditto_core.backends.tensorrt.tensorrt_options import TensorrtOptions
from ditto_core.errors import RunError
from ditto_core.system.gpus import describe_gpu


@dataclass
class Loaded:
    """An engine with its execution context; ``kernels`` is TensorRT-RTX's cache of what it compiled, or None."""

    runtime: Any
    engine: Any
    context: Any
    kernels: Any = None
    kernels_file: Path | None = None

    def close(self) -> None:
        """Write the compiled kernels back and free the engine, the context first."""
        if self.kernels is not None:
            update_state(self.kernels_file, lambda _: bytes(self.kernels.serialize()))
        self.context = self.kernels = None
        self.engine = None
        self.runtime = None


def load_engine(library: Library, messages: Messages, directory: Path, options: TensorrtOptions) -> Loaded:
    """Deserialize the engine in a directory and make a context. Raises :class:`RunError` with TensorRT's reason."""
    try:
        content = (directory / ENGINE_FILE).read_bytes()
    except OSError as error:
        raise RunError(f"the engine file {directory / ENGINE_FILE} cannot be read: {error.strerror}") from error
    runtime = library.module.Runtime(messages.logger)
    try:
        engine = runtime.deserialize_cuda_engine(content)
    except RuntimeError as error:
        raise RunError(refusal(library, messages, runtime, content)) from error
    if engine is None:
        raise RunError(refusal(library, messages, runtime, content))
    return with_context(library, messages, Loaded(runtime, engine, None), directory, options)


def with_context(
    library: Library, messages: Messages, loaded: Loaded, directory: Path, options: TensorrtOptions
) -> Loaded:
    """Make the execution context; with TensorRT-RTX, one that knows the kernels of earlier sessions."""
    if library.rtx:
        config = loaded.engine.create_runtime_config()
        loaded.kernels_file = kernels_file(library, directory)
        loaded.kernels = config.create_runtime_cache()
        known = read_state(loaded.kernels_file)
        if known:
            loaded.kernels.deserialize(known)
        config.set_runtime_cache(loaded.kernels)
        if options.cuda_graphs:
            config.cuda_graph_strategy = library.module.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        loaded.context = loaded.engine.create_execution_context(config)
    else:
        loaded.context = loaded.engine.create_execution_context()
    if loaded.context is None:
        raise RunError(f"{library.label} cannot make an execution context: {reason(messages)}")
    return loaded


def kernels_file(library: Library, directory: Path) -> Path | None:
    """Return where the kernels that this engine compiles on this GPU are kept."""
    gpu = describe_gpu()
    return state_file(directory, KERNELS, directory.name[:32], library.version, gpu["gpu"], gpu["driver"])


def refusal(library: Library, messages: Messages, runtime: Any, content: bytes) -> str:
    """Say why an engine does not load: the GPU, the last errors, and the diagnosis where TensorRT offers one."""
    gpu, why = describe_gpu()["gpu"], diagnosis(library, runtime, content) + reason(messages)
    return f"{library.label} {library.version} does not load the engine on {gpu}: {why}"


def diagnosis(library: Library, runtime: Any, content: bytes) -> str:
    """Return TensorRT-RTX's own list of what makes an engine invalid here, or an empty string."""
    known = getattr(getattr(library.module, "EngineInvalidityDiagnostics", None), "__members__", {})
    if not known or not hasattr(runtime, "get_engine_validity"):
        return ""
    _, flags = runtime.get_engine_validity(content)
    names = [name.lower().replace("_", " ") for name, member in known.items() if int(flags) & int(member)]
    return f"{', '.join(names)}; " if names else ""


def reason(messages: Messages) -> str:
    """Return the last errors, told as a lack of memory where they are one."""
    text = messages.last()
    return f"out of GPU memory ({text})" if "out of memory" in text.lower() else text

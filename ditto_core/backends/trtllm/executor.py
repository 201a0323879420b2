"""The C++ executor: debug tensors and additional outputs of whole generations, by version. It cannot be stepped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ditto_core.backends.trtllm import calls, detect
from ditto_core.errors import BackendError

DECODER_ONLY = "tensorrt_llm.bindings.executor.ModelType.DECODER_ONLY"


def debug_config(version: str, names: Sequence[str], iterations: int) -> Any:
    """Return a ``DebugConfig`` for the tensors that are named, or for all outputs when none is.

    From 0.14 on it keeps the last ``iterations`` in memory; 0.13 writes files, see :func:`files_only`.
    Raises :class:`BackendError` for 0.12, which has none.
    """
    if not calls.DEBUG_CONFIG.exists:
        raise BackendError(
            f"the executor of TensorRT-LLM {version} shows no tensors (0.13 does): use the Python runtime"
        )
    everything = not names
    wanted = calls.DEBUG_CONFIG.available(
        version,
        debug_input_tensors=False,
        debug_output_tensors=everything,
        dump_input_tensors=False,
        dump_output_tensors=everything,
        debug_tensor_names=list(names),
        debug_tensors_max_iterations=iterations,
    )
    return calls.DEBUG_CONFIG(**wanted)


def files_only(version: str) -> bool:
    """Tell whether a version can only write debug tensors to ``tllm_debug`` in the temporary directory."""
    return not calls.DEBUG_CONFIG.takes(version, "debug_tensors_max_iterations")


def additional(version: str, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return keywords for ``ExecutorConfig`` and for ``OutputConfig`` that ask for additional outputs.

    0.17 and 0.18 take names in the one and objects in the other, later versions objects in both.
    Raises :class:`BackendError` for a version without them.
    """
    if not names:
        return {}, {}
    if not calls.ADDITIONAL_OUTPUT.exists:
        raise BackendError(f"TensorRT-LLM {version} has no additional outputs (0.17 has): ask for debug tensors")
    objects = [calls.ADDITIONAL_OUTPUT(name=name, gather_context=True) for name in names]
    both = {"additional_model_outputs": objects, "additional_output_names": list(names)}
    return calls.EXECUTOR_CONFIG.available(version, **both), {"additional_model_outputs": objects}


class ExecutorRun:
    """One engine in the executor. ``debug`` names debug tensors (empty: all outputs), ``outputs`` further outputs."""

    def __init__(
        self, directory: Path, *, iterations: int, debug: Sequence[str] = (), outputs: Sequence[str] = ()
    ) -> None:
        self._version = detect.require().version
        config, self._output = additional(self._version, outputs)
        if not outputs:
            config["debug_config"] = debug_config(self._version, debug, iterations)
        settings = calls.EXECUTOR_CONFIG(max_beam_width=1, **config)
        self._executor = calls.EXECUTOR(str(directory), calls.attribute(DECODER_ONLY), settings)

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Any:
        """Generate from token ids and return the final result. It ignores the end token."""
        limit = calls.REQUEST.available(self._version, max_tokens=max_new_tokens, max_new_tokens=max_new_tokens)
        request = calls.REQUEST(
            input_token_ids=list(prompt), output_config=calls.OUTPUT_CONFIG(**self._output), **limit
        )
        (responses,) = calls.AWAIT(self._executor, calls.ENQUEUE(self._executor, [request]))
        return responses[-1].result

    def debug_tensors(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the debug tensors of each iteration that is in memory, oldest first."""
        if files_only(self._version):
            raise BackendError(
                "this version writes debug tensors to files: compare `tllm_debug` in the temporary directory"
            )
        for iteration in sorted(calls.LATEST_DEBUG_TENSORS(self._executor), key=lambda one: one.iter):
            yield {name: torch.as_tensor(tensor) for name, tensor in iteration.debug_tensors.items()}

    def close(self) -> None:
        """Stop the executor."""
        calls.SHUTDOWN(self._executor)


def additional_outputs(result: Any) -> dict[str, torch.Tensor]:
    """Return a result's additional outputs: ``context_…`` [prompt, …] and ``generation_…`` [beam, new tokens, …]."""
    return {output.name: torch.as_tensor(output.output) for output in result.additional_outputs}

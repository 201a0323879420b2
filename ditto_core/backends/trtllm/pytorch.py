"""The PyTorch backend (``tensorrt_llm.LLM`` from 1.0 on): forward hooks on the model inside a single-process worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ditto_core.backends.packing import new_tokens, prompts, to_rows
from ditto_core.backends.trtllm import calls, detect
from ditto_core.backends.trtllm.handoff import Handoff
from ditto_core.backends.trtllm.names import FUSED_QKV, Place
from ditto_core.backends.trtllm.session import LOGITS, NO_END, device, one_hot, settle
from ditto_core.errors import BackendError, RunError, UsageError
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

SINGLE_PROCESS = "TLLM_WORKER_USE_SINGLE_PROCESS"
NEXT_NORM = "next_layer_layernorm"
SHARED = (NEXT_NORM, "next_attn")
HEAD = "lm_head"


class TorchSession:
    """Implements :class:`~ditto_core.backends.base.Session` for one row at a time.

    CUDA graphs and the overlap scheduler are off (hooks do not run in a replayed graph), and blocks of the KV cache are
    not reused (a prefill would be cut short). Hooks are set after the model's warm-up. The output head hands each
    step's tensors over and then returns logits that force the caller's token.
    """

    def __init__(self, spec: EngineSpec, model: str, taps: tuple[Tap, ...], attn_backend: str = "TRTLLM") -> None:
        found = detect.require()
        os.environ[SINGLE_PROCESS] = "1"
        self.taps = taps
        self._places = {tap.site: Place.parse(tap.value) for tap in taps}
        self._limit = max(spec.profile.past.max + 1, spec.profile.length.max + 1)
        self._llm = calls.LLM(
            **calls.LLM.available(found.version, enable_trtllm_sampler=True),  # the other lacks context logits there
            model=model,
            dtype=spec.dtype,
            cuda_graph_config=None,
            disable_overlap_scheduler=True,
            kv_cache_config={"enable_block_reuse": False},
            max_batch_size=1,
            max_seq_len=self._limit,
            max_num_tokens=self._limit,
            skip_tokenizer_init=True,
            attn_backend=attn_backend,
        )
        self._engine = worker_engine(self._llm)
        self._module = self._engine.model
        self._heads = head_ratio(self._module)
        self._capture = Capture(self._module, {place.tensor for place in self._places.values()}, self._leave)
        self._handoff: Handoff | None = None
        self._request: Any = None
        facts = {"tensorrt_llm": found.version, "runtime": "PyTorch backend, one process", "attention": attn_backend}
        self.info = SessionInfo(f"trtllm pytorch {spec.dtype}", "trtllm", spec.dtype, device(), spec.model.label, facts)

    def start(self, batch: int) -> None:
        """End the sequence that was being stepped. Raises :class:`UsageError` for more than one row."""
        if self._request is not None:
            calls.ABORT(self._request)
        if self._handoff is not None:
            self._handoff.stop()
        self._handoff = self._request = None
        if batch > 1:
            raise UsageError(f"the PyTorch backend is stepped one row at a time, got {batch}: give one prompt")

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass; see :class:`~ditto_core.backends.base.Session`."""
        real = new_tokens(inputs["attention_mask"], inputs["input_ids"].shape[1])
        found = self._prefill(inputs) if self._handoff is None else self._handoff.step(inputs["input_ids"][:, 0])
        for tap in self.taps:
            place = self._places[tap.site]
            if place.tensor not in found:
                raise RunError(f"{place.module} of the PyTorch backend did not run, so {tap.site} cannot be shown")
            sizes = self._heads if FUSED_QKV.search(place.module) else (1,) * place.parts
            sink(tap.site, place.cut(to_rows(found[place.tensor], real), sizes))
        return {LOGITS: to_rows(found[LOGITS], real)}

    def close(self) -> None:
        """Take the hooks off and stop the backend."""
        with suppress(UsageError):
            self.start(0)
        self._capture.remove()
        calls.LLM_SHUTDOWN(self._llm)

    def _prefill(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        (prompt,) = prompts(inputs["input_ids"], inputs["attention_mask"])
        room = self._limit - len(prompt)
        sampling = calls.SAMPLING(max_tokens=room, end_id=NO_END, pad_id=0, ignore_eos=True, return_context_logits=True)
        self._handoff = Handoff(settle)
        self._request = calls.GENERATE_ASYNC(self._llm, inputs=prompt.tolist(), sampling_params=sampling)
        self._handoff.start(partial(calls.RESULT, self._request))  # its end is the end of the run
        return self._handoff.step()

    def _leave(self, tensors: dict[str, torch.Tensor]) -> Any:
        if self._handoff is None or getattr(self._engine, "is_warmup", False):
            return None
        return self._handoff.offer(tensors)


def worker_engine(llm: Any) -> Any:
    """Return the engine whose ``model`` is the module. Raises :class:`BackendError` when it is in another process."""
    try:
        return llm._executor.engine.model_engine
    except AttributeError as error:
        raise BackendError(
            f"the model of the PyTorch backend is out of reach ({error}): set {SINGLE_PROCESS}=1 before tensorrt_llm "
            f"is imported, and use one GPU"
        ) from error


class Capture:
    """Hooks on the modules that are wanted. Tensors are copied at once: fused norms write into their inputs."""

    def __init__(self, module: nn.Module, wanted: set[str], leave: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        self._found: dict[str, torch.Tensor] = {}
        self._leave = leave
        paths = dict(module_paths(module))
        known = {path: each for path, each in paths.items() if wanted & {path, f"{path}:in"}}
        self._handles = [
            each.register_forward_hook(partial(self._note, path, wanted), with_kwargs=True)
            for path, each in known.items()
            if path != HEAD
        ]
        self._handles += [
            each.register_forward_pre_hook(partial(self._note_input, path), with_kwargs=True)
            for path, each in known.items()
            if f"{path}:in" in wanted
        ]
        self._handles.append(paths[HEAD].register_forward_hook(self._finish))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _note(self, path: str, wanted: set[str], module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if path in wanted:
            tensor = block_output(module, output)
            if tensor is not None:
                self._found[path] = tensor.detach().clone()

    def _note_input(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensor = block_input(module, args, kwargs)
        if tensor is not None:
            self._found[f"{path}:in"] = tensor.detach().clone()

    def _finish(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        found, self._found = self._found, {}
        logits = output.detach().clone()
        tokens = self._leave({**found, HEAD: logits, LOGITS: logits})
        return None if tokens is None else one_hot(output, tokens.expand(output.shape[0]))


def block_output(module: nn.Module, output: Any) -> torch.Tensor | None:
    """Return a module's output in Hugging Face's sense.

    A decoder layer returns ``(hidden, residual)``. Where it runs the next layer's norm inside itself (Llama), its true
    output is the residual; where not (Qwen3), it is the sum. A norm called with a residual returns ``(normed, sum)``,
    of which the first counts.
    """
    if isinstance(output, torch.Tensor):
        return output
    if not isinstance(output, list | tuple) or not output or not isinstance(output[0], torch.Tensor):
        return None
    if not hasattr(module, "self_attn") or len(output) < 2 or not isinstance(output[1], torch.Tensor):
        return output[0]
    hidden, residual = output[0], output[1]
    return residual if getattr(module, NEXT_NORM, None) is not None else hidden + residual


def block_input(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return a module's input in Hugging Face's sense: layers and norms also get the residual, which belongs to it."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    hidden: torch.Tensor | None = kwargs.get("hidden_states", tensors[0] if tensors else None)
    residual: torch.Tensor | None = kwargs.get("residual", tensors[1] if len(tensors) > 1 else None)
    if residual is None or hidden is None:
        return hidden
    return residual if getattr(module, NEXT_NORM, None) is not None else hidden + residual


def module_paths(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules under the path where they belong: a layer also holds the next layer's norm and attention."""
    for path, each in module.named_modules(remove_duplicate=False):
        if not any(name in path.split(".") for name in SHARED):
            yield path, each


def head_ratio(module: nn.Module) -> tuple[int, int, int]:
    """Return the ratio of queries, keys and values in ``qkv_proj``."""
    config: Any = module.config
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return (heads, kv_heads, kv_heads)

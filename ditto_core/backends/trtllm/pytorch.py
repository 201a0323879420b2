"""The PyTorch backend (``tensorrt_llm.LLM`` from 1.0 on): forward hooks on the model inside a single-process worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ditto_core.backends.served.capture import Server
from ditto_core.backends.served.forcing import NO_END, device
from ditto_core.backends.served.place import Place
from ditto_core.backends.served.session import ServedSession
from ditto_core.backends.trtllm import calls, detect
from ditto_core.backends.trtllm.names import FUSED_QKV
from ditto_core.errors import UsageError
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

SINGLE_PROCESS = "TLLM_WORKER_USE_SINGLE_PROCESS"
NEXT_NORM = "next_layer_layernorm"
SERVER = Server("TensorRT-LLM", "lm_head", NEXT_NORM, (NEXT_NORM, "next_attn"))


class TorchSession(ServedSession):
    """One row at a time.

    CUDA graphs and the overlap scheduler are off (hooks do not run in a replayed graph), and blocks of the KV cache are
    not reused (a prefill would be cut short). Hooks are set after the model's warm-up. The output head hands each
    step's tensors over and then returns logits that force the caller's token.
    """

    def __init__(self, spec: EngineSpec, model: str, taps: tuple[Tap, ...], attn_backend: str = "TRTLLM") -> None:
        found = detect.require()
        os.environ[SINGLE_PROCESS] = "1"
        limit = max(spec.profile.past.max + 1, spec.profile.length.max + 1)
        self._llm = calls.LLM(
            **calls.LLM.available(found.version, enable_trtllm_sampler=True),  # the other lacks context logits there
            model=model,
            dtype=spec.dtype,
            cuda_graph_config=None,
            disable_overlap_scheduler=True,
            kv_cache_config={"enable_block_reuse": False},
            max_batch_size=1,
            max_seq_len=limit,
            max_num_tokens=limit,
            skip_tokenizer_init=True,
            trust_remote_code=spec.model.trust_remote_code,
            attn_backend=attn_backend,
        )
        self._engine = worker_engine(self._llm)
        super().__init__(SERVER, self._engine.model, taps, limit)
        self._heads = head_ratio(self._module)
        self._request: Any = None
        facts = {"tensorrt_llm": found.version, "runtime": "PyTorch backend, one process", "attention": attn_backend}
        self.info = SessionInfo(f"trtllm pytorch {spec.dtype}", "trtllm", spec.dtype, device(), spec.model.label, facts)

    def start(self, batch: int) -> None:
        """End the sequence that was being stepped. Raises :class:`UsageError` for more than one row."""
        super().start(batch)
        if batch > 1:
            raise UsageError(f"the PyTorch backend is stepped one row at a time, got {batch}: give one prompt")

    def close(self) -> None:
        """Take the hooks off and stop the backend."""
        with suppress(UsageError):
            self.start(0)
        self._capture.remove()
        calls.LLM_SHUTDOWN(self._llm)

    def _begin(self, rows: list[torch.Tensor], room: int) -> Callable[[], Any]:
        (prompt,) = rows
        sampling = calls.SAMPLING(max_tokens=room, end_id=NO_END, pad_id=0, ignore_eos=True, return_context_logits=True)
        self._request = calls.GENERATE_ASYNC(self._llm, inputs=prompt.tolist(), sampling_params=sampling)
        return partial(calls.RESULT, self._request)  # its end is the end of the run

    def _abort(self) -> None:
        if self._request is not None:
            calls.ABORT(self._request)
        self._request = None

    def _idle(self) -> bool:
        return bool(getattr(self._engine, "is_warmup", False))

    def _sizes(self, place: Place) -> tuple[int, ...]:
        return self._heads if FUSED_QKV.search(place.module) else super()._sizes(place)


def worker_engine(llm: Any) -> Any:
    """Return the engine whose ``model`` is the module. Raises :class:`UsageError` when it is in another process."""
    try:
        return llm._executor.engine.model_engine
    except AttributeError as error:
        raise UsageError(
            f"the model of the PyTorch backend is out of reach ({error}): set {SINGLE_PROCESS}=1 before tensorrt_llm "
            f"is imported, and use one GPU"
        ) from error


def head_ratio(module: nn.Module) -> tuple[int, int, int]:
    """Return the ratio of queries, keys and values in ``qkv_proj``."""
    config: Any = module.config
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return (heads, kv_heads, kv_heads)

"""vLLM stepped beside a reference: all rows in one pass, each token the caller's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ditto_core.backends.served.capture import CONTEXT, Server
from ditto_core.backends.served.forcing import device
from ditto_core.backends.served.place import Place
from ditto_core.backends.served.session import POSITIONS, Rows, ServedSession
from ditto_core.backends.vllm import serving
from ditto_core.backends.vllm.names import HEAD
from ditto_core.backends.vllm.vllm_options import VllmOptions
from ditto_core.errors import RunError
from ditto_core.model.checkpoint import chat_ids
from ditto_core.session import Pass, SessionInfo
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec
from ditto_core.system.fingerprint import checksum

SERVER = Server("vLLM", HEAD)
SETTINGS = (
    *("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings", "sliding_window", "layer_types"),
    *("rms_norm_eps", "hidden_act", "bos_token_id", "eos_token_id", "tie_word_embeddings", "num_hidden_layers"),
)
QUERIES = ("q_rope", CONTEXT)


class VllmSession(ServedSession):
    """Requests are added together and run to their end by a thread of their own, one pass a step.

    The logits' module hands each pass over. It runs outside of what is compiled, so that an engine without taps is
    stepped as it is served.
    """

    def __init__(self, spec: EngineSpec, model: str, taps: tuple[Tap, ...]) -> None:
        self._llm = serving.start(spec, model, bool(taps))
        self._runner = serving.runner_of(self._llm)
        self._requests: list[str] = []
        super().__init__(SERVER, self._runner.model, taps, self._runner.max_model_len)
        eager = VllmOptions.of(spec).eager(bool(taps))
        facts = {**serving.installed(), "modules": "one by one" if eager else "compiled, as served"}
        quantization, dtype = self._config.quantization, str(self._config.dtype).removeprefix("torch.")
        facts |= {"quantization": str(quantization)} if quantization else {}
        cache = str(self._llm.llm_engine.vllm_config.cache_config.cache_dtype)
        lossy = cache not in ("auto", dtype)
        facts |= {"keys and values": cache} if lossy else {}
        own = dtype, device(), spec.model.label
        self.info = SessionInfo(f"vllm {dtype}", "vllm", *own, facts, quantized=bool(quantization) or lossy)

    def close(self) -> None:
        """Take the hooks off and stop the engine."""
        self.start(0)
        self._capture.remove()
        serving.stop(self._llm)

    def tokens(self, text: str) -> list[int] | None:
        """Return the ids that vLLM makes of a text by the tokenizer beside the weights; None without one."""
        return None if self._tokenizer is None else [int(token) for token in self._tokenizer.encode(text)]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """Return the ids that vLLM makes of a conversation; None without a tokenizer or its template."""
        return chat_ids(self._tokenizer, messages)

    def prompt_logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Return vLLM's ``prompt_logprobs`` of all tokens, float32 [length - 1, vocabulary]."""
        self.start(1)
        (answer,) = self._llm.generate([{"prompt_token_ids": list(ids)}], serving.scoring(), use_tqdm=False)
        listed = answer.prompt_logprobs[1:]  # nothing stands before the first
        rows = [torch.tensor([row[token].logprob for token in sorted(row)]) for row in listed]
        return torch.stack(rows)

    def weights(self) -> dict[str, tuple[int, int]]:
        """Return the checksums of the weights that vLLM has not packed for its kernels, joint ones cut to pieces."""
        if self._config.quantization:
            return {}
        found = {}
        for path, module in self._module.named_modules():
            for leaf, weight in module.named_parameters(recurse=False):
                for name, piece in pieces(path, module, weight, self._packed):
                    if piece.numel():
                        found[f"{name}.{leaf}"] = checksum(piece)
        return found

    @property
    def _packed(self) -> Mapping[str, Sequence[str]]:
        found: Any = getattr(self._module, "packed_modules_mapping", None)
        return found or {}

    def settings(self) -> dict[str, object]:
        """Return what vLLM took from the model's configuration (``engine.hf_overrides`` may change it)."""
        config = self._config.hf_text_config
        return {name: getattr(config, name) for name in SETTINGS if hasattr(config, name)}

    def generation(self) -> dict[str, object]:
        """Return what a request of ``vllm serve`` is sampled with unless it says otherwise."""
        found = self._config.get_diff_sampling_param()
        return {"max_new_tokens" if name == "max_tokens" else name: value for name, value in found.items()}

    @property
    def _config(self) -> Any:
        return self._llm.llm_engine.model_config

    @cached_property
    def _tokenizer(self) -> Any:
        trust = {serving.TRUST: self._config.trust_remote_code}
        try:
            return importlib.import_module("vllm.tokenizers").get_tokenizer(self._config.tokenizer, **trust)
        except Exception:  # noqa: BLE001 - vLLM raises what its parts raise where there is no tokenizer
            return None

    def _begin(self, rows: list[torch.Tensor], room: int) -> Callable[[], Any]:
        engine, settings = self._llm.llm_engine, serving.sampling(room)
        self._requests = [
            engine.add_request(str(i), {"prompt_token_ids": row.tolist()}, settings) for i, row in enumerate(rows)
        ]
        return self._run

    def _run(self) -> None:
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            engine.step()
            if self._handoff is None or self._handoff.stopped:
                engine.abort_request(self._requests, internal=True)

    def _abort(self) -> None:
        """Nothing: the run's own thread ends the requests, after the pass at hand."""

    def _idle(self) -> bool:
        return not self._requests

    def _pass(self) -> Pass:
        return serving.shape_of(self._runner)

    def _positions(self) -> dict[str, torch.Tensor]:
        if getattr(self._runner, "uses_mrope", False):
            return {}  # three of each token
        return {POSITIONS: self._runner.positions[: sum(new for _, new in self._pass())].clone()}

    def _unfinished(self) -> bool:
        rows, prompts = self._pass(), self._runner.input_batch.num_prompt_tokens
        short = [before + new < int(prompts[i]) for i, (before, new) in enumerate(rows)]
        if len(rows) < len(self._requests) or (any(short) and len(rows) > 1):
            raise RunError(
                f"vLLM took a part of {len(self._requests)} prompts in one pass: give one prompt, or allow more tokens "
                f"a pass (engine.max_num_batched_tokens) and rows (the profile's batch)"
            )
        reused = sum(before for before, _ in rows)
        if not self.passes and reused and self.taps:
            raise RunError(f"vLLM reused {reused} tokens of the prompt, whose tensors are not computed")
        return any(short)

    def _rows(self) -> Rows | None:
        names = self._runner.input_batch.req_ids
        return (
            None
            if len(names) == 1
            else Rows([self._requests.index(name) for name in names], [new for _, new in self._pass()])
        )

    def _sizes(self, place: Place) -> tuple[int, ...]:
        sizes = getattr(self._module.get_submodule(place.module), "output_sizes", None)
        return tuple(sizes) if sizes and place.parts > 1 else super()._sizes(place)

    def _heads_of(self, place: Place) -> int:
        if not place.port or place.port == "in":
            return 0
        attention: Any = self._module.get_submodule(place.module)
        return int(attention.num_heads if place.port in QUERIES else attention.num_kv_heads)


def pieces(
    path: str, module: Any, weight: torch.Tensor, packed: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the modules of the model whose weights one parameter holds, each with its own; without padding."""
    parent, _, last = path.rpartition(".")
    sizes, leaves = getattr(module, "output_sizes", ()), packed.get(last, ())
    if len(leaves) > 1 and len(leaves) == len(sizes) and sum(sizes) == weight.shape[0]:
        yield from (
            (f"{parent}.{leaf}", part) for leaf, part in zip(leaves, torch.split(weight, list(sizes)), strict=True)
        )
    else:
        yield path, weight[: getattr(module, "org_vocab_size", None)]

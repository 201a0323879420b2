"""A TensorRT engine stepped through the Python runtime: ``ModelRunner`` and its ``GenerationSession`` in debug mode."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ditto_core.backends.packing import new_tokens, prompts, to_rows
from ditto_core.backends.served.forcing import LOGITS, NO_END, device, laid_out, one_hot, settle
from ditto_core.backends.served.handoff import Handoff
from ditto_core.backends.served.place import Place
from ditto_core.backends.trtllm import calls, detect
from ditto_core.backends.trtllm.build import engine_config, ranks
from ditto_core.errors import BackendError, RunError
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec


class EngineSession:
    """Implements :class:`~ditto_core.backends.base.Session`. Every token that the engine decodes is the caller's.

    The logits processor, which upstream calls in each step after the engine has run, hands the debug buffer over and
    then forces the token. The first step is the context phase.
    """

    def __init__(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> None:
        found = detect.require()
        config = engine_config(directory)["pretrained_config"]
        if len(ranks(directory)) > 1:
            raise BackendError(
                f"{directory} has {len(ranks(directory))} ranks, which need MPI: dump each rank there and merge "
                f"the dumps (ditto_core.backends.trtllm.ranks)"
            )
        self.taps = taps
        self._places = {tap.site: Place.parse(tap.value) for tap in taps}
        self._heads = head_ratio(config)
        self._vocabulary = int(config["vocab_size"])
        self._limit = max_sequence(directory)
        self._runner = calls.RUNNER_FROM_DIR(engine_dir=str(directory), rank=0, debug_mode=True)
        self._runner.session.dump_debug_buffers = lambda step: None  # it would write every tensor to the disk
        self._handoff: Handoff | None = None
        facts = {"tensorrt_llm": found.version, "runtime": "Python (GenerationSession, debug mode)"}
        label = f"trtllm {spec.dtype}"
        self.info = SessionInfo(label, "trtllm", spec.dtype, device(), spec.model.label, facts)

    def start(self, batch: int) -> None:
        """End the sequence that was being stepped; the next step is a prefill."""
        if self._handoff is not None:
            self._handoff.stop()
        self._handoff = None

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass; see :class:`~ditto_core.backends.base.Session`."""
        real = new_tokens(inputs["attention_mask"], inputs["input_ids"].shape[1])
        buffer = self._prefill(inputs) if self._handoff is None else self._handoff.step(inputs["input_ids"][:, 0])
        for tap in self.taps:
            place = self._places[tap.site]
            if place.tensor not in buffer:
                raise RunError(f"the engine has no output {place.tensor!r} for {tap.site}; it was built without it")
            sink(tap.site, laid_out(place.cut(to_rows(buffer[place.tensor], real), self._heads), tap.axes))
        return {LOGITS: to_rows(buffer[LOGITS], real)[..., : self._vocabulary]}

    def close(self) -> None:
        """Release the engine."""
        self.start(0)
        self._runner = None

    def _prefill(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        handoff = Handoff(settle)
        rows = prompts(inputs["input_ids"], inputs["attention_mask"])
        room = self._limit - max(len(row) for row in rows)
        if room < 1:
            raise RunError(f"a prompt of {max(map(len, rows))} tokens does not fit the engine's {self._limit} tokens")
        generate = partial(
            calls.RUNNER_GENERATE,
            self._runner,
            batch_input_ids=rows,
            max_new_tokens=room,
            end_id=NO_END,
            pad_id=0,
            logits_processor=partial(force, self._runner.session, handoff),
            stopping_criteria=lambda step, ids, scores: handoff.stopped,
        )
        handoff.start(on_device(generate))
        self._handoff = handoff
        return handoff.step()


def on_device(target: Any) -> Any:
    """Return ``target`` bound to the caller's CUDA device, which is a property of the thread."""
    if not torch.cuda.is_available():
        return target
    device = torch.cuda.current_device()

    def run() -> Any:
        torch.cuda.set_device(device)
        return target()

    return run


def force(session: Any, handoff: Handoff, step: int, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Hand the step's tensors over and return scores [rows, vocabulary] that only the next forced token can win."""
    tokens = handoff.offer(dict(session.debug_buffer))
    return scores if tokens is None else one_hot(scores, tokens)


def head_ratio(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the ratio of queries, keys and values in the joint projection of one rank.

    Each rank has at least one head of keys.
    """
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    tp = int(config.get("mapping", {}).get("tp_size", 1))
    return (heads // tp, max(1, kv_heads // tp), max(1, kv_heads // tp))


def max_sequence(directory: Path) -> int:
    """Return how many tokens an engine can hold in a row."""
    return int(engine_config(directory)["build_config"]["max_seq_len"])

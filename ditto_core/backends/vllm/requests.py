"""vLLM as it is served: requests come and go, the scheduler mixes, preempts and resumes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ditto_core.backends.served.forcing import device
from ditto_core.backends.vllm import serving
from ditto_core.backends.vllm.names import HEAD
from ditto_core.session import Pass, SessionInfo, Trail
from ditto_core.spec import EngineSpec


class VllmRequests:
    """Implements :class:`~ditto_core.session.TakesRequests` without taps; each request goes on with its own tokens."""

    def __init__(self, spec: EngineSpec, model: str) -> None:
        self._llm = serving.start(spec, model, tapped=False)
        self._runner = serving.runner_of(self._llm)
        self._logits: dict[str, dict[int, torch.Tensor]] = {}
        self._trails: dict[str, Trail] = {}
        self._evicted: dict[str, int] = {}
        self._count = 0
        self._hook = self._runner.model.get_submodule(HEAD).register_forward_hook(self._note)
        facts = serving.installed()
        self.info = SessionInfo(f"vllm {spec.dtype}", "vllm", spec.dtype, device(), spec.model.label, facts)

    @property
    def preempted(self) -> int:
        """How often a request lost its place to another since :meth:`forget`."""
        return sum(self._evicted.values())

    def submit(self, ids: Sequence[int], new_tokens: int) -> str:
        """Send a request for ``new_tokens`` greedy tokens and return its name."""
        self._count += 1
        prompt, settings = {"prompt_token_ids": list(ids)}, serving.sampling(new_tokens)
        name = str(self._llm.llm_engine.add_request(str(self._count), prompt, settings))
        self._logits[name], self._trails[name] = {}, Trail()
        return name

    def step(self) -> bool:
        """Run one pass; tell whether any request is left."""
        engine = self._llm.llm_engine
        engine.step()
        for name, request in self._scheduler.requests.items():
            self._evicted[name] = max(self._evicted.get(name, 0), int(request.num_preemptions))
        return bool(engine.has_unfinished_requests())

    def abort(self, name: str) -> None:
        """End a request that may be waiting, running or done."""
        self._llm.llm_engine.abort_request([name], internal=True)

    def logits(self, name: str) -> torch.Tensor:
        """Return what was computed of a request so far, [new tokens, vocabulary]."""
        rows = self._logits[name]
        return torch.stack([rows[position] for position in sorted(rows)]) if rows else torch.empty(0, 0)

    def trail(self, name: str) -> Trail:
        """Return how a request was computed since it was begun the last time."""
        return self._trails[name]

    def forget(self) -> None:
        """End all requests and empty the cache of prefixes."""
        for name in self._logits:
            self.abort(name)
        while self._llm.llm_engine.has_unfinished_requests():
            self.step()
        self._llm.llm_engine.reset_prefix_cache()
        self._logits, self._trails, self._evicted = {}, {}, {}

    def close(self) -> None:
        """Stop the engine."""
        self.forget()
        self._hook.remove()
        serving.stop(self._llm)

    @property
    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def _note(self, module: Any, args: Any, output: torch.Tensor) -> None:
        """Keep each row's logits by the number of tokens before it; those of a part of a prompt are of no token."""
        batch, shape = self._runner.input_batch, serving.shape_of(self._runner)
        for i, (name, (before, new)) in enumerate(zip(batch.req_ids, shape, strict=True)):
            if name not in self._logits:
                continue
            self._trails[name] = followed(self._trails[name], (i, shape), len(self._logits[name]))
            if before + new >= int(batch.num_prompt_tokens[i]):
                self._logits[name].setdefault(before + new, output[i].detach().float().clone())


def followed(trail: Trail, step: tuple[int, Pass], kept: int) -> Trail:
    """Return a trail with one more pass; one that computes anew what was computed begins a new trail of ``kept``
    tokens."""
    row, shape = step
    last = trail.passes[-1:]
    anew = any(shape[row][0] < sum(before[at]) for at, before in last)
    return Trail(kept, (step,)) if anew else Trail(trail.kept, (*trail.passes, step))

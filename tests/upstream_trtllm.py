"""TensorRT-LLM's own Python layer, from its source; stand-ins take the place of what is compiled or not installed.

TensorRT-RTX is its TensorRT, and the network and the engine are real. Plugins are off, and nothing can be run.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path

import torch

PLUGINS = (
    *("gpt_attention_plugin", "bert_attention_plugin", "gemm_plugin", "nccl_plugin", "moe_plugin"),
    "mamba_conv1d_plugin",
)
SWITCHES = ("context_fmha", "remove_input_padding", "paged_state")


class StandInType(type):
    """A class whose unknown attributes are stand-ins."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __or__(cls, other):
        return cls


class StandIn(metaclass=StandInType):
    """Whatever is imported, called or subclassed."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __call__(self, *args, **kwargs):
        return StandIn()

    def __class_getitem__(cls, item):
        return cls


class KVCacheType(enum.Enum):
    CONTINUOUS, PAGED, DISABLED = "continuous", "paged", "disabled"


class StrEnum(str, enum.Enum):
    __str__ = str.__str__

    @staticmethod
    def _generate_next_value_(name, *rest):
        return name


class LowercaseStrEnum(str, enum.Enum):
    __str__ = str.__str__

    @staticmethod
    def _generate_next_value_(name, *rest):
        return name.lower()


KNOWN = {
    "__version__": "12.0.0",
    "KVCacheType": KVCacheType,
    "ENABLE_MULTI_DEVICE": 0,
    "StrEnum": StrEnum,
    "LowercaseStrEnum": LowercaseStrEnum,
    "nvmlSystemGetDriverVersion": lambda: "560",
}


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name in KNOWN:
            return KNOWN[name]
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (StandIn,), {})


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds, last of all, whatever upstream's own modules import and nobody has."""

    def find_spec(self, name, path=None, target=None):
        own, compiled = name.startswith("tensorrt_llm"), name.startswith("tensorrt_llm.bindings")
        if compiled or (not own and (asking().startswith("tensorrt_llm") or name.partition(".")[0] in STOOD_IN)):
            if not own and name != "transformers":
                STOOD_IN.add(name)
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module) -> None:
        pass


STOOD_IN: set[str] = set()


def asking() -> str:
    """Return the name of the module that imports."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame is not None else ""


def install(source: Path, folder: Path) -> str:
    """Make upstream importable in this process, for good, and return its version."""
    information = folder / "pynvml-12.0.0.dist-info"  # its version is asked for
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: pynvml\nVersion: 12.0.0\n")
    sys.path[:0] = [str(source), str(folder)]
    sys.meta_path.append(Missing())
    sys.modules["tensorrt"] = rtx = importlib.import_module("tensorrt_rtx_bindings")
    if not hasattr(rtx.PreviewFeature, "PROFILE_SHARING_0806"):  # 0.12 asks for it, RTX always does it
        rtx.PreviewFeature.PROFILE_SHARING_0806 = rtx.PreviewFeature.RUNTIME_ACTIVATION_RESIZE_10_10
    os.environ["TRT_LLM_NO_LIB_INIT"] = "1"
    torch.cuda.device_count = lambda: 1  # build_and_save chooses a GPU, which it does not use then
    torch.cuda.set_device = lambda device: None
    dataclasses.dataclass = hashable(dataclasses.dataclass)
    version = importlib.import_module("tensorrt_llm").__version__
    adapt()
    return version


def hashable(original):
    """Return ``dataclass`` for upstream's classes: 0.12 has them as defaults, which takes a hash since Python 3.11."""

    def dataclass(cls=None, /, **options):
        if cls is None:
            return lambda given: dataclass(given, **options)
        made = original(cls, **options)
        if made.__hash__ is None and cls.__module__.startswith("tensorrt_llm"):
            made.__hash__ = object.__hash__
        return made

    return dataclass


def adapt() -> None:
    """Leave out what TensorRT-RTX lacks, read the configurations of a newer transformers, keep names of outputs."""
    functional = importlib.import_module("tensorrt_llm.functional")
    builder = importlib.import_module("tensorrt_llm.builder")
    tensor, scaling, build_engine = functional.Tensor, functional.RotaryScalingType, builder.Builder.build_engine
    tensor.dtype = property(tensor.dtype.fget, lambda self, value: None)
    tensor.location = property(lambda self: None, lambda self, value: None)
    if hasattr(scaling, "from_string"):
        of = scaling.from_string
        scaling.from_string = staticmethod(lambda text: scaling.none if text == "default" else of(text))

    def kept(self, network, config, *args, **kwargs):
        traced(self, network, config)
        return build_engine(self, network, config, *args, **kwargs)

    builder.Builder.build_engine = kept


def traced(builder, network, config, *rest, **more) -> bytes:
    """Keep the names of a network. In the place of ``Builder.build_engine`` it saves TensorRT's compilation."""
    definition = network.trt_network
    BUILT["outputs"] = [definition.get_output(i).name for i in range(definition.num_outputs)]
    BUILT["layers"] = [definition.get_layer(i).name for i in range(definition.num_layers)]
    return b"not compiled"


BUILT: dict[str, list[str]] = {}
"""Names of the outputs and layers of the network that was built last; an engine cannot be opened without a GPU."""


def plugins_off() -> dict[str, object]:
    """Return fields of the plugin configuration."""
    return {**dict.fromkeys(PLUGINS), **dict.fromkeys(SWITCHES, False)}


def words_off(version: str) -> list[str]:
    """Return the same as words of trtllm-build."""
    cache = ["--paged_kv_cache", "disable"] if version.startswith("0.12") else ["--kv_cache_type", "continuous"]
    words = [word for name in (*PLUGINS, *SWITCHES) for word in (f"--{name}", "disable")]
    sizes = ["--max_batch_size", "2", "--max_input_len", "16", "--max_seq_len", "32"]
    return [*words, *cache, *sizes, *(["--cluster_key", "A100-SXM-80GB"] if version.startswith("0.") else [])]


def write_checkpoint(model: Path, directory: Path, dtype: str) -> Path:
    """Convert a Hugging Face model by upstream's own class."""
    calls = importlib.import_module("ditto_core.backends.trtllm.calls")
    directory.mkdir()
    calls.FROM_HUGGING_FACE(hf_model_or_dir=str(model), dtype=dtype).save_checkpoint(str(directory))
    assert json.loads((directory / "config.json").read_text())["architecture"] == "LlamaForCausalLM"
    return directory

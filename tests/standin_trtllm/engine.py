"""Building: modules, networks, the builder. The networks and engines are TensorRT-RTX's own."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import tensorrt_rtx_bindings as trt

LOGGER = trt.Logger(trt.Logger.ERROR)
current = []


class Tensor:
    def __init__(self, trt_tensor) -> None:
        self.trt_tensor = trt_tensor


class Network:
    def __init__(self, plugin_config) -> None:
        self.builder = trt.Builder(LOGGER)
        self._trt_network = self.builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self._plugin_config = plugin_config
        self.plugins = {}
        self.weights = []

    @property
    def trt_network(self):
        return self._trt_network

    @property
    def plugin_config(self):
        return self._plugin_config

    @property
    def strongly_typed(self):
        return True

    def _mark_output(self, tensor, name, dtype) -> None:
        """The last name that a tensor gets counts, as the facts say."""
        self.trt_network.mark_output(tensor.trt_tensor)
        tensor.trt_tensor.name = name


@contextmanager
def net_guard(network):
    current.append(network)
    try:
        yield
    finally:
        current.pop()


class Module:
    def __init__(self) -> None:
        self.__dict__["_modules"] = {}
        self.__dict__["_network_outputs"] = {}

    def __setattr__(self, name, value) -> None:
        if isinstance(value, Module):
            self._modules[name] = value
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name):
        modules = self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        raise AttributeError(name)

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self
        for name, module in self._modules.items():
            yield from Module.named_modules(module, prefix=f"{prefix}.{name}" if prefix else name)

    def register_network_output(self, name, value) -> None:
        self._network_outputs[name] = value

    def named_network_outputs(self):
        for path, module in Module.named_modules(self):
            for name, value in module._network_outputs.items():
                yield f"{path}.{name}" if path else name, value


class PluginConfig:
    def __init__(self) -> None:
        self.paged_kv_cache = True
        self.use_fused_mlp = True
        self.reduce_fusion = False
        self.gpt_attention_plugin = "auto"


class Builder:
    def build_engine(self, network, builder_config, managed_weights=None):
        config = builder_config.trt_builder_config
        for _ in ("prompt", "token"):  # upstream adds them here, too
            config.add_optimization_profile(network.builder.create_optimization_profile())
        return network.builder.build_serialized_network(network.trt_network, builder_config.trt_builder_config)


class Engine:
    def __init__(self, config, engine, outputs) -> None:
        self.config, self.engine, self.outputs = config, engine, outputs

    def save(self, engine_dir) -> None:
        folder = Path(engine_dir)
        folder.mkdir(parents=True, exist_ok=True)
        rank = self.config["pretrained_config"]["mapping"].get("rank", 0)
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / f"rank{rank}.engine").write_bytes(bytes(self.engine))
        (folder / f"outputs{rank}.json").write_text(json.dumps(self.outputs))


def build(model, build_config):
    """Trace the model into a TensorRT-RTX network, mark registered outputs, build."""
    fused = getattr(build_config, "use_fused_mlp", build_config.plugin_config.use_fused_mlp)
    if fused:
        model.fuse_mlps()
    network = Network(build_config.plugin_config)
    with net_guard(network):
        model()
        if build_config.enable_debug_output:
            for name, tensor in model.named_network_outputs():
                network._mark_output(tensor, name, None)
    config = SimpleNamespace(trt_builder_config=network.builder.create_builder_config())
    engine = importlib.import_module("tensorrt_llm.builder").Builder().build_engine(network, config)
    definition = network.trt_network
    outputs = [definition.get_output(i).name for i in range(definition.num_outputs)]
    saved = {"max_seq_len": build_config.max_seq_len, "enable_debug_output": build_config.enable_debug_output}
    whole = {"version": "stand-in", "pretrained_config": model.config.to_dict(), "build_config": saved}
    return importlib.import_module("tensorrt_llm.builder").Engine(whole, engine, outputs)


def parallel_build(
    model_config, ckpt_dir, build_config, output_dir, workers=1, log_level="info", model_cls=None, **kwargs
):
    """Build every rank, each with its part of the layers."""
    known = importlib.import_module("tensorrt_llm.models").MODEL_MAP
    if "use_fused_mlp" in kwargs and version_of() <= (0, 14):  # 'disable' is a true string; later nobody reads it
        build_config.use_fused_mlp = kwargs["use_fused_mlp"]
    for rank in range(model_config.mapping.world_size):
        config = model_config.for_rank(rank)
        chosen = model_cls or known[config.architecture]
        model = chosen(config) if ckpt_dir is None else chosen.from_checkpoint(ckpt_dir, config=config)
        build(model, build_config).save(output_dir)


def main() -> None:
    """Read trtllm-build's flags as far as the tests use them; unknown flags are an error there, too."""
    import argparse
    from importlib.machinery import SourceFileLoader

    parser = argparse.ArgumentParser()
    for flag in ("--checkpoint_dir", "--output_dir", "--model_cls_file", "--model_cls_name"):
        parser.add_argument(flag, default=None)
    parser.add_argument("--max_batch_size", type=int, default=2)
    parser.add_argument("--enable_debug_output", action="store_true")
    add_fused_mlp(parser)
    arguments = parser.parse_args(sys.argv[1:])
    chosen = None
    if arguments.model_cls_file:
        module = SourceFileLoader("models", arguments.model_cls_file).load_module()
        chosen = getattr(module, arguments.model_cls_name)
    tables = importlib.import_module("tensorrt_llm.models.modeling_utils")
    config = tables.PretrainedConfig.from_json_file(f"{arguments.checkpoint_dir}/config.json")
    settings = importlib.import_module("tensorrt_llm.builder").BuildConfig(
        max_batch_size=arguments.max_batch_size, enable_debug_output=arguments.enable_debug_output
    )
    kwargs = {"use_fused_mlp": arguments.use_fused_mlp} if version_of() < (1,) else {}
    if version_of() >= (1,):  # only there the plugin configuration reads the word, and is read
        settings.plugin_config.use_fused_mlp = arguments.use_fused_mlp == "enable"
    command = importlib.import_module("tensorrt_llm.commands.build")
    command.parallel_build(
        config, arguments.checkpoint_dir, settings, arguments.output_dir, 1, "info", chosen, **kwargs
    )


def version_of() -> tuple:
    """Return major and minor of the recorded version."""
    text = importlib.import_module("tensorrt_llm.version").__version__
    return tuple(int(number) for number in text.split(".")[:2])


def add_fused_mlp(parser) -> None:
    """Add the flag as upstream has it: a switch in 0.12, a word from 0.13 on."""
    if version_of() < (0, 13):
        parser.add_argument("--use_fused_mlp", action="store_true")
    else:
        parser.add_argument("--use_fused_mlp", choices=["enable", "disable"], default="enable")


def get_plugin_info(trt_network, layer_name):
    found = current[-1].plugins.get(layer_name) if current else FINISHED.get(layer_name)
    return None if found is None else SimpleNamespace(plugin_name=found["plugin"], pfc_as_list=found["fields"])


FINISHED = {}

NAMES = {
    "PluginConfig": PluginConfig,
    "tensorrt_llm.module.Module": Module,
    "tensorrt_llm.network.Network": Network,
    "tensorrt_llm.functional.Tensor": Tensor,
    "tensorrt_llm.network.get_plugin_info": get_plugin_info,
    "tensorrt_llm.default_net": lambda: current[-1],
    "tensorrt_llm.builder.Builder": Builder,
    "tensorrt_llm.builder.Engine": Engine,
    "tensorrt_llm.builder.build": build,
    "tensorrt_llm.commands.build.parallel_build": parallel_build,
    "tensorrt_llm.commands.build.main": main,
}

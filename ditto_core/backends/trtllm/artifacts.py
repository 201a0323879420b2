"""Readable by-products of a build: the final network as text, the fields of its plugins, the builder's configuration.

Upstream hands neither the final network nor TensorRT's builder configuration to anybody but ``Builder.build_engine``,
and there is no hook: that one method is wrapped, for one call or until the build ends, and put back.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ditto_core.backends.trtllm import calls
from ditto_core.backends.trtllm.marking import LINE_NUMBER

BUILD_ENGINE = "tensorrt_llm.builder.Builder.build_engine"
NETWORK_FILE = "trt_network_def.py"
CONFIG_FILE = "builder_config.json"
PLUGIN_FOLDER = "plugins"
PLAIN = (bool, int, float, str, type(None))

Fields = Callable[[str], Mapping[str, Any] | None]
"""Returns the fields of the plugin of a layer, or None when the layer is no plugin."""


def builder_kept() -> AbstractContextManager[None]:
    """Put the builder back as it was, however a build ends."""
    return calls.restored(BUILD_ENGINE)


def watch_build_engine(directory: Path) -> None:
    """Write the artifacts of the next engine that is built in this process.

    The builder's configuration is written after the engine: upstream adds the profiles while it builds.
    """
    builder = calls.attribute("tensorrt_llm.builder.Builder")
    original = calls.attribute(BUILD_ENGINE)

    def build_engine(self: Any, network: Any, builder_config: Any, *args: Any, **kwargs: Any) -> Any:
        builder.build_engine = original
        write_network(directory, network)
        try:
            return original(self, network, builder_config, *args, **kwargs)
        finally:
            write_config(directory, builder_config)

    builder.build_engine = build_engine


def write_network(directory: Path, network: Any) -> None:
    """Write ``trt_network_def.py`` and ``plugins/*.json``."""
    directory.mkdir(parents=True, exist_ok=True)

    def fields(layer_name: str) -> Mapping[str, Any] | None:
        info = calls.PLUGIN_INFO(network.trt_network, layer_name)
        return None if info is None else {"plugin": info.plugin_name, "fields": info.pfc_as_list}

    definition = network.trt_network
    (directory / NETWORK_FILE).write_text("\n".join(readable(definition, fields)) + "\n")
    write_plugins(directory / PLUGIN_FOLDER, definition, fields)


def write_config(directory: Path, builder_config: Any) -> None:
    """Write ``builder_config.json``."""
    config = getattr(builder_config, "trt_builder_config", None)
    (directory / CONFIG_FILE).write_text(json.dumps(plain_attributes(config), indent=1) + "\n")


def write_plugins(folder: Path, definition: Any, fields: Fields) -> None:
    """Write one JSON file for each plugin layer: its type, its fields, its inputs and outputs."""
    for layer in layers(definition):
        found = fields(layer.name)
        if found is not None:
            folder.mkdir(exist_ok=True)
            data = {
                "layer": layer.name,
                **found,
                "inputs": described(inputs(layer)),
                "outputs": described(outputs(layer)),
            }
            (folder / f"{file_name(layer.name)}.json").write_text(json.dumps(data, indent=1, default=str) + "\n")


def readable(definition: Any, fields: Fields) -> Iterator[str]:
    """Yield a network as lines of Python-like text: a call for each tensor, the layer's name in the comment above.

    These are the names that ``TRTLLM_ADD_OUTPUT`` takes.
    """
    name = Identifiers()
    marked = {definition.get_output(i).name for i in range(definition.num_outputs)}
    yield f'"""{definition.num_layers} layers, {definition.num_outputs} outputs."""'
    for i in range(definition.num_inputs):
        tensor = definition.get_input(i)
        yield f"{name(tensor.name)} = network_input({tensor.name!r})  # {type_of(tensor)}"
    for layer in layers(definition):
        found = fields(layer.name)
        kind = layer.type.name.lower() if found is None else str(found["plugin"])
        arguments = ", ".join(name(tensor.name) for tensor in inputs(layer))
        yield ""
        yield f"# layer: {layer.name}"
        for key, value in (found or {}).get("fields", {}).items():
            yield f"#   {key} = {value}"
        for tensor in outputs(layer):
            note = ", output" if tensor.name in marked else ""
            yield f"{name(tensor.name)} = {kind}({arguments})  # {type_of(tensor)}{note}"


class Identifiers:
    """Short Python identifiers for names of tensors: the same for one name, never that of another.

    Upstream's names are whole call stacks; their last two parts say enough where the layer's name stands above.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return the identifier of a tensor."""
        if name not in self._known:
            short = "_".join(LINE_NUMBER.sub("", name).split("/")[-2:])
            plain = re.sub(r"\W+", "_", short).strip("_") or "tensor"
            plain = f"t_{plain}" if plain[0].isdigit() or keyword.iskeyword(plain) else plain
            chosen = plain if plain not in self._taken else f"{plain}_{len(self._taken)}"
            self._known[name] = chosen
            self._taken.add(chosen)
        return self._known[name]


def layers(definition: Any) -> Iterator[Any]:
    """Yield the layers of a network in the order in which they were added."""
    return (definition.get_layer(i) for i in range(definition.num_layers))


def inputs(layer: Any) -> list[Any]:
    """Return the input tensors of a layer."""
    return [t for t in (layer.get_input(i) for i in range(layer.num_inputs)) if t is not None]


def outputs(layer: Any) -> list[Any]:
    """Return the output tensors of a layer."""
    return [t for t in (layer.get_output(i) for i in range(layer.num_outputs)) if t is not None]


def type_of(tensor: Any) -> str:
    """Return dtype and shape: ``half[-1, 64]``."""
    return f"{tensor.dtype.name.lower()}{[int(size) for size in tensor.shape]}"


def described(tensors: list[Any]) -> list[str]:
    """Return name, dtype and shape of tensors."""
    return [f"{tensor.name}: {type_of(tensor)}" for tensor in tensors]


def plain_attributes(config: Any) -> dict[str, Any]:
    """Return the attributes of an object that JSON can hold; enumerations by name."""
    found: dict[str, Any] = {}
    for key in dir(config):
        value = None if key.startswith("_") else read(config, key)
        if isinstance(value, PLAIN) and value is not None:
            found[key] = value
        elif hasattr(value, "name") and isinstance(getattr(value, "name", None), str):
            found[key] = value.name
    return found


def read(config: Any, key: str) -> Any:
    """Return an attribute, or None where TensorRT refuses to tell."""
    try:
        return getattr(config, key)
    except (RuntimeError, AttributeError, TypeError):
        return None


def file_name(layer: str) -> str:
    """Return a layer's name as one path component."""
    return re.sub(r"[^\w.-]+", ".", layer).strip(".")

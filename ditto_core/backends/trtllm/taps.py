"""Taps of an engine that is being built: any module's output or input, and any layer's outputs, under chosen names.

A model is observed through its own ``forward``: during the one call that traces it, the modules that are wanted have
theirs wrapped. This catches sub-modules that are called past ``Module.__call__``, and modules that upstream replaced
after the model was made. What is found gets an identity layer whose output is marked: a tensor that is an output
already keeps its name.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ditto_core.backends.trtllm import calls, names
from ditto_core.errors import BuildError, UsageError
from ditto_core.sites import matches

ADD_OUTPUT_VARIABLE = "TRTLLM_ADD_OUTPUT"
PLAN_VARIABLE = "DITTO_TRTLLM_PLAN"
OURS = "ditto/"
LINE_NUMBER = re.compile(r"_L\d+(?=/|$)")
PAIR_FUSIONS = ("reduce_fusion", "norm_quant_fusion")
FUSED_MLP = "fused_fc"


@dataclass(frozen=True)
class Plan:
    """What to make observable. ``outputs`` maps a module, site, glob over either, registered output or layer name to
    an alias (empty: its own name). ``report`` and ``artifacts`` are folders, or empty. ``model_class`` is a file and a
    class of the user's. ``strict``: a name that means nothing is an error, not just reported."""

    outputs: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True
    report: str = ""
    artifacts: str = ""
    model_class: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        aliases = [alias for alias in self.outputs.values() if alias]
        twice = next((alias for alias in aliases if aliases.count(alias) > 1), None)
        if twice is not None:
            raise UsageError(f"the alias {twice!r} is given to several outputs, expected a name of its own for each")

    def to_env(self) -> dict[str, str]:
        """Return the environment variable by which worker processes get the plan."""
        return {PLAN_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Plan:
        """Read the plan, or else ``TRTLLM_ADD_OUTPUT``. Raises :class:`UsageError` when either is malformed."""
        text = environ.get(PLAN_VARIABLE)
        if not text:
            return cls(parse_add_output(environ.get(ADD_OUTPUT_VARIABLE, "")))
        data = json.loads(text)
        return cls(**{**data, "model_class": tuple(data["model_class"])})


def parse_add_output(text: str) -> dict[str, str]:
    """Read ``TRTLLM_ADD_OUTPUT``: a JSON object, name -> alias. Raises :class:`UsageError` for anything else."""
    if not text:
        return {}
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{ADD_OUTPUT_VARIABLE} is no JSON, expected {{layer name: alias}}: {error}") from error
    if not isinstance(data, dict) or not all(isinstance(alias, str) for alias in data.values()):
        raise UsageError(f"{ADD_OUTPUT_VARIABLE} is {text!r}, expected a JSON object {{layer name: alias}}")
    return data


@dataclass
class Report:
    """What came of a plan on one rank: outputs by name, and a reason for each that could not be."""

    rank: int
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Name of the report's file."""
        return f"taps.rank{self.rank}.json"

    def save(self, folder: Path) -> None:
        """Write as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.file_name).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path, rank: int = 0) -> Report:
        """Inverse of :meth:`save`. Raises :class:`BuildError` when the build left none."""
        path = folder / cls(rank).file_name
        if not path.is_file():
            raise BuildError(f"the build left no {path.name}: the model was not traced through the adapter")
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Seen:
    """A tensor that passed a module's output, or its input, while the model was traced."""

    name: str
    sites: tuple[str, ...]
    tensor: Any

    def matches(self, selector: str) -> bool:
        """Tell whether a selector means it, by TensorRT-LLM's name or by Hugging Face's."""
        return any(matches(selector, name) for name in (self.name, *self.sites))


def observe(model: Any, plan: Plan) -> Any:
    """Make a model mark the outputs of a plan when it is traced; returns the model.

    Tracing raises :class:`BuildError` when a name of the plan means nothing on any rank's part of the model.
    """
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        seen: list[Seen] = []
        with watching(model, seen):
            result = inner(*args, **kwargs)
        mark(model, seen, plan)
        return result

    model.forward = forward
    return model


@contextmanager
def watching(model: Any, seen: list[Seen]) -> Iterator[None]:
    """Wrap ``forward`` of every module but the model itself, and put it back."""
    before = []
    for path, module in global_paths(model):
        before.append((module, module.__dict__.get("forward")))
        module.forward = watched(path, module.forward, seen)
    try:
        yield
    finally:
        for module, forward in before:
            del module.__dict__["forward"]
            if forward is not None:
                module.forward = forward


def watched(path: str, inner: Any, seen: list[Seen]) -> Any:
    """Return a ``forward`` that notes its first input and its first output."""

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        note(seen, path, "in", first_tensor((*args, *kwargs.values())))
        result = inner(*args, **kwargs)
        note(seen, path, "", first_tensor(result))
        return result

    return forward


def note(seen: list[Seen], path: str, port: str, tensor: Any) -> None:
    """Add a tensor to what was seen."""
    if tensor is not None:
        suffix = f":{port}" if port else ""
        seen.append(Seen(path + suffix, tuple(site + suffix for site in names.sites(path)), tensor))


def first_tensor(value: Any) -> Any:
    """Return the first network tensor in a value or in a (nested) tuple; a decoder layer returns (hidden, cache)."""
    if getattr(value, "trt_tensor", None) is not None:
        return value
    if isinstance(value, list | tuple):
        return next((found for item in value if (found := first_tensor(item)) is not None), None)
    return None


def global_paths(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules below a model with their paths; layers are numbered over all pipeline ranks.

    Upstream numbers the layers of each pipeline rank from 0, and keeps their true numbers in ``layer_list``.
    """
    numbers: dict[str, list[int]] = {}
    for path, module in list(calls.NAMED_MODULES(model)):
        layers = module.__dict__.get("layer_list")
        if layers:
            numbers[path] = list(layers)
        if path:
            yield renumber(path, numbers), module


def renumber(path: str, numbers: Mapping[str, list[int]]) -> str:
    """Replace the local number of a layer by its number in the whole model."""
    for prefix, layers in numbers.items():
        if path.startswith(f"{prefix}."):
            index, dot, rest = path[len(prefix) + 1 :].partition(".")
            if index.isdigit() and int(index) < len(layers):
                return f"{prefix}.{layers[int(index)]}{dot}{rest}"
    return path


def mark(model: Any, seen: list[Seen], plan: Plan) -> Report:
    """Mark the outputs of a plan in the network that was just traced, and write the report and artifacts."""
    network = calls.DEFAULT_NET()
    mapping = getattr(getattr(model, "config", None), "mapping", None)
    report = Report(getattr(mapping, "rank", 0) or 0)
    marker = Marker(network, report, dict(calls.NAMED_OUTPUTS(model)))
    for name, alias in plan.outputs.items():
        if not marker.resolve(name, alias, seen):
            report.refused[name] = absent(name, seen)
            if plan.strict and getattr(mapping, "pp_size", 1) == 1:
                known = (*(each for tensor in seen for each in (tensor.name, *tensor.sites)), *marker.layers)
                raise BuildError(no_such_output(name, known))
    if plan.report:
        report.save(Path(plan.report))
    return report


def absent(name: str, seen: list[Seen]) -> str:
    """Say why a module's output is not in the network."""
    place = names.engine_place(name)
    block = (place.module if place else name).rpartition(".")[0]
    if any(tensor.name == f"{block}.{FUSED_MLP}" for tensor in seen):
        return f"gate_proj and up_proj are one ({FUSED_MLP}): build with use_fused_mlp off"
    return "no module of that name ran on this rank"


def no_such_output(name: str, known: Iterable[str]) -> str:
    """Build the one-line message for a name that means nothing."""
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
    return f"output {name!r} is no module, site, layer or registered output of the model; closest: {', '.join(close)}"


class Marker:
    """Makes tensors outputs of one network."""

    def __init__(self, network: Any, report: Report, registered: Mapping[str, Any]) -> None:
        self._network = network
        self._trt = network.trt_network
        self._report = report
        self._registered = registered
        self._fused = [n for n in PAIR_FUSIONS if getattr(network.plugin_config, n, False)]
        self.layers = {layer.name: layer for layer in (self._trt.get_layer(i) for i in range(self._trt.num_layers))}
        self._taken = {t.name for t in (self._trt.get_output(i) for i in range(self._trt.num_outputs))}
        self._taken |= {t.name for t in (self._trt.get_input(i) for i in range(self._trt.num_inputs))}

    def resolve(self, name: str, alias: str, seen: list[Seen]) -> bool:
        """Mark what a name means: modules and sites first, then registered outputs, then layers. False when nothing."""
        hits = [tensor for tensor in seen if tensor.matches(name)]
        if hits:
            for tensor, chosen in zip(hits, aliases(alias, len(hits)), strict=True):
                self._mark_module(tensor, chosen or tensor.name, name)
            return True
        if name in self._registered:
            self.add(alias or name, self._registered[name].trt_tensor, name, name)
            return True
        layer = self._layer(name)
        if layer is None:
            return False
        tensors = [layer.get_output(i) for i in range(layer.num_outputs)]
        for tensor, chosen in zip(tensors, aliases(alias or name, len(tensors)), strict=True):
            self.add(chosen, tensor, layer.name, name)
        return True

    def _mark_module(self, seen: Seen, name: str, request: str) -> None:
        if self._fused and re.search(r"layers\.\d+(\.attention|\.mlp)?$", seen.name):
            self._report.refused[seen.name] = f"{self._fused[0]} makes it a pair (hidden, residual): build without it"
        elif seen.name.endswith(FUSED_MLP):
            self._report.refused[seen.name] = absent(seen.name, [seen])
        elif name in self._report.outputs and self._report.outputs[name]["source"] == seen.name:
            self._report.outputs[name]["requests"].append(request)
        else:
            self.add(name, seen.tensor.trt_tensor, seen.name, request)

    def _layer(self, name: str) -> Any:
        """Return a layer by its name; source line numbers in it, which differ by version, need not fit."""
        if name in self.layers:
            return self.layers[name]
        bare = LINE_NUMBER.sub("", name)
        hits = [layer for known, layer in self.layers.items() if LINE_NUMBER.sub("", known) == bare]
        if len(hits) > 1:
            raise BuildError(f"layer {name!r} fits {len(hits)} layers but for line numbers, first {hits[0].name!r}")
        return hits[0] if hits else None

    def add(self, name: str, tensor: Any, source: str, request: str) -> None:
        """Mark a tensor under a name through an identity layer, so that it keeps its own name and role."""
        if name in self._taken:
            raise BuildError(f"{name!r} is already the name of an input or output of the network, choose another alias")
        layer = self._trt.add_identity(tensor)
        if layer is None:
            self._report.refused[source] = f"TensorRT cannot copy a tensor of dtype {tensor.dtype.name}"
            return
        layer.name = OURS + name
        output = layer.get_output(0)
        output.name = name
        if not self._network.strongly_typed:
            output.dtype = tensor.dtype
        self._trt.mark_output(output)
        self._taken.add(name)
        shape = [int(size) for size in output.shape]
        found = {"source": source, "dtype": output.dtype.name, "shape": shape, "requests": [request]}
        self._report.outputs[name] = found


def aliases(alias: str, count: int) -> list[str]:
    """Return the names of ``count`` tensors that share an alias: the alias itself, or ``alias_0``, ``alias_1`` …"""
    if count == 1 or not alias:
        return [alias] * count
    return [f"{alias}_{i}" for i in range(count)]

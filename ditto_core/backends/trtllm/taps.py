"""Taps of an engine that is being built: any module's output or input, and any layer's outputs, under chosen names.

A model is observed through its own ``forward``: during the one call that traces it, the modules that are wanted have
theirs wrapped. This catches sub-modules that are called past ``Module.__call__``, and modules that upstream replaced
after the model was made. What is found gets an identity layer whose output is marked: a tensor that is an output
already keeps its name.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ditto_core.backends.trtllm import calls, names
from ditto_core.backends.trtllm.marking import FUSED_MLP, FUSED_REASON, Marker, Seen
from ditto_core.backends.trtllm.plan import Plan, Report
from ditto_core.errors import BuildError
from ditto_core.sites import matches

TRT_DTYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}


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
    paths = dict(global_paths(model))
    lists = {parent for path in paths for parent, _, last in (path.rpartition("."),) if last.isdigit()}
    for path, module in paths.items():
        before.append((module, module.__dict__.get("forward")))
        module.forward = watched(path, module.forward, seen, path in lists)
    try:
        yield
    finally:
        for module, forward in before:
            del module.__dict__["forward"]
            if forward is not None:
                module.forward = forward


def watched(path: str, inner: Any, seen: list[Seen], listed: bool) -> Any:
    """Return a ``forward`` that notes its first input and its first output."""

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        note(seen, path, "in", first_tensor((*args, *kwargs.values())), listed)
        result = inner(*args, **kwargs)
        note(seen, path, "", first_tensor(result), listed)
        return result

    return forward


def note(seen: list[Seen], path: str, port: str, tensor: Any, listed: bool) -> None:
    """Add a tensor to what was seen."""
    if tensor is not None:
        suffix = f":{port}" if port else ""
        seen.append(Seen(path + suffix, tuple(site + suffix for site in names.sites(path)), tensor, listed))


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
            if index.isdecimal() and int(index) < len(layers):
                return f"{prefix}.{layers[int(index)]}{dot}{rest}"
    return path


def mark(model: Any, seen: list[Seen], plan: Plan) -> Report:
    """Mark the outputs of a plan in the network that was just traced, and write the report and artifacts."""
    network = calls.DEFAULT_NET()
    config = getattr(model, "config", None)
    mapping = getattr(config, "mapping", None)
    report = Report(getattr(mapping, "rank", 0) or 0)
    dtype = TRT_DTYPES.get(getattr(config, "dtype", ""), "") if plan.registered else ""
    marker = Marker(network, report, dict(calls.NAMED_OUTPUTS(model)), plan.registered, dtype)
    for name, alias in plan.outputs.items():
        hidden = fused_away(name, seen)
        report.refused |= dict.fromkeys(hidden if hidden != [name] else (), FUSED_REASON)
        if not marker.resolve(name, alias, seen):
            report.refused[name] = FUSED_REASON if hidden else "no module of that name ran on this rank"
            if plan.strict and getattr(mapping, "pp_size", 1) == 1:
                known = (*(each for tensor in seen for each in (tensor.name, *tensor.sites)), *marker.layers)
                raise BuildError(f"output {name!r}: {FUSED_REASON}" if hidden else no_such_output(name, known))
    marker.list_registered()
    if plan.report:
        report.save(Path(plan.report))
    return report


def fused_away(selector: str, seen: list[Seen]) -> list[str]:
    """Return the names that a selector means, in its own terms, and that are gone since the MLP is fused."""
    blocks = [tensor.name.rpartition(".")[0] for tensor in seen if tensor.name.endswith(f".{FUSED_MLP}")]
    modules = [f"{block}.{leaf}" for block in blocks for leaf in ("fc", "gate")]
    every = (name for module in modules for name in (module, *names.sites(module)))
    return [name for name in every if matches(selector, name)]


def no_such_output(name: str, known: Iterable[str]) -> str:
    """Build the one-line message for a name that means nothing."""
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
    return f"output {name!r} is no module, site, layer or registered output of the model; closest: {', '.join(close)}"

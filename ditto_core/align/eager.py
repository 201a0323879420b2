"""What the eager model computes on the probes: every ATen result with its source line, under the names of its sites."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ditto_core.align.probes import Probe
from ditto_core.align.values import Value
from ditto_core.errors import RunError
from ditto_core.model.forward import Forward
from ditto_core.model.loading import LoadedModel
from ditto_core.model.recorder import Recorder
from ditto_core.model.states import items

SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Code between the model's own lines and the operators: torch's and ours."""
WITHOUT_BIAS = "without bias"
"""What a projection is before its bias: fused operators add it later."""

Key = tuple[str, str, str, int]
"""Module path, ATen operator, source line, and which of several: the same result on another probe."""


@dataclass
class Result:
    """One floating ATen result on one probe. ``parents`` are the keys of the results that it is computed from."""

    array: Any
    parents: tuple[Key, ...]
    sites: list[str] = field(default_factory=list)


@dataclass
class Run:
    """The results of one probe in order, and which of them are the model's outputs."""

    results: dict[Key, Result]
    finals: dict[str, Key]


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every floating ATen result of a forward pass. Views of weights are left out, and so are scalars."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: dict[Key, Result] = {}
        self.keys: dict[int, Key] = {}
        self.path = [""]
        self._alive: list[Any] = []
        self._count: Counter[tuple[str, str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record what it returns."""
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        parents = tuple(dict.fromkeys(self.keys[id(t)] for t in given if id(t) in self.keys))
        stores = {t.untyped_storage().data_ptr() for t in given}
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            if parents or tensor.untyped_storage().data_ptr() not in stores:
                self.add(tensor, str(func).removeprefix("aten."), model_line(), parents)
        return out

    def add(self, tensor: torch.Tensor, operator: str, line: str, parents: tuple[Key, ...]) -> Key:
        """Record one result; the tensor is kept, so that no other gets its id."""
        place = (self.path[-1], operator, line)
        key = (*place, self._count[place])
        self._count[place] += 1
        self.results[key] = Result(plain(tensor), parents)
        self.keys[id(tensor)] = key
        self._alive.append(tensor)
        return key

    def name(self, site: str, tensor: torch.Tensor, module: nn.Module) -> None:
        """Give a recorded result the name of a site; a projection with a bias is recorded without it as well."""
        key = self.keys.get(id(tensor))
        if key is None:
            return
        self.results[key].sites.append(site)
        bias = getattr(module, "bias", None)
        if isinstance(module, nn.Linear) and bias is not None and ":" not in site:
            with _disable_current_modes():
                before = tensor - bias
            self.add(before, WITHOUT_BIAS, "", self.results[key].parents)


def record(model: LoadedModel, probe: Probe) -> Run:
    """Run the eager model on one probe. Raises :class:`RunError` when it fails."""
    watch = Watch()
    recorder = Recorder(model.module, watch.name)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(recorder.recording())
            stack.enter_context(paths(model.module, watch.path))
            stack.enter_context(watch)
            outputs = forward(model, probe.inputs)
    except (RuntimeError, TypeError, IndexError) as error:
        raise RunError(f"the eager model failed on a probe: {str(error).splitlines()[0]}") from error
    finals = {name: watch.keys[id(tensor)] for name, tensor in outputs.items() if id(tensor) in watch.keys}
    return Run(watch.results, finals)


def forward(model: LoadedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs by name: of a decoder the logits and the cache's tensors."""
    step = Forward(model.module, decoder=model.decoder, seq2seq=model.seq2seq)
    step.start()
    outputs = step(inputs)
    return (
        {**outputs, **{f"present.{name}": tensor for name, tensor in items(step.cache)}} if model.decoder else outputs
    )


@contextmanager
def paths(root: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep the path of the module that is running on top of ``stack``."""

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    def enter(path: str) -> Any:
        return lambda module, args: stack.append(path)

    handles = []
    for path, module in root.named_modules():
        handles += [module.register_forward_pre_hook(enter(path)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def model_line() -> str:
    """Return ``file:line`` of the innermost frame that is neither torch's nor ours; "" where the model has none."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(SKIPPED):
        if frame.f_code is record.__code__ or frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def plain(tensor: torch.Tensor) -> Any:
    """Return a copy as a float32 array."""
    with _disable_current_modes():
        return np.array(tensor.detach().float().cpu().numpy())


def together(runs: Sequence[Run]) -> tuple[list[Value], dict[str, int]]:
    """Put the runs of all probes together: the values that every probe has, and the index of each final output."""
    shared = [key for key in runs[0].results if all(key in run.results for run in runs[1:])]
    index = {key: i for i, key in enumerate(shared)}
    values = []
    for key in shared:
        results = [run.results[key] for run in runs]
        path, operator, line, count = key
        name = f"{path}/{operator}" + (f"#{count}" if count else "")
        parents = tuple(sorted({index[k] for k in known_ancestors(runs[0], key, index)}))
        sites = tuple(dict.fromkeys(results[0].sites))
        values.append(Value(name, operator, line, [result.array for result in results], parents, sites))
    finals = {name: index[key] for name, key in runs[0].finals.items() if key in index}
    return same_rank(values, finals)


def known_ancestors(run: Run, key: Key, index: Mapping[Key, int]) -> Iterator[Key]:
    """Yield the nearest ancestors of a result that every probe has."""
    for parent in run.results[key].parents:
        if parent in index:
            yield parent
        else:
            yield from known_ancestors(run, parent, index)


def same_rank(values: list[Value], finals: dict[str, int]) -> tuple[list[Value], dict[str, int]]:
    """Check that every value has one rank on all probes; a result that has not is not the same result."""
    odd = {i for i, value in enumerate(values) if len({array.ndim for array in value.arrays}) > 1}
    if not odd:
        return values, finals
    place = {old: new for new, old in enumerate(i for i in range(len(values)) if i not in odd)}
    kept = [
        replace(value, parents=tuple(place[p] for p in value.parents if p in place))
        for i, value in enumerate(values)
        if i in place
    ]
    return kept, {name: place[i] for name, i in finals.items() if i in place}


def capture(model: LoadedModel, probes: Sequence[Probe]) -> tuple[list[Value], dict[str, int]]:
    """Return every value of the eager model on all probes, and the index of each final output by its name.

    The sites are those of :class:`~ditto_core.model.recorder.Recorder`. Raises :class:`RunError` when the model fails.
    """
    return together([record(model, probe) for probe in probes])

"""What the eager model computes on the probes: every ATen result with its source line, under the names of its sites."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ditto_core.align.probes import Probe
from ditto_core.align.store import Kept, Lazy, Store
from ditto_core.align.values import Value
from ditto_core.errors import RunError
from ditto_core.model.buffers import Buffers
from ditto_core.model.forward import Forward
from ditto_core.model.loading import LoadedModel
from ditto_core.model.placing import placed
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

    array: Kept
    parents: tuple[Key, ...]
    sites: list[str] = field(default_factory=list)


@dataclass
class Run:
    """The results of one probe in order, and which of them are the model's outputs."""

    results: dict[Key, Result]
    finals: dict[str, Key]


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every floating ATen result of a forward pass. Views of weights are left out, and so are scalars."""

    def __init__(self, store: Store) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: dict[Key, Result] = {}
        self.keys: Any = WeakIdKeyDictionary()  # tensor -> Key
        self.path = [""]
        self._store = store
        self._count: Counter[tuple[str, str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record what it returns."""
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        parents = tuple(dict.fromkeys(self.keys[t] for t in given if t in self.keys))
        stores = {t.untyped_storage().data_ptr() for t in given}
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            if parents or tensor.untyped_storage().data_ptr() not in stores:
                self.add(tensor, str(func).removeprefix("aten."), model_line(), parents)
        return out

    def add(self, tensor: torch.Tensor, operator: str, line: str, parents: tuple[Key, ...]) -> Key:
        """Record one result."""
        place = (self.path[-1], operator, line)
        key = (*place, self._count[place])
        self._count[place] += 1
        self.results[key] = Result(self._store.keep(plain(tensor)), parents)
        self.keys[tensor] = key
        return key

    def name(self, site: str, tensor: torch.Tensor, module: nn.Module) -> None:
        """Give a recorded result the name of a site; a projection with a bias is recorded without it as well."""
        key = self.keys.get(tensor)
        if key is None:
            return
        self.results[key].sites.append(site)
        bias = getattr(module, "bias", None)
        if isinstance(module, nn.Linear) and bias is not None and ":" not in site:
            with _disable_current_modes():
                before = tensor - bias
            self.path.append(site.partition("@")[0])  # the module has returned
            self.add(before, WITHOUT_BIAS, "", self.results[key].parents)
            self.path.pop()


def in_float32(model: LoadedModel) -> LoadedModel:
    """Return a model that computes in float32; of weights in half precision a block has its own while it runs."""
    return replace(model, module=placed(model.module, torch.float32, streams=True))


def record(model: LoadedModel, probe: Probe, store: Store) -> Run:
    """Run the eager model on one probe; a store keeps what it computes. Raises :class:`RunError` when it fails."""
    watch = Watch(store)
    recorder = Recorder(model.module, watch.name)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(Buffers(model.module).kept())
            stack.enter_context(recorder.recording())
            stack.enter_context(paths(model.module, watch.path))
            stack.enter_context(watch)
            outputs = forward(model, probe.inputs)
    except (RuntimeError, TypeError, IndexError) as error:
        raise RunError(f"the eager model failed on a probe: {str(error).splitlines()[0]}") from error
    finals = {name: watch.keys[tensor] for name, tensor in outputs.items() if tensor in watch.keys}
    return Run(watch.results, finals)


def forward(model: LoadedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs by name: of a decoder the logits and the cache's tensors."""
    step = Forward(model.module, decoder=model.decoder, staged=model.staged)
    step.start()
    outputs = step(inputs)
    return (
        {**outputs, **{f"present.{name}": tensor for name, tensor in items(step.cache)}} if model.decoder else outputs
    )


def outputs(model: LoadedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs of one step in float32, by name."""
    running = in_float32(model)
    buffers = Buffers(running.module)
    with torch.no_grad(), buffers.kept():
        return {name: buffers.own(tensor) for name, tensor in forward(running, inputs).items()}


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
    """Return a float32 array, which may be the tensor's own memory."""
    with _disable_current_modes():
        return tensor.detach().float().cpu().numpy()


def together(runs: Sequence[Run]) -> tuple[list[Value], dict[str, int]]:
    """Put the runs of all probes together: the values that every probe has, and the index of each final output.

    A result of another rank on another probe is not the same result.
    """
    ranks = [{key: len(result.array.shape) for key, result in run.results.items()} for run in runs]
    shared = [key for key, rank in ranks[0].items() if all(other.get(key) == rank for other in ranks[1:])]
    index = {key: i for i, key in enumerate(shared)}
    values = []
    for key in shared:
        results = [run.results[key] for run in runs]
        path, operator, line, count = key
        name = f"{path}/{operator}" + (f"#{count}" if count else "")
        parents = tuple(sorted({index[k] for k in known_ancestors(runs[0], key, index)}))
        sites = tuple(dict.fromkeys(results[0].sites))
        values.append(Value(name, operator, line, Lazy(result.array for result in results), parents, sites))
    finals = {name: index[key] for name, key in runs[0].finals.items() if key in index}
    return values, finals


def known_ancestors(run: Run, key: Key, index: Mapping[Key, int]) -> Iterator[Key]:
    """Yield the nearest ancestors of a result that every probe has."""
    for parent in run.results[key].parents:
        if parent in index:
            yield parent
        else:
            yield from known_ancestors(run, parent, index)


def capture(model: LoadedModel, probes: Sequence[Probe]) -> tuple[list[Value], dict[str, int]]:
    """Return every value of the eager model on all probes, and the index of each final output by its name.

    The sites are those of :class:`~ditto_core.model.recorder.Recorder`. Raises :class:`RunError` when the model fails.
    """
    store, running = Store(), in_float32(model)
    return together([record(running, probe, store) for probe in probes])

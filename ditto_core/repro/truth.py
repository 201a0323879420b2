"""What the operators of a repro should have computed: by the eager module, else by the export in higher precision."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from onnx import TensorProto

from ditto_core.backends.eager import widened
from ditto_core.graphs import precision
from ditto_core.graphs.cut import extract
from ditto_core.model.placing import placed
from ditto_core.system.ieee import exact_float32

if TYPE_CHECKING:
    import numpy.typing as npt

    from ditto_core.engines.engine import Engine
    from ditto_core.model.exported import Export
    from ditto_core.model.loading import LoadedModel
    from ditto_core.sites import Tap


@dataclass(frozen=True)
class Truth:
    """Where the expected output comes from, in any precision."""

    model: LoadedModel
    export: Export
    engine: Engine
    tap: Tap
    inputs: Mapping[str, npt.NDArray[Any]]
    known: Mapping[str, npt.NDArray[Any]]

    def expected(self, dtype: str) -> tuple[npt.NDArray[Any], str]:
        """Return the output and what computed it."""
        module = self.module()
        if module is not None:
            with suppress(TypeError, AttributeError):  # it takes more than its first input: the operators will tell
                return self.by_module(module, dtype), f"eager {type(module).__name__} in {dtype}"
        graph = extract(self.export.graph_path(), self.tap.value, self.known, next(iter(self.inputs.values())))
        if dtype != self.engine.spec.dtype:
            graph = precision.widened(graph, TensorProto.DOUBLE)
        types = {value.name: value for value in graph.graph.input}
        (result,) = precision.in_numpy(graph, precision.fitted({name: self.known[name] for name in types}, types))
        return result, f"the export's operators by ONNX's reference implementation in {result.dtype}"

    def module(self) -> torch.nn.Module | None:
        """Return the eager module that computes the site from the one tensor that the cut reads."""
        paths = [name for name in (self.tap.site, *self.tap.aliases) if ":" not in name and "@" not in name]
        modules: dict[str, torch.nn.Module] = dict(self.model.module.named_modules())
        value_of = {n: tap.value for tap in self.engine.taps for n in (tap.site, *tap.aliases)}
        for path in paths:
            if path in modules and tuple(self.inputs) == (value_of.get(f"{path}:in"),):
                return modules[path]
        return None

    def by_module(self, module: torch.nn.Module, dtype: str) -> npt.NDArray[Any]:
        """Run a copy of the module in ``dtype``."""
        from ditto_core.model.containers import tensors_in

        kind: torch.dtype = getattr(torch, dtype)
        (given,) = (torch.from_numpy(value.copy()) for value in self.inputs.values())
        own = placed(module, kind, via=getattr(torch, self.engine.spec.dtype))
        with torch.inference_mode(), exact_float32(), widened(dtype):
            output = own(given.to(kind) if given.is_floating_point() else given)
        return array(next(tensor for _, tensor in tensors_in(output)))


def array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as a contiguous array on the host."""
    values: npt.NDArray[Any] = tensor.detach().cpu().contiguous().numpy()
    return values

"""Trace a model without its weights: they are read one by one when the graph is written.

While it is traced, a large weight is zeros that take no memory (pages that nobody wrote to). The traced graph gets
:class:`onnx_ir.LazyTensor` in their place, so that whatever reads a weight later on, folding of constants too, reads
the true one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ditto_core.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir

    from ditto_core.model.mapped import Links, Place

LARGE = 1024
"""Elements from which a weight is read when it is written."""

PLACE = "place"
"""Under which a value of the graph keeps where in a checkpoint's file its weight is."""

INLINE = 256
"""Bytes up to which a weight stands in the graph's own file, as torch's exporter has it."""


@dataclass(frozen=True)
class Reader:
    """Reads a weight in the dtype that the graph has it in."""

    data: torch.Tensor
    dtype: torch.dtype

    def __call__(self) -> torch.Tensor:
        """Return the weight."""
        return self.data.to(self.dtype)

    def place(self, links: Links | None) -> Place | None:
        """Return where the weight is in a file, as it is to be; None where it has to be written.

        One of float32 is written: a quantizer of weights finds it only where it need not be transposed.
        """
        as_stored = self.data.dtype == self.dtype and self.dtype.itemsize == 2
        return links.place(self.data) if links is not None and as_stored else None


@contextmanager
def hollow(module: nn.Module, dtype: torch.dtype) -> Iterator[dict[int, Reader]]:
    """Give a module ``dtype`` for a while, its large weights as zeros; yield what reads those, by the zeros' address.

    A weight's name in the graph may be another than in the module: that of a site where it passes by.

    Floating parameters and persistent buffers are cast. Non-persistent buffers stay: transformers computes rotary
    frequencies in float32 whatever the weights are.
    """
    true: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    readers: dict[int, Reader] = {}
    try:
        for tensor in weights(module):
            data = tensor.data
            true[id(tensor)] = tensor, data
            if data.numel() >= LARGE and data.is_contiguous():
                tensor.data = zeros(data.shape, dtype)
                readers[tensor.data_ptr()] = Reader(data, dtype)
            else:
                tensor.data = data.to(dtype)
        yield readers
    finally:
        for tensor, data in true.values():
            tensor.data = data


def weights(module: nn.Module) -> list[torch.Tensor]:
    """Return the floating parameters and persistent buffers of a module, each once."""
    state: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    buffers = [buffer for name, buffer in module.named_buffers() if name in state]
    return [tensor for tensor in (*module.parameters(), *buffers) if tensor.is_floating_point()]


def zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of a contiguous layout; ``numpy.zeros`` leaves their pages to the operating system."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def give_weights(model: onnx_ir.Model, readers: Mapping[int, Reader], links: Links | None = None) -> None:
    """Let a graph's initializers read the true weights, which ``readers`` has by the address of the zeros.

    A transposed weight, which the exporter would compute and keep, becomes an initializer that is read transposed.
    One of which ``links`` has the file is that part of the file, and is transposed by the engine.
    Raises :class:`BuildError` where the zeros of a weight are left: two engines built from them would agree.
    """
    from onnx_ir.passes.common import InlinePass

    InlinePass()(model)  # linear's transpose stands in a function
    used: set[int] = set()
    for value in list(model.graph.initializers.values()):
        held: Any = value.const_value
        address = held.raw.data_ptr() if isinstance(getattr(held, "raw", None), torch.Tensor) else 0
        if (read := readers.get(address)) is not None:
            used.add(address)
            value.const_value = lazy(read, held, range(len(held.shape)))
            if (place := read.place(links)) is not None:
                value.meta[PLACE] = place
                continue
            users = list(value.consumers())
            if len(users) == 1 and users[0].op_type == "Transpose":  # of a tied weight there would be two copies
                transpose(users[0], read)
    refuse_zeros(model, [readers[address] for address in readers if address not in used])


def refuse_zeros(model: onnx_ir.Model, unused: Sequence[Reader]) -> None:
    """Raise :class:`BuildError` when the graph holds zeros as large as a weight that nothing in it reads."""
    import onnx_ir as ir

    sizes = {read().numel() for read in unused}
    for value in model.graph.initializers.values():
        held = value.const_value
        if (
            held is None
            or isinstance(held, ir.LazyTensor)
            or held.size not in sizes
            or not held.dtype.is_floating_point()
        ):
            continue
        if not held.numpy().astype(np.float32).any():
            raise BuildError(f"the exporter copied the weight {value.name!r} before its numbers were read")


def transpose(node: onnx_ir.Node, read: Reader) -> None:
    """Make the result of a weight's transpose an initializer."""
    import onnx_ir as ir

    (weight,), (result,), graph = node.inputs, node.outputs, node.graph
    assert weight is not None and weight.const_value is not None and graph is not None
    axes = node.attributes["perm"].as_ints()
    tensor = lazy(read, weight.const_value, axes)
    made = ir.Value(name=result.name, shape=result.shape, type=result.type, const_value=tensor)
    result.replace_all_uses_with(made)
    graph.remove(node, safe=True)
    graph.register_initializer(made)


def optimize(model: onnx_ir.Model) -> None:
    """Fold constants as torch's exporter does; what is to stay in a checkpoint's file is not folded."""
    from onnxscript.optimizer import optimize_ir
    from onnxscript.rewriter.onnx_fusions import fuse

    def should_fold(node: onnx_ir.Node) -> bool | None:
        return False if any(value is not None and PLACE in value.meta for value in node.inputs) else None

    optimize_ir(model, should_fold=should_fold)
    fuse(model)


def save(model: onnx_ir.Model, path: Path) -> None:
    """Write a graph, and beside it the weights that are not in a checkpoint's file."""
    import onnx_ir as ir

    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    held = [(value, value.const_value) for value in values if value.const_value is not None]
    large = [(value, tensor) for value, tensor in held if tensor.nbytes > INLINE and PLACE not in value.meta]
    made = ir.external_data.convert_tensors_to_external([t for _, t in large], path.parent, f"{path.name}.data")
    for (value, _), written in zip(large, made, strict=True):
        value.const_value = written
    for value, tensor in held:
        if PLACE in value.meta:
            value.const_value = stored(value.meta[PLACE], tensor)
    ir.save(model, path)


def stored(place: Place, like: Any) -> onnx_ir.ExternalTensor:
    """Return a tensor whose bytes are in a file."""
    import onnx_ir as ir

    where = {"location": place.file.name, "offset": place.offset, "length": like.nbytes, "base_dir": place.file.parent}
    return ir.ExternalTensor(**where, dtype=like.dtype, shape=like.shape, name=like.name)


def lazy(read: Reader, like: Any, axes: Any) -> onnx_ir.LazyTensor:
    """Return a tensor that is read when it is written, with its axes in the order ``axes``."""
    import onnx_ir as ir
    from onnx_ir.tensor_adapters import TorchTensor

    shape = ir.Shape([like.shape[axis] for axis in axes])
    return ir.LazyTensor(lambda: TorchTensor(read().permute(*axes).contiguous()), like.dtype, shape, name=like.name)

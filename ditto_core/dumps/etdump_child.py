"""What ``etdump.py`` runs in a child process: ExecuTorch's Inspector, whose tensors go to a safetensors file.

A tensor that is the output of a module is named by the module's path, every other one ``et:{instruction}.{operator}``
(``:1`` … for the further outputs of an operator).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from safetensors.torch import save_file

from ditto_core.errors import TraceError


def convert(etdump: str, etrecord: str, buffer: str, output: str) -> list[str]:
    """Read, name and write every tensor that the Inspector shows; return their names in the order of execution."""
    inspector = opened(etdump, etrecord, buffer)
    events = [e for block in inspector.event_blocks for e in block.events if e.debug_data]
    modules = module_outputs(edge_nodes(inspector)) if etrecord else {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named(events, modules):
        tensors.setdefault(name, tensor.clone().contiguous())
    save_file(tensors, output)
    return list(tensors)


def opened(etdump: str, etrecord: str, buffer: str) -> Any:
    """Return ExecuTorch's Inspector of the files."""
    from executorch.devtools import Inspector

    try:
        return Inspector(etdump_path=etdump, etrecord=etrecord or None, debug_buffer_path=buffer)
    except subprocess.CalledProcessError as error:  # its text is a long command line
        raise TraceError(f"its parser flatc ended with code {error.returncode}") from error


def edge_nodes(inspector: Any) -> list[Any]:
    """Return the nodes of the edge program in the ETRecord, in topological order."""
    program = inspector._etrecord.edge_dialect_program
    if isinstance(program, dict):
        program = program["forward"]
    return list(program.graph.nodes) if program is not None else []


def module_outputs(nodes: Iterable[Any]) -> dict[int, list[tuple[str, tuple[int, ...] | None]]]:
    """Return, for each debug handle, the modules whose last operator has it: path and shape of the module's output.

    Nodes come in topological order, so that the last node of a module is the one that it returns.
    """
    last: dict[str, tuple[int, tuple[int, ...] | None]] = {}
    for node in nodes:
        handle, stack = node.meta.get("debug_handle"), node.meta.get("nn_module_stack")
        if node.op != "call_function" or not isinstance(handle, int) or not stack:
            continue
        for path, _kind in stack.values():
            if path:
                last[path] = (handle, shape_of(node.meta.get("val")))
    found: dict[int, list[tuple[str, tuple[int, ...] | None]]] = {}
    for path, (handle, shape) in last.items():
        found.setdefault(handle, []).append((path, shape))
    return found


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the static shape of a node's (first) value, or None."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    if not isinstance(first, torch.Tensor) or not all(isinstance(size, int) for size in first.shape):
        return None
    return tuple(first.shape)


def named(
    events: list[Any], modules: dict[int, list[tuple[str, tuple[int, ...] | None]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors; each instruction appears once, though the log holds it as several events.

    Views are no instructions: where a module ends in one, the tensor gets the shape that the view would give it.
    """
    final = {last_handle(e): e._instruction_id for e in events}
    seen = set()
    for event in events:
        instruction = event._instruction_id
        if instruction in seen:
            continue
        seen.add(instruction)
        tensors = [t for t in event.debug_data if isinstance(t, torch.Tensor)]
        handle = last_handle(event)
        ends = modules.get(handle, []) if final[handle] == instruction else []
        for i, tensor in enumerate(tensors):
            if i == 0 and ends:
                yield from ((path, reshaped(tensor, shape)) for path, shape in ends)
                continue
            operator = event.name.removeprefix("native_call_")
            yield f"et:{instruction}.{operator}" + (f":{i}" if i else ""), tensor


def last_handle(event: Any) -> int:
    """Return the debug handle of an event's result: that of the operator, of a delegated block the last one's."""
    handles = event.debug_handles
    if isinstance(handles, int):
        return handles
    return int(handles[-1]) if handles else -1


def reshaped(tensor: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    """Return the tensor in a module's shape where the number of elements is the same."""
    if shape is None or tensor.numel() != torch.Size(shape).numel():
        return tensor
    return tensor.reshape(shape)

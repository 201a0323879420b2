"""What ``etdump.py`` runs in a child process to pair an ETDump with what the program of its ETRecord computes.

The pairs and their distances are those of ``Inspector.calculate_numeric_gap``. A pair is named by the module that it is
the output of, else ``{module}/{operator}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save_file

from ditto_core.dumps.etdump_child import edge_nodes, module_outputs, opened, reshaped
from ditto_core.errors import TraceError

DISTANCES = ("MSE", "L1", "SNR")
FRAME = re.compile(r'File "([^"]*)", line (\d+), in ')


def pair(etdump: str, etrecord: str, buffer: str, output: str) -> list[dict[str, Any]]:
    """Write ``actual:NAME`` and ``expected:NAME`` for each operator, and describe each by name, operators, module,
    source line, block and the Inspector's own distances (a text where it raises)."""
    inspector = opened(etdump, etrecord, buffer)
    nodes = edge_nodes(inspector)
    modules = module_outputs(nodes)
    stacks = {node.meta.get("debug_handle"): node.meta.get("nn_module_stack") for node in nodes}
    tensors: dict[str, torch.Tensor] = {}
    found: list[dict[str, Any]] = []
    for row in rows(inspector):
        expected, actual = (tensor(row[f"{side}_intermediate_output"]) for side in ("aot", "runtime"))
        handle = int(row["aot_debug_handle"][-1])
        operators = [str(name) for name in row["aot_ops"]]
        path, kind = innermost(stacks.get(handle))
        inside = f"{path}/{operators[-1]}" if path else operators[-1]
        facts = {
            "operators": operators,
            "kind": kind,
            "source": line_of((row["stacktraces"] or {}).get(operators[-1])),
            "block": row["runtime_ops"] == ["DELEGATE_CALL"],
            "gap": distances(inspector, expected, actual),
        }
        for name in [end for end, _ in modules.get(handle, [])] or [inside]:
            tensors[f"actual:{name}"] = reshaped(actual, tuple(expected.shape)).clone().contiguous()
            tensors[f"expected:{name}"] = expected.clone().contiguous()
            found.append({"name": name, **facts})
    save_file(tensors, output)
    return found


def rows(inspector: Any) -> list[Any]:
    """Return the rows of the Inspector's table. Raises :class:`TraceError` where the ETRecord has no inputs."""
    from executorch.devtools.inspector import numerical_comparator as known

    class Nothing(known.NumericalComparatorBase):  # type: ignore[misc]
        """Measures nothing: each distance is measured by itself, for one that raises would end them all."""

        def element_compare(self, a: Any, b: Any) -> float:
            return 0.0

    if inspector._etrecord._representative_inputs is None:
        raise TraceError("its ETRecord has no inputs: call update_representative_inputs([inputs]) before it is saved")
    frame = inspector.calculate_numeric_gap(Nothing(inspector))
    return [row for _, row in frame.iterrows()]


def tensor(value: Any) -> torch.Tensor:
    """Return an output as a tensor; a reference of one output may come in a sequence."""
    return torch.as_tensor(value[0] if isinstance(value, list | tuple) and len(value) == 1 else value)


def distances(inspector: Any, expected: torch.Tensor, actual: torch.Tensor) -> Mapping[str, float | str]:
    """Return the Inspector's distances by name; it cannot compare some shapes."""
    from executorch.devtools.inspector import numerical_comparator as known

    found: dict[str, float | str] = {}
    for name in DISTANCES:
        try:
            found[name] = float(getattr(known, f"{name}Comparator")(inspector).element_compare(expected, actual))
        except ValueError as error:
            found[name] = str(error).splitlines()[0]
    return found


def innermost(stack: Mapping[str, tuple[str, Any]] | None) -> tuple[str, str]:
    """Return path and class of the innermost module of a node."""
    path, kind = list(stack.values())[-1] if stack else ("", "")
    return path, str(kind).rpartition(".")[2]


def line_of(stack: str | None) -> str:
    """Return ``file.py:20`` of the innermost frame of a stack trace that is not torch's."""
    frames: Sequence[tuple[str, str]] = FRAME.findall(stack or "")
    own = [(file, line) for file, line in frames if "/torch/" not in file]
    return f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else ""

"""``torch.cond``: a graph has both branches, and shows of them what they return; a run takes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def branching(cond: Callable[..., Any]) -> Iterator[None]:
    """Let ``cond`` do for a while what ``torch.cond`` does, which compiles both branches to run one.

    Not while a model is traced: torch makes a graph of each branch then.
    """
    own: Any = torch.cond
    if not torch.compiler.is_exporting():
        setattr(torch, "cond", cond)  # noqa: B010 - to a type checker a function is no variable
    try:
        yield
    finally:
        setattr(torch, "cond", own)  # noqa: B010


def has_branches(program: torch.export.ExportedProgram) -> bool:
    """Tell whether a traced model has a ``torch.cond``."""
    return any(node.target is torch.ops.higher_order.cond for node in program.graph.nodes)

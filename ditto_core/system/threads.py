"""Torch's threads: as many as a run asks for, and then as many as before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ditto_core.errors import UsageError


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with ``count`` torch threads and put the number back. Zero changes nothing."""
    import torch

    before = torch.get_num_threads()
    if count < 0:
        raise UsageError(f"the number of threads is {count}, expected 0 (leave as it is) or more")
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

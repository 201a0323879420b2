"""Float32 that is float32: torch rounds to TF32 or bfloat16 where it may, in cuDNN's convolutions by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

IEEE = "ieee"


def settings() -> list[Any]:
    """Return torch's settings of what float32 products are computed in, each with an ``fp32_precision``."""
    from torch.backends import cuda, cudnn, mkldnn

    return [cuda.matmul, *(getattr(side, kind) for side in (cudnn, mkldnn) for kind in SORTS if hasattr(side, kind))]


SORTS = ("matmul", "conv", "rnn")


@contextmanager
def exact_float32() -> Iterator[None]:
    """Compute float32 products in float32, whatever this process allows torch besides: a reference is none else."""
    before = [(setting, setting.fp32_precision) for setting in settings()]
    try:
        for setting, _ in before:
            setting.fp32_precision = IEEE
        yield
    finally:
        for setting, precision in before:
            setting.fp32_precision = precision

"""Compute float32 in IEEE float32: torch may round to TF32 or bfloat16, in cuDNN's convolutions by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

IEEE, HIGHEST = "ieee", "highest"
SORTS = ("matmul", "conv", "rnn")


def settings() -> list[Any]:
    """Return torch's settings of what float32 products are computed in, each with an ``fp32_precision``."""
    from torch.backends import cuda, cudnn, mkldnn

    return [cuda.matmul, *(getattr(side, kind) for side in (cudnn, mkldnn) for kind in SORTS if hasattr(side, kind))]


@contextmanager
def exact_float32() -> Iterator[None]:
    """Compute float32 products in float32, whatever this process allows torch besides: a reference is none else."""
    before = [(setting, setting.fp32_precision) for setting in settings()]
    try:
        with older_settings():
            for setting, _ in before:
                setting.fp32_precision = IEEE
            yield
    finally:
        for setting, precision in before:
            setting.fp32_precision = precision


@contextmanager
def older_settings() -> Iterator[None]:
    """Set the two older switches alike, and back: where they differ from the newer ones, torch refuses to read them.

    They are left alone where that is so already.
    """
    import torch

    known: list[tuple[Any, Any, Any]] = []
    with suppress(RuntimeError):
        known.append((torch.set_float32_matmul_precision, HIGHEST, torch.get_float32_matmul_precision()))
    with suppress(RuntimeError):
        known.append((allow_in_cudnn, False, torch.backends.cudnn.allow_tf32))
    for put, exact, _ in known:
        put(exact)
    try:
        yield
    finally:
        for put, _, old in known:
            put(old)


def allow_in_cudnn(allowed: bool) -> None:
    """Switch TF32 in cuDNN."""
    import torch

    torch.backends.cudnn.allow_tf32 = allowed

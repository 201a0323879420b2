"""By-products that make the next build or run faster: TensorRT's timing cache, TensorRT-RTX's compiled kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from ditto_core.cache import Cache
from ditto_core.system.atomic import write_atomic

TIMING, KERNELS = "tensorrt-timing", "tensorrt-kernels"


def state_file(directory: Path, kind: str, *parts: str) -> Path | None:
    """Return the file for a by-product in the cache that holds ``directory``, or None for an engine outside a cache."""
    cache = Cache.holding(directory)
    if cache is None:
        return None
    return cache.state(kind, re.sub(r"[^\w.-]+", "_", "-".join(part for part in parts if part)) + ".bin")


def read_state(path: Path | None) -> bytes:
    """Return the content of a by-product, or nothing."""
    if path is not None:
        with suppress(OSError):
            return path.read_bytes()
    return b""


def update_state(path: Path | None, merge: Callable[[bytes], bytes]) -> None:
    """Replace a by-product by ``merge(content)``, one process at a time. One that cannot be written is done without."""
    if path is None:
        return
    with suppress(OSError), FileLock(f"{path}.lock"):
        write_atomic(path, merge(read_state(path)))

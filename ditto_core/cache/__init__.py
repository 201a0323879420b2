"""The engine cache: content-addressed, atomic, locked, verified on every read, prunable.

Names are resolved on first use: every pytest run asks where the cache is, few need the cache.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ditto_core.cache._root import ENVIRONMENT, default_root, is_url

if TYPE_CHECKING:
    from ditto_core.cache._entry import Entry, Held, Problem, content_digest, link_or_copy
    from ditto_core.cache._store import Cache

_LAZY = {"Cache": "_store"} | dict.fromkeys(("Entry", "Held", "Problem", "content_digest", "link_or_copy"), "_entry")

__all__ = [
    "ENVIRONMENT",
    "Cache",
    "Entry",
    "Held",
    "Problem",
    "content_digest",
    "default_root",
    "is_url",
    "link_or_copy",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ditto_core.cache' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ditto_core.cache.{_LAZY[name]}"), name)

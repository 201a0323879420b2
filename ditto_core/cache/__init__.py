"""The engine cache: content-addressed, atomic, locked, verified on every read, prunable."""

from ditto_core.cache._entry import Entry, Problem, link_or_copy
from ditto_core.cache._store import ENVIRONMENT, Cache, default_root

__all__ = ["ENVIRONMENT", "Cache", "Entry", "Problem", "default_root", "link_or_copy"]

"""Where the cache is."""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT = "DITTO_CACHE_DIR"


def default_root() -> Path:
    """Return ``$DITTO_CACHE_DIR``, or ``ditto_core`` in the user's cache directory."""
    override = os.environ.get(ENVIRONMENT)
    if override:
        return Path(override).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("ditto_core")

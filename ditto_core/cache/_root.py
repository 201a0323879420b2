"""Where the cache is."""

from __future__ import annotations

import os
import re
from pathlib import Path

ENVIRONMENT = "DITTO_CACHE_DIR"


def default_root() -> Path:
    """Return ``$DITTO_CACHE_DIR`` unless that is a URL, else ``ditto_core`` in the user's cache directory."""
    override = os.environ.get(ENVIRONMENT)
    return Path(override).expanduser() if override and not is_url(override) else user_root()


def user_root() -> Path:
    """Return ``ditto_core`` in the user's cache directory."""
    from platformdirs import user_cache_path

    return user_cache_path("ditto_core")


def is_url(text: str) -> bool:
    """Tell whether a place is a URL, as fsspec takes it: ``s3://bucket/ditto``, ``memory://x``."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.:-]*://", text) is not None

"""Engines on disk, the workspace that builds and caches them, and the workers that use them."""

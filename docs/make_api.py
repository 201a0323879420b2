"""Build the API reference from the docstrings: ``python docs/make_api.py FOLDER`` (``make api``)."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pdoc

MODULES = (
    "ditto_core",
    "ditto_core.backends.base",
    "ditto_core.backends.registry",
    "ditto_core.causes",
    "ditto_core.dumps",
    "ditto_core.errors",
    "ditto_core.gates",
    "ditto_core.localize",
    "ditto_core.relations",
    "ditto_core.session",
    "ditto_core.sites",
    "ditto_core.strategies",
    "ditto_core.trace",
    "pytest_ditto.fixtures",
    "pytest_ditto.strategies",
)
"""What a test, a script or a backend of one's own imports. Everything else is internal."""


def resolve(module: ModuleType) -> None:
    """Bind the names that a module resolves on first use, and those that inherited annotations mean: pdoc reads the
    namespace of a class's own module."""
    for name in getattr(module, "__all__", ()):
        public = vars(module).setdefault(name, getattr(module, name))
        for base in getattr(public, "__mro__", ())[1:]:
            if base.__module__.startswith("ditto_core"):
                for known, value in vars(sys.modules[base.__module__]).items():
                    vars(sys.modules[public.__module__]).setdefault(known, value)


def build(folder: Path) -> None:
    """Write one page a module into a folder. A warning of pdoc, such as an unresolved annotation, is an error."""
    for name in MODULES:
        resolve(importlib.import_module(name))
    pdoc.render.configure(docformat="restructuredtext")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]))

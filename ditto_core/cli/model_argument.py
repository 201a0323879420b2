"""A model on the command line: a Hub id, a path, or a callable of the user's own code."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from ditto_core.errors import ModelError, first_line, nearest
from ditto_core.spec import ModelSource


def read_model(text: str) -> ModelSource:
    """Return a source: ``FILE.py:NAME`` and ``package.module:NAME`` are callables, everything else a location.

    Raises :class:`ModelError` when the module cannot be imported or has no such callable.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier() or Path(text).exists():
        return ModelSource.of(text)
    module = imported(where)
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [known for known, value in vars(module).items() if callable(value)]
        raise ModelError(f"{where} has no callable {name!r}{nearest(name, known)}")
    return ModelSource.of(factory)


def imported(where: str) -> ModuleType:
    """Import a file or a module, as a script in the working directory could. Raises :class:`ModelError`."""
    path = Path(where)
    folder = path.parent if path.suffix == ".py" else Path()
    sys.path.insert(0, str(folder.resolve()))
    try:
        return importlib.import_module(path.stem if path.suffix == ".py" else where)
    except (Exception, SystemExit) as error:
        what = "it ends the program" if isinstance(error, SystemExit) else first_line(error)
        raise ModelError(f"{where} cannot be imported: {what}") from error

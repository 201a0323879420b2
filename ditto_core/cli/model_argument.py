"""A model on the command line: a Hub id, a path, or a callable of the user's own code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ditto_core.errors import ModelError, first_line, nearest
from ditto_core.spec import ModelSource
from ditto_core.system.files import check_kept
from ditto_core.system.fingerprint import fingerprint

if TYPE_CHECKING:
    from ditto_core.engines.engine import Engine


def read_model(text: str, trust: bool = False) -> ModelSource:
    """Return a source: ``FILE.py:NAME`` and ``package.module:NAME`` are callables, everything else a location.

    ``trust``: run the code of a location's own.

    Raises :class:`ModelError` when the module cannot be imported or has no such callable.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier() or Path(text).exists():
        return replace(ModelSource.of(text), trust_remote_code=trust)
    module = imported(where)
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [known for known, value in vars(module).items() if callable(value)]
        raise ModelError(f"{where} has no callable {name!r}{nearest(name, known)}")
    return ModelSource.of(factory)


def model_path(text: str) -> Path:
    """Return where a model's files are, as :func:`check_kept` takes them; of a Hub id there are none at its path."""
    where, colon, _ = text.rpartition(":")
    return Path(where if colon and not Path(text).exists() else text).expanduser()


def load_engine(folder: Path, results: Mapping[str, Path | None], trust: bool = False) -> Engine:
    """Load an engine, whose folder does not say whether to ``trust`` its model's own code.

    Raises :class:`UsageError` where a result would be written over it or over its model.
    """
    from ditto_core.engines.engine import Engine
    from ditto_core.model.beside import check_model_kept

    check_kept(results, {"engine": folder})
    engine = Engine.load(folder)
    check_model_kept(results, {"engine's model": model_path(engine.spec.model.location)})
    return replace(engine, spec=replace(engine.spec, model=replace(engine.spec.model, trust_remote_code=trust)))


def engine_folder(text: str) -> Path | None:
    """Return the directory of a built engine, where the text names one."""
    from ditto_core.engines.engine import MANIFEST_FILE

    return Path(text) if (Path(text) / MANIFEST_FILE).is_file() else None


def imported(where: str) -> ModuleType:
    """Import a file or a module, as a script in the working directory could. Raises :class:`ModelError`."""
    path = Path(where)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        known = [sibling.name for sibling in path.parent.glob("*.py")]
        raise ModelError(f"{where} cannot be imported: there is no such file{nearest(path.name, known)}")
    sys.path.insert(0, str((path.parent if is_file else Path()).resolve()))
    try:
        return of_file(path.resolve()) if is_file else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        what = "it ends the program" if isinstance(error, SystemExit) else first_line(error)
        raise ModelError(f"{where} cannot be imported: {what}") from error


def of_file(path: Path) -> ModuleType:
    """Import a file in a folder of ``sys.path`` by its own name, so that child processes and its siblings find it too.

    Where that name is another module's, it gets one from its path. Raises what the file raises.
    """
    if found_at(path.stem) == path:
        return importlib.import_module(path.stem)
    name = f"{path.stem}_{fingerprint(str(path))[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # as of every file that ends with .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found_at(name: str) -> Path | None:
    """Return the file that Python would import by a name."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None

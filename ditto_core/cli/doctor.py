"""`ditto doctor`: what is installed, what works here, what clashes."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ditto_core.backends.base import Backend

PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "executorch")
"""What models, exports and dumps need, whatever the backend."""


def command(
    backend: Annotated[str, typer.Argument(metavar="[BACKEND]", help="Say all about this backend alone.")] = "",
) -> None:
    """Show what works on this machine. Versions, backends, the cache, and clashes with other packages named ditto."""
    from ditto_core.backends.base import Diagnosed
    from ditto_core.backends.registry import backend_names, get_backend, libraries
    from ditto_core.cache import default_root

    names = [get_backend(backend).name] if backend else backend_names()
    packages = dict.fromkeys((*PACKAGES, *(each for name in names for each in libraries(name))))
    found = {name: installed(name) for name in packages}
    typer.echo(f"installed: {', '.join(f'{name} {number}' for name, number in found.items() if number)}")
    for name in names:
        known = loaded(name)
        said = known if isinstance(known, str) else state(known)
        typer.echo(f"backend {name:14} {said}")
        if isinstance(known, Diagnosed) and (backend or not said.startswith("no: ")):
            for line in known.diagnose():
                typer.echo(f"  {line}")
    typer.echo(f"cache {default_root()}")
    for line in clashes():
        typer.echo(f"clash: {line}")


def installed(name: str) -> str:
    """Return a distribution's version, without importing it; an empty string when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def loaded(name: str) -> Backend | str:
    """Return a backend, or why it cannot be loaded: what its module imports may be missing."""
    from ditto_core.backends.registry import get_backend

    try:
        return get_backend(name)
    except ImportError as error:
        return f"no: {error}"


def state(backend: Backend) -> str:
    """Return a backend's versions, dtypes and what it was measured to do, or why its engines cannot run here."""
    from ditto_core.backends.base import NeedsDevice
    from ditto_core.backends.matrix import summary
    from ditto_core.errors import DittoError

    try:
        facts = ", ".join(f"{k} {v}" for k, v in backend.versions().items())
    except (DittoError, ImportError) as error:
        return f"no: {error}"
    known = f"({facts}{facts and '; '}{', '.join(backend.dtypes)})"
    try:
        if isinstance(backend, NeedsDevice):
            backend.check_runs()
    except (DittoError, ImportError) as error:
        return f"does not run here {known}: {error}"
    able = summary(backend.name)
    return f"ok {known}{able and f'; {able}'}"


def clashes() -> list[str]:
    """Return what else on this machine is called ditto: the console script, and the pytest plugin of that name."""
    found = []
    script = shutil.which("ditto")
    ours = Path(sys.executable).parent / "ditto"
    if script and Path(script).resolve() != ours.resolve():
        found.append(f"`ditto` on the PATH is {script}, not this package's: use `python -m ditto_core`")
    for point in entry_points(group="console_scripts", name="ditto"):
        if point.dist is not None and point.dist.name != "pytest-ditto-engine":
            found.append(f"{point.dist.name} installs a script `ditto` too: use `python -m ditto_core`")
    try:
        distribution("pytest-ditto")
        found.append("pytest-ditto (snapshots) is installed too: both plugins load, their names do not meet")
    except PackageNotFoundError:
        pass
    return found

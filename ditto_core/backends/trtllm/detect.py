"""Which TensorRT-LLM is installed, told from its files: importing it prints a banner and loads CUDA and MPI."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

from ditto_core.errors import BackendError

PACKAGE = "tensorrt_llm"
ENGINE_FILES = ("builder.py", "network.py", "module.py", "runtime/generation.py")
LAST_ENGINE_RELEASE = "1.2.1"
CONTAINER_COMMANDS = (
    "pip install --no-deps pytest-ditto-engine   # the vendor's torch and numpy stay as they are",
    "pip install platformdirs filelock safetensors typer rich   # those of its few dependencies that are missing",
    "python -m ditto_core doctor",
    "python -m ditto_core.trtllm_build --checkpoint_dir CKPT --output_dir ENGINE --add-output 'model.layers.*'",
    "python -m ditto_core.trtllm_run ENGINE --input-ids 1,2,3 --steps 4 --dump-dir DUMP",
    "ditto compare DUMP REFERENCE --name-map DUMP/names.json   # anywhere, without TensorRT-LLM",
)


@dataclass(frozen=True)
class Installation:
    """An installed TensorRT-LLM. ``root`` is the package's directory."""

    version: str
    root: Path

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Major, minor and patch of the version; a pre-release counts as its release."""
        return release(self.version)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Files of the TensorRT engine path that are not there."""
        return tuple(name for name in ENGINE_FILES if not (self.root / name).is_file())

    @property
    def engines(self) -> bool:
        """Tell whether TensorRT engines can be built and run: they were removed after 1.3.0rc20."""
        return not self.missing

    @property
    def pytorch(self) -> bool:
        """Tell whether ``tensorrt_llm.LLM`` is the PyTorch backend: from 1.0 on, that for engines has its own package.

        Where engines are gone it is the only one.
        """
        apart = (self.root / "_tensorrt_engine").is_dir()
        return (self.root / "_torch").is_dir() and (apart or not self.engines)

    @property
    def label(self) -> str:
        """What it can do, in words."""
        kinds = [
            name for name, there in (("TensorRT engines", self.engines), ("PyTorch backend", self.pytorch)) if there
        ]
        return f"{PACKAGE} {self.version}: {' and '.join(kinds) or 'no usable backend'}"


def release(text: str) -> tuple[int, ...]:
    """Return ``(1, 3, 0)`` for ``1.3.0rc3``."""
    found = re.match(r"\d+(?:\.\d+)*", text.removeprefix("v"))
    numbers = tuple(map(int, found[0].split("."))) if found else ()
    return (*numbers, 0, 0, 0)[:3]


def find() -> Installation | None:
    """Return what is installed without importing it, or None."""
    try:
        spec = find_spec(PACKAGE)
    except ValueError:  # a module without a spec sits in sys.modules
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    return Installation(version_of(root), root)


def version_of(root: Path) -> str:
    """Return the version in ``version.py``, else that of the distribution, else ``unknown``."""
    file = root / "version.py"
    found = re.search(r"""__version__\s*=\s*["']([^"']+)""", file.read_text()) if file.is_file() else None
    if found:
        return found[1]
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"


def require() -> Installation:
    """Return what is installed. Raises :class:`BackendError` with the remedy when nothing is."""
    found = find()
    if found is None:
        raise BackendError(
            f"{PACKAGE} is not installed: work in the vendor's container, or dump there and compare here "
            f"(`ditto doctor trtllm` prints the commands)"
        )
    return found


def upstream_compiler() -> str:
    """Return the version of the compiler named ``ditto`` whose ``build`` command makes TensorRT-LLM engines, or ''."""
    try:
        found = distribution("ditto")
    except PackageNotFoundError:
        return ""
    needs = " ".join(found.requires or ())
    return found.version if re.search(r"tensorrt[-_]llm", needs) else ""


def installed(name: str) -> str:
    """Return a distribution's version, or an empty string."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def report_lines() -> Iterator[str]:
    """Yield the lines of ``ditto doctor trtllm``: what is installed, works or clashes, what to run in a container."""
    found = find()
    if found is None:
        yield f"{PACKAGE} is not installed: make engines and dumps in the vendor's container, compare them anywhere"
    else:
        yield found.label
        yield from problems(found)
    compiler = upstream_compiler()
    if compiler:
        yield f"clash: the compiler `ditto` {compiler} owns the command `ditto`: call ours as `python -m ditto_core`"
        yield "the compiler `ditto` can build: backend='trtllm', options={'builder': 'ditto'}, outputs 'trt:FX_NODE'"
    yield "in the vendor's container:"
    for command in CONTAINER_COMMANDS:
        yield f"  {command}"


def problems(found: Installation) -> Iterator[str]:
    """Yield what does not work with an installation, and why."""
    if not found.engines:
        lost = ", ".join(found.missing)
        yield f"no TensorRT engines: {lost} missing (last stable release with them: {LAST_ENGINE_RELEASE})"
    elif not installed("tensorrt"):
        yield "no TensorRT engines: tensorrt itself is not installed"
    if not found.pytorch:
        yield "no PyTorch backend: it needs TensorRT-LLM 1.0 or later"
    numpy = installed("numpy")
    if numpy and release(numpy) >= (2,):
        yield f"clash: numpy {numpy}, TensorRT-LLM up to 1.3.0rc3 needs numpy below 2"

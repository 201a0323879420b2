"""Reading a trace lazily, one tensor at a time; a file that differs from the manifest is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ditto_core.errors import TraceError
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.system.files import digest, path_of, reading
from ditto_core.trace import mapped
from ditto_core.trace.manifest import Manifest, StepMeta, TensorMeta
from ditto_core.trace.streamfile import CODES, short

_DTYPES = {code: short(dtype) for dtype, code in CODES.items()}


@dataclass(frozen=True)
class StepData:
    """The tensors of one step, by name, in the order in which they were written; each is read when it is asked for."""

    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    taps: Mapping[str, torch.Tensor]


class LazyTensors(Mapping[str, torch.Tensor]):
    """A mapping that reads (maps into memory) one tensor at a time from a safetensors file."""

    def __init__(self, path: Path, metas: Mapping[str, TensorMeta]) -> None:
        self._path = path
        self._metas = metas

    def __getitem__(self, name: str) -> torch.Tensor:
        key = self._metas[name].key
        with reading(self._path):
            tensor = mapped.load(self._path, key)
        # A tensor behind one of odd size is not aligned in the file, and kernels may rely on alignment.
        return tensor if tensor.data_ptr() % tensor.element_size() == 0 else tensor.clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._metas)

    def __len__(self) -> int:
        return len(self._metas)


class Trace:
    """A trace on disk, read lazily. Open it with :meth:`open`."""

    def __init__(self, directory: Path, manifest: Manifest, *, verify: bool = True) -> None:
        self.directory = directory
        self.manifest = manifest
        self._unverified = set(range(len(manifest.steps))) if verify else set()

    @classmethod
    def open(cls, directory: Path | str, *, verify: bool = True) -> Trace:
        """Read the manifest of a trace. With ``verify``, a step's SHA-256 is checked when the step is first opened.

        Raises :class:`TraceError` when ``directory`` is not a trace, or its manifest is damaged or of a newer version.
        """
        path = path_of(directory, "trace")
        return cls(path, Manifest.load(path), verify=verify)

    @property
    def steps(self) -> int:
        """How many steps there are; step 0 is the prefill."""
        return len(self.manifest.steps)

    @property
    def info(self) -> SessionInfo:
        """What session was recorded."""
        return self.manifest.session

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The taps, in topological order."""
        return self.manifest.taps

    @property
    def tokens(self) -> list[list[int]]:
        """The generated tokens, one list a row."""
        return [list(row) for row in zip(*(s.tokens for s in self.manifest.steps if s.tokens), strict=True)]

    def meta(self, index: int) -> StepMeta:
        """Return what the manifest says of a step. Raises :class:`TraceError` when there is no such step."""
        if not 0 <= index < self.steps:
            raise TraceError(f"{self.directory} has no step {index}: it holds {self.steps} steps, numbered from 0")
        return self.manifest.steps[index]

    def step(self, index: int) -> StepData:
        """Open one step. Raises :class:`TraceError`, naming the file, when it is not what the manifest says."""
        meta = self.meta(index)
        path = self.directory / meta.file
        check_step(path, meta)
        if index in self._unverified:
            with reading(path):
                found = digest(path)
            if found != meta.sha256:
                raise TraceError(f"{path} is damaged: SHA-256 {found[:12]}..., the manifest says {meta.sha256[:12]}...")
            self._unverified.discard(index)
        groups = {k: {t.name: t for t in meta.tensors if t.kind == k} for k in ("input", "output", "tap")}
        return StepData(*(LazyTensors(path, metas) for metas in groups.values()))


def check_step(path: Path, meta: StepMeta) -> None:
    """Compare a step's file with the manifest: size, names, dtypes, shapes. Raises :class:`TraceError`."""
    with reading(path):
        size = path.stat().st_size
    if size != meta.bytes:
        raise TraceError(f"{path} is damaged: it has {size} bytes, the manifest says {meta.bytes}")
    expected = {t.key: (t.dtype, list(t.shape)) for t in meta.tensors}
    with reading(path), mapped.opened(path) as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (safe_open is not a mapping)
        found = {k: (_DTYPES.get(s.get_dtype(), s.get_dtype()), list(s.get_shape())) for k, s in slices.items()}
    for key in [*expected, *found]:
        if expected.get(key) != found.get(key):
            raise TraceError(f"{path} holds {key!r} as {found.get(key)}, the manifest says {expected.get(key)}")

"""What ``manifest.json`` of a trace says, and its JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ditto_core.errors import TraceError, first_line
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.system.files import parse_json, read_text
from ditto_core.version import __version__

FORMAT = "ditto-trace"
SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
KINDS = ("input", "tap", "output")


def tensor_key(kind: str, name: str) -> str:
    """Return a tensor's name in ``step{i}.safetensors``: a tap keeps its own, ``input:`` and ``output:`` mark the rest.

    A tap whose own name begins like one of :data:`KINDS` gets the prefix ``tap:``.
    """
    if kind == "tap" and not name.startswith(tuple(f"{k}:" for k in KINDS)):
        return name
    return f"{kind}:{name}"


@dataclass(frozen=True)
class TensorMeta:
    """One tensor of a step: whether it is an input, a tap or an output, torch's name of its dtype, and its shape."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """Its name in the file."""
        return tensor_key(self.kind, self.name)


@dataclass(frozen=True)
class StepMeta:
    """One step. ``tokens`` holds the token that each row generated in it, if the writer was told."""

    index: int
    file: str
    bytes: int
    sha256: str
    tensors: tuple[TensorMeta, ...]
    tokens: tuple[int, ...] = ()

    @cached_property
    def text(self) -> str:
        """Return the JSON form, on one line; tensors are grouped by kind, in the order of arrival."""
        groups = {f"{k}s": {t.name: [t.dtype, list(t.shape)] for t in self.tensors if t.kind == k} for k in KINDS}
        plain = {n: getattr(self, n) for n in ("index", "file", "bytes", "sha256")}
        return json.dumps({**plain, "tokens": list(self.tokens), **groups})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepMeta:
        """Inverse of :attr:`text`. Raises ``KeyError``, ``TypeError`` or ``ValueError`` when it is malformed."""
        tensors = tuple(
            TensorMeta(kind, name, str(dtype), tuple(map(int, shape)))
            for kind in KINDS
            for name, (dtype, shape) in dict(data[f"{kind}s"]).items()
        )
        file = str(data["file"])
        if Path(file).name != file:
            raise ValueError(f"file {file!r} is not in the trace's directory")
        tokens = tuple(map(int, data["tokens"]))
        return cls(int(data["index"]), file, int(data["bytes"]), str(data["sha256"]), tensors, tokens)


@dataclass(frozen=True)
class Manifest:
    """The whole of it. ``complete`` tells that the writer was closed, ``texts`` what each row generated."""

    session: SessionInfo
    taps: tuple[Tap, ...]
    prompts: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    steps: tuple[StepMeta, ...] = ()
    complete: bool = False
    created_by: str = f"pytest-ditto-engine {__version__}"

    def dumps(self) -> str:
        """Return the JSON form, one line a step."""
        head = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "created_by": self.created_by,
            "complete": self.complete,
            "session": {**asdict(self.session), "facts": dict(self.session.facts)},
            "prompts": list(self.prompts),
            "texts": list(self.texts),
            "taps": [tap.to_json() for tap in self.taps],
        }
        steps = ",\n  ".join(step.text for step in self.steps)
        return f'{json.dumps(head, indent=1)[:-2]},\n "steps": [\n  {steps}\n ]\n}}\n'

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read it from a trace's directory. Raises :class:`TraceError` when it is missing, damaged or too new."""
        path = directory / MANIFEST
        try:
            data = parse_json(read_text(path))
            version = data["schema_version"] if data["format"] == FORMAT else None
        except FileNotFoundError:
            raise TraceError(f"{directory} is not a trace: it has no {MANIFEST}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path} is damaged, or is not the manifest of a trace: {first_line(error)}") from error
        if version != SCHEMA_VERSION:
            raise TraceError(f"{path} has schema version {version!r}, this version reads {SCHEMA_VERSION}")
        try:
            return cls._from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"{path} is damaged: {first_line(error)}") from error

    @classmethod
    def _from_json(cls, data: Mapping[str, Any]) -> Manifest:
        steps = tuple(StepMeta.from_json(s) for s in data["steps"])
        if [s.index for s in steps] != list(range(len(steps))):
            raise ValueError(f"its steps are numbered {[s.index for s in steps]}")
        if len({len(s.tokens) for s in steps if s.tokens}) > 1:
            raise ValueError("its steps have tokens of different numbers of rows")
        return cls(
            session=SessionInfo.from_json(data["session"]),
            taps=tuple(Tap.from_json(t) for t in data["taps"]),
            prompts=tuple(map(str, data["prompts"])),
            texts=tuple(map(str, data["texts"])),
            steps=steps,
            complete=bool(data["complete"]),
            created_by=str(data["created_by"]),
        )

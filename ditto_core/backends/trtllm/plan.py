"""What an engine should show, and what it shows: the plan of a build's outputs, and the report of each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ditto_core.errors import BuildError, UsageError

ADD_OUTPUT_VARIABLE = "TRTLLM_ADD_OUTPUT"
PLAN_VARIABLE = "DITTO_TRTLLM_PLAN"
RAW = "trt:"


@dataclass(frozen=True)
class Plan:
    """What to make observable. ``outputs`` maps a module, site, glob over either, registered output or layer name to
    an alias (empty: its own name); ``trt:`` before a name is dropped. ``report`` and ``artifacts`` are folders, or
    empty. ``model_class`` is a file and a class of the user's. ``strict``: a name that means nothing is an error, not
    just reported. ``registered``: the build marks what the model registered by itself (``--enable_debug_output``)."""

    outputs: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True
    report: str = ""
    artifacts: str = ""
    model_class: tuple[str, str] = ("", "")
    registered: bool = False

    def __post_init__(self) -> None:
        plain = {name.removeprefix(RAW): alias for name, alias in self.outputs.items()}
        object.__setattr__(self, "outputs", plain)
        aliases = [alias for alias in plain.values() if alias]
        twice = next((alias for alias in aliases if aliases.count(alias) > 1), None)
        if twice is not None:
            raise UsageError(f"the alias {twice!r} is given to several outputs, expected a name of its own for each")

    def to_env(self) -> dict[str, str]:
        """Return the environment variable by which worker processes get the plan."""
        return {PLAN_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Plan:
        """Read the plan, or else ``TRTLLM_ADD_OUTPUT``. Raises :class:`UsageError` when either is malformed."""
        text = environ.get(PLAN_VARIABLE)
        if not text:
            return cls(parse_add_output(environ.get(ADD_OUTPUT_VARIABLE, "")))
        data = json.loads(text)
        return cls(**{**data, "model_class": tuple(data["model_class"])})


def parse_add_output(text: str) -> dict[str, str]:
    """Read ``TRTLLM_ADD_OUTPUT``: a JSON object, name -> alias. Raises :class:`UsageError` for anything else."""
    if not text:
        return {}
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{ADD_OUTPUT_VARIABLE} is no JSON, expected {{layer name: alias}}: {error}") from error
    if not isinstance(data, dict) or not all(isinstance(alias, str) for alias in data.values()):
        raise UsageError(f"{ADD_OUTPUT_VARIABLE} is {text!r}, expected a JSON object {{layer name: alias}}")
    return data


@dataclass
class Report:
    """What came of a plan on one rank: outputs by name, and a reason for each that could not be."""

    rank: int
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Name of the report's file."""
        return f"taps.rank{self.rank}.json"

    def save(self, folder: Path) -> None:
        """Write as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.file_name).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path, rank: int = 0) -> Report:
        """Inverse of :meth:`save`. Raises :class:`BuildError` when the build left none."""
        path = folder / cls(rank).file_name
        if not path.is_file():
            raise BuildError(f"the build left no {path.name}: the model was not traced through the adapter")
        return cls(**json.loads(path.read_text()))

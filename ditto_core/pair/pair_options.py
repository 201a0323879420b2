"""How an engine and its reference run side by side. No torch in here: the plugin reads it while it collects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditto_core.errors import UsageError, nearest

KINDS: Mapping[str, tuple[str, Any]] = {
    "observer": ("True or False", bool),
    "threads": ("an integer", int),
    "device": ("a name", str),
    "localize": ("True or False", bool),
    "isolation": ("process or none", str),
    "step_timeout": ("seconds", int | float),
}
"""What an option has to be, in words and as a type."""
OWN_WEIGHTS = "weights"
"""The reference that is the model with the quantized weights that an engine file has."""
ISOLATION = ("process", "none")


@dataclass(frozen=True)
class PairOptions:
    """How a pair runs.

    ``reference``: ``eager``, a dtype for eager (``eager:float32``), a backend's name (the same model built by it), the
    path of a trace or of another tool's dump, ``weights`` (the model with the quantized weights of an engine file), or
    an :class:`~ditto_core.spec.EngineSpec`. ``name_map``: how the dump's names become sites, as
    :meth:`ditto_core.dumps.namemap.NameMap.of` takes it (default: the dump's ``names.json``).
    ``observer``: also build the engine without taps and compare final outputs. ``threads``: torch threads while it runs
    (0 leaves them). ``dump``: folder for traces.
    ``localize``: also measure the error that each tapped site adds by itself, and name causes. ``localize_failed``: do
    so in a second run when a comparison fails and took at most this many seconds (0: never).
    ``isolation``: where the engine is built and runs, in child processes (``process``) or here (``none``); empty:
    as its backend asks. ``step_timeout``: seconds that a child process may take to load the engine, or for one step.
    """

    reference: Any = "eager"
    tolerance: Any = None
    observer: bool = True
    threads: int = 1
    dump: Path | None = None
    device: str = "cpu"
    localize: bool = False
    name_map: Any = None
    localize_failed: float = 0.0
    isolation: str = ""
    step_timeout: float = 600.0

    def __post_init__(self) -> None:
        for name, (expected, kind) in KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise UsageError(f"{name} is {value!r}, expected {expected}")
        if self.threads < 0:
            raise UsageError(f"the number of threads is {self.threads}, expected 0 (leave as it is) or more")
        if self.isolation not in ("", *ISOLATION):
            raise UsageError(
                f"isolation is {self.isolation!r}, expected process or none{nearest(self.isolation, ISOLATION)}"
            )
        if not self.step_timeout > 0:
            raise UsageError(f"step_timeout is {self.step_timeout!r}, expected seconds, more than 0")

    def same_sessions(self, other: PairOptions) -> bool:
        """Tell whether a pair with ``other`` options runs the very same sessions."""
        names = ("reference", "observer", "device", "name_map", "isolation", "step_timeout")
        return all(getattr(self, name) == getattr(other, name) for name in names)

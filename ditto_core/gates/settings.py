"""Gates in files: ``[tool.ditto_core.gates.NAME]`` of ``pyproject.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ditto_core.compare.tolerance_files import read_table
from ditto_core.errors import UsageError, nearest
from ditto_core.gates.gate import NEW_TOKENS, Gate
from ditto_core.gates.policy import Policy
from ditto_core.gates.suite import BUILT_IN, load_suite
from ditto_core.model.beside import check_model_kept
from ditto_core.spec import EngineSpec, ModelSource
from ditto_core.system.files import check_kept

SPEC = ("backend", "dtype", "options", "profile", "attention")
RUN = ("reference", "max_new_tokens", "threads", "device", "batch")
POLICY = tuple(item.name for item in fields(Policy))
KNOWN = ("model", "suite", "baseline", "samples", *SPEC, *RUN, *POLICY)

KINDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("samples", "max_new_tokens", "threads", "batch", "resamples", "seed"), ("an integer", (int,))),
    **dict.fromkeys(("alpha", "beta", "discordant", "spread"), ("a number", (int, float))),
    **dict.fromkeys(("options", "profile", "limits"), ("a table", (Mapping,))),
    **dict.fromkeys(("suite", "baseline"), ("a path", (str, Path))),
    **dict.fromkeys(("backend", "dtype", "device"), ("a name", (str,))),
}
"""What a setting has to be, in words and as types."""


@dataclass(frozen=True)
class GateSettings:
    """A gate as it is written down. ``folder`` is where relative paths start from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = field(default_factory=Path.cwd)

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            if name not in KNOWN:
                raise UsageError(f"a gate has no setting {name!r}{nearest(name, KNOWN)} (known: {', '.join(KNOWN)})")
            expected, kinds = KINDS.get(name, ("", (object,)))
            if not isinstance(value, kinds) or (isinstance(value, bool) and name in KINDS):
                raise UsageError(f"a gate's {name} is {value!r}, expected {expected}")

    def over(self, **values: Any) -> GateSettings:
        """Return the settings with others on top; None and empty ones leave what is there. Tables merge."""
        chosen = {name: value for name, value in values.items() if value not in (None, "", {}, ())}
        for name, value in chosen.items():
            if isinstance(value, Mapping):
                chosen[name] = {**self.values.get(name, {}), **value}
        return GateSettings({**self.values, **chosen}, self.folder)

    @property
    def baseline(self) -> Path | None:
        """The baseline's file, None where there is none."""
        name = self.values.get("baseline")
        return self.folder / name if name else None

    @property
    def suite(self) -> Path | None:
        """The suite's file, None for one that ships with this package."""
        name = self._suite()
        return None if name in BUILT_IN else Path(name)

    @property
    def policy(self) -> Policy:
        """The policy part."""
        limits = {name: read_limit(name, value) for name, value in self.values.get("limits", {}).items()}
        return Policy(**{**self._only(POLICY), **({"limits": limits} if limits else {})})

    def gate(self, spec: EngineSpec | None = None, *, trust: bool = False) -> Gate:
        """Return the gate, on ``spec`` where one is given, else on the model, whose own code runs where it is to
        ``trust``: no file says so. Raises :class:`UsageError` for what is missing or wrong.
        """
        if spec is None:
            if "model" not in self.values:
                raise UsageError("the gate names no model, expected --model or `model` in its table")
            spec = EngineSpec.of(self._model(trust), outputs=None, **self._only(SPEC))
        suite = load_suite(self._suite()).first(self.values.get("samples", 0))
        return Gate(spec, suite, policy=self.policy, **{"max_new_tokens": NEW_TOKENS, **self._only(RUN)})

    def check_kept(self, output: Path | None, *, update: bool) -> None:
        """Raise :class:`UsageError` where the result, or with ``update`` the baseline, would be written over what it is
        made of."""
        self.check_read({"output": output})
        check_kept({"output": output}, {"baseline": self.baseline})
        if update:
            self.check_read({"baseline": self.baseline})

    def check_read(self, results: Mapping[str, Path | None]) -> None:
        """Raise :class:`UsageError` where a result would be written over what every run of the gate reads."""
        model = self.values.get("model")
        check_kept(results, {"suite": self.suite})
        check_model_kept(results, {"model": self.folder / model if isinstance(model, str) and model else None})

    def _only(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: self.values[name] for name in names if name in self.values}

    def _suite(self) -> str:
        name = str(self.values.get("suite", BUILT_IN[0]))
        return name if name in BUILT_IN else str(self.folder / name)

    def _model(self, trust: bool) -> ModelSource:
        model = self.values["model"]
        local = isinstance(model, str) and (self.folder / model).exists()
        source = ModelSource.of(str(self.folder / model) if local else model)
        return replace(source, trust_remote_code=source.trust_remote_code or trust)


def project_gate(folder: Path, name: str) -> GateSettings:
    """Return a gate of the nearest ``pyproject.toml`` at or above ``folder``. Raises :class:`UsageError`."""
    for parent in (folder, *folder.parents):
        path = parent / "pyproject.toml"
        if path.is_file():
            table = read_table(path, "tool", "ditto_core", "gates")
            if name not in table:
                known = ", ".join(table) or "none"
                raise UsageError(f"{path} has no gate {name!r}{nearest(name, table)} (known: {known})")
            return GateSettings(read_table(path, "tool", "ditto_core", "gates", name), parent)
    raise UsageError(f"no pyproject.toml at or above {folder}, expected one with [tool.ditto_core.gates.{name}]")


def read_limit(metric: str, value: Any) -> float:
    """Return a limit; ``"none"`` is infinity. Raises :class:`UsageError`."""
    try:
        return float("inf") if value == "none" else float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the limit of {metric} is {value!r}, expected a number, or 'none' to report without judging"
        ) from error

"""Options, ini keys and environment variables: one table, read once into a frozen dataclass."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ditto_core.report.write import MANY
from pytest_ditto.readers import (
    FAILED,
    read_backend,
    read_cache,
    read_dump,
    read_factor,
    read_file,
    read_folder,
    read_reports,
    read_seconds,
    read_switch,
    read_threads,
)

GROUP = "ditto-engine"


@dataclass(frozen=True)
class PytestOptions:
    """What the user chose for this run. Folders are absolute; ``None`` and ``0`` leave a choice to the default."""

    dump_dir: Path | None = None
    dump: str = FAILED
    cache_dir: Path | str | None = None
    artifacts_dir: Path | None = None
    threads: int | None = None
    backend: str | None = None
    require_backends: bool = False
    observer: bool = True
    tolerance_factor: float | None = None
    reports: tuple[tuple[str, Path], ...] = ()
    localize: bool = False
    localize_failed: float = 5.0
    calibrate: Path | None = None
    update_baseline: bool = False
    pin_gpus: bool = True
    needs: Path | None = None
    strict: bool = False


OPTIONS = pytest.StashKey[PytestOptions]()


@dataclass(frozen=True)
class Setting:
    """One choice: its field in :class:`PytestOptions`, its spellings, and how its text becomes a value.

    ``read`` takes the text and the folder that relative paths start from, and raises ``ValueError`` with what it
    expected. A ``switch`` takes no value on the command line, where giving it means ``on_value``. A ``repeatable`` one
    is read as lines.
    """

    name: str
    read: Callable[[str, Path], Any]
    help: str
    metavar: str = ""
    variable: str = ""
    switch: bool = False
    on_value: str = "true"
    flag_name: str = ""
    repeatable: bool = False

    @property
    def flag(self) -> str:
        """The command-line option."""
        return f"--ditto-{(self.flag_name or self.name).replace('_', '-')}"

    @property
    def dest(self) -> str:
        """The attribute of ``config.option``."""
        return f"ditto_engine_{self.name}"

    @property
    def ini(self) -> str:
        """The key in ``pytest.ini`` or ``[tool.pytest.ini_options]``."""
        return f"ditto_engine_{self.name}"

    @property
    def full_help(self) -> str:
        """The help text with the other spellings."""
        others = f"ini: {self.ini}" + (f", environment: {self.variable}" if self.variable else "")
        return f"{self.help} ({others})"


SETTINGS = (
    Setting(
        "dump_dir",
        read_folder,
        "Write the tensors of each ditto test, step by step, into a folder of its own below DIR",
        "DIR",
        "DITTO_DUMP_DIR",
    ),
    Setting("dump", read_dump, "Keep the dumps of failed tests or of all [default: failed]", "failed|all"),
    Setting(
        "cache_dir",
        read_cache,
        "Keep exports, engines and noise floors in DIR, or share them through an fsspec URL such as s3://bucket/ditto "
        "[default: the user's cache directory]",
        "DIR",
        "DITTO_CACHE_DIR",
    ),
    Setting(
        "artifacts_dir",
        read_folder,
        "Write readable by-products of each build into DIR",
        "DIR",
        "DEBUG_ARTIFACTS_DIR",
    ),
    Setting(
        "threads",
        read_threads,
        "Run torch with N threads in ditto tests whose marker sets no number [default: 1]",
        "N",
        "DITTO_THREADS",
    ),
    Setting(
        "backend",
        read_backend,
        "Use this backend instead of the markers'; if a marker lists several, run only this one",
        "NAME",
        "DITTO_BACKEND",
    ),
    Setting(
        "require_backends",
        read_switch,
        "Fail tests whose backend is not installed or cannot run here, instead of skipping them",
        variable="DITTO_REQUIRE_BACKENDS",
        switch=True,
    ),
    Setting(
        "strict",
        read_switch,
        "End the run before any test when a ditto marker is wrong, as --strict does; else it is that test's error",
        switch=True,
    ),
    Setting(
        "observer",
        read_switch,
        "Do not build and run the engine without taps beside the tapped one",
        switch=True,
        on_value="false",
        flag_name="no_observer",
    ),
    Setting(
        "tolerance_factor",
        read_factor,
        "Allow F times the noise floor instead of the markers' factors; rules by selector still apply",
        "F",
        "DITTO_TOLERANCE_FACTOR",
    ),
    Setting(
        "reports",
        read_reports,
        f"Write all comparisons of this run to PATH, KIND one of {', '.join(MANY)}; repeatable",
        "KIND:PATH",
        "DITTO_REPORT",
        flag_name="report",
        repeatable=True,
    ),
    Setting(
        "localize",
        read_switch,
        "Measure the error that each tapped site adds by itself, in the same run, and name causes",
        variable="DITTO_LOCALIZE",
        switch=True,
    ),
    Setting(
        "localize_failed",
        read_seconds,
        "Run a failed comparison again to name the cause if it took at most SECONDS [default: 5; 0: never]",
        "SECONDS",
        "DITTO_LOCALIZE_FAILED",
    ),
    Setting(
        "calibrate",
        read_file,
        "Write twice the measured errors as tolerance rules to FILE (TOML), for review",
        "FILE",
        "DITTO_CALIBRATE",
    ),
    Setting(
        "update_baseline",
        read_switch,
        "Run the references of accuracy gates and rewrite their baselines",
        switch=True,
    ),
    Setting(
        "needs",
        read_file,
        "Write what the collected tests need of the cache to FILE (JSON) and run none; see `ditto cache needs`",
        "FILE",
    ),
    Setting(
        "pin_gpus",
        read_switch,
        "Let each xdist worker use all GPUs instead of one each",
        switch=True,
        on_value="false",
        flag_name="no_pin_gpus",
    ),
)


def add_options(parser: pytest.Parser) -> None:
    """Register every setting with pytest, as text: :func:`read_options` reads all sources alike."""
    group = parser.getgroup(GROUP, "ditto-engine: engines beside their reference")
    for setting in SETTINGS:
        how: dict[str, Any] = {"metavar": setting.metavar}
        if setting.switch:
            how = {"action": "store_const", "const": setting.on_value}
        if setting.repeatable:
            how["action"] = "append"
        group.addoption(setting.flag, dest=setting.dest, default=None, help=setting.full_help, **how)
        parser.addini(setting.ini, f"Same as {setting.flag}", default=None)


def read_options(config: pytest.Config) -> PytestOptions:
    """Read every setting: command line over environment over ini over default.

    Raises :class:`pytest.UsageError`, in one line, for an invalid value.
    """
    return PytestOptions(**{s.name: read_setting(config, s) for s in SETTINGS if find(config, s) is not None})


def is_strict(config: pytest.Config) -> bool:
    """Tell whether a wrong marker ends the run: ``--ditto-strict``, or pytest's own ``--strict``."""
    try:
        of_pytest = config.getini("strict")
    except ValueError:  # before pytest 9
        of_pytest = config.getoption("strict", False)
    return config.stash[OPTIONS].strict or bool(of_pytest)


def read_setting(config: pytest.Config, setting: Setting) -> Any:
    """Read one setting that was given somewhere."""
    found = find(config, setting)
    assert found is not None
    text, where, base = found
    try:
        return setting.read(text.strip(), base)
    except ValueError as error:
        raise pytest.UsageError(f"{where} is {text!r}, expected {error}") from None


def find(config: pytest.Config, setting: Setting) -> tuple[str, str, Path] | None:
    """Return a setting's text, where it was given, and the folder that relative paths there start from."""
    here = config.invocation_params.dir
    given = getattr(config.option, setting.dest, None)
    if given is not None:
        return "\n".join(given) if setting.repeatable else str(given), setting.flag, here
    if os.environ.get(setting.variable):
        return os.environ[setting.variable], f"environment variable {setting.variable}", here
    written = read_ini(config, setting.ini)
    if written not in (None, "", []):
        lines = written if isinstance(written, list) else [written]
        return (
            "\n".join(map(str, lines)),
            f"ini key {setting.ini}",
            config.inipath.parent if config.inipath else config.rootpath,
        )
    return None


def read_ini(config: pytest.Config, key: str) -> Any:
    """Return what an ini key is set to: text, or the number, truth value or list that TOML holds.

    ``getini`` refuses what is no text in the table ``[tool.pytest]``, and can be told otherwise since pytest 9.2 only.
    """
    value = getattr(getattr(config, "_inicfg", {}).get(key), "value", None)
    return value if isinstance(value, bool | int | float | list) else config.getini(key)

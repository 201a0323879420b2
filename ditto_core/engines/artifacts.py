"""Readable by-products of builds: one folder for each engine, under a readable name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.system.files import parse_json, read_text
from ditto_core.system.fingerprint import fingerprint

if TYPE_CHECKING:
    from ditto_core.engines.engine import Engine
    from ditto_core.model.exported import Export
    from ditto_core.spec import EngineSpec

CONFIG_FILE = "build_config.json"


def artifacts_folder(root: Path, spec: EngineSpec, built_of: str, say: Callable[[str], None]) -> Path:
    """Return the folder of an engine's artifacts and make it: of a readable name, with a digest where that is taken.

    It stays an engine's when the files of its model change; what a factory makes is told by its content, ``built_of``.
    """
    owner = fingerprint(spec.to_json(), spec.model.trust_remote_code, built_of if spec.model.factory else "")
    name = folder_name(spec)
    plain, own = root / name, root / f"{name}-{owner[:8]}"
    if claimed(plain, owner, spec):
        return plain
    claimed(own, owner, spec)
    say(f"artifacts of {spec.model.label} {spec.label} are in {own}: {plain.name} has those of another model or test")
    return own


def folder_name(spec: EngineSpec) -> str:
    """Return the readable name of an engine's folder: the engines of one test write into one each."""
    kinds = {"later": spec.later, "untapped": not spec.outputs}
    return "-".join((spec.model.label, spec.label, *(kind for kind, so in kinds.items() if so)))


def claimed(folder: Path, owner: str, spec: EngineSpec) -> bool:
    """Tell whether a folder is an owner's, who takes one that is nobody's."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / CONFIG_FILE).open("x") as stream:
            stream.write(written({"owner": owner, "spec": spec.to_json()}))
    except FileExistsError:
        return owner_of(folder) == owner
    return True


def owner_of(folder: Path) -> str:
    """Return whose a folder is; empty where that cannot be read."""
    try:
        return str(parse_json(read_text(folder / CONFIG_FILE))["owner"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def write_artifacts(engine: Engine, export: Export, directory: Path) -> None:
    """Write what a person reads about a build: FX graph, ONNX without weights, provenance, build configuration."""
    for name in ("graph_module.py", "graph.txt", "provenance.json", export.onnx_path.name):
        if (export.directory / name).exists():  # a backend that builds from no ONNX has no graph
            shutil.copyfile(export.directory / name, directory / name)
    config = {
        "owner": owner_of(directory),
        "spec": engine.spec.to_json(),
        "facts": dict(engine.facts),
        "versions": dict(engine.versions),
        "taps": [tap.site for tap in engine.taps],
    }
    (directory / CONFIG_FILE).write_text(written(config))


def written(config: dict[str, Any]) -> str:
    """Return a build configuration as it stands in its file."""
    return json.dumps(config, indent=1, default=str) + "\n"

"""The backend of a file that is there already: it is aligned, and run as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ditto_core.align.alignment import Alignment
from ditto_core.align.file import CONFIG, OnnxFile, ask_fused, show
from ditto_core.align.making import align
from ditto_core.align.pieces import own_weights
from ditto_core.align.rounding import rounded
from ditto_core.align.session import FileSession, mapped
from ditto_core.backends.base import BuildReport, BuildRequest
from ditto_core.backends.given_file import check_options
from ditto_core.backends.onnxruntime import LEVELS, load_library
from ditto_core.backends.onnxruntime_crash import refuse_crashing
from ditto_core.errors import SelectorError, UsageError, nearest
from ditto_core.model.loading import LoadedModel, load_lean
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec
from ditto_core.system.files import path_of

ENGINE_FILE = "engine.onnx"
MAP_FILE = "names.json"
OPTIONS = ("file", "map", "inputs", "level", "threads")


class FileBackend:
    """Runs an ONNX file of any origin with ONNX Runtime. Options: ``file`` (the marker's ``engine=``), ``map`` (a map
    that `ditto align` wrote), ``inputs`` (roles of the file's inputs by name), ``level``, ``threads``."""

    name = "onnx-file"
    dtypes = ("float32", "float16", "bfloat16", "float64")

    def check(self, spec: EngineSpec) -> None:
        """Raise when onnxruntime, the file or its map is missing, an option is unknown, or the dtype is another."""
        load_library()
        check_options(spec, OPTIONS, "an engine file", "model.onnx")
        level = spec.option("level", "all")
        if level not in LEVELS:
            raise UsageError(
                f"unknown optimization level {level!r}, expected {', '.join(LEVELS)}{nearest(level, LEVELS)}"
            )
        if given := spec.option("map"):
            Alignment.load(path_of(given, "map"))
        file = OnnxFile(spec.option("file"))
        if file.dtype != spec.dtype:
            raise UsageError(
                f"{file.path.name} computes in {file.dtype}, not in {spec.dtype}: give dtype={file.dtype!r}"
            )

    def versions(self) -> dict[str, str]:
        """ONNX Runtime optimizes when it loads a file, so its version decides the bits; the others decide the map."""
        import torch
        import transformers

        found = {"torch": torch.__version__, "transformers": transformers.__version__}
        return {"onnxruntime": load_library().__version__, **found}

    def content(self, spec: EngineSpec) -> dict[str, str]:
        """Return the digests of the file, its weights, its configuration and its map. Part of the cache key."""
        from ditto_core.system.fingerprint import fingerprint, hash_file

        file, found = OnnxFile(spec.option("file")), spec.option("map")
        settings = {CONFIG: fingerprint(file.settings)} if file.settings else {}
        return {**file.digest, **settings, **({"map": hash_file(Path(found))} if found else {})}

    def own_models(self, spec: EngineSpec, model: LoadedModel) -> tuple[LoadedModel, LoadedModel]:
        """Return the model with the file's quantized weights, and the same that rounds as the file's operators do."""
        file = OnnxFile(spec.option("file"))
        if not file.quantization:
            raise UsageError(f"reference='weights' needs a quantized engine file, {file.path.name} is in {file.dtype}")
        own, weights = own_weights(model, file)
        return own, rounded(own, weights.roundings)

    def build(self, request: BuildRequest) -> BuildReport:
        """Align the file, and write it with the taps as further outputs, the weights beside it, and no other change."""
        spec = request.spec
        file = OnnxFile(spec.option("file"))
        found = alignment_of(spec, file)
        file = file.readable() if file.quantization else file
        taps = tuple(tap for tap in request.taps if mapped(tap, found))
        places = [found.sites[mapped(tap, found)].value for tap in taps]
        model = file.copy()
        ask_fused(model, places)
        show(model, dict.fromkeys((*places, *(place.value for place in found.finals.values()))))
        written = file.place(model, request.directory, ENGINE_FILE, copy=True)
        refuse_crashing(written, spec.dtype, spec.option("level", "all"))
        found.save(request.directory / MAP_FILE)
        refused = {tap.site: reason(tap, found) for tap in request.taps if tap not in taps}
        refused |= {name: found.absent[name] for name in request.outputs if name in found.absent}
        known = {"file": str(file.path), "sha256": found.digest[file.path.name]}
        facts = {**known, "notes": list(found.notes), "wrong": dict(found.wrong)}
        return BuildReport(taps, refused, facts, partial=True)

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> FileSession:
        """Load the file."""
        return FileSession(spec, directory / ENGINE_FILE, Alignment.load(directory / MAP_FILE), taps)

    def raw_taps(self, name: str, alias: str) -> Sequence[Tap]:
        """Refuse raw names: the values of a file are reached by the sites that they are."""
        raise SelectorError(f"output {name!r} is no site: an engine file shows the sites that its map has")


def alignment_of(spec: EngineSpec, file: OnnxFile) -> Alignment:
    """Return the map that the options name, or a new one."""
    if given := spec.option("map"):
        values = [output for node in file.model.graph.node for output in node.output]
        values += [port.name for port in file.outputs]  # some are stored
        return Alignment.load(Path(given)).reused(file.digest, values)
    inputs: Mapping[str, str] = spec.option("inputs") or {}
    return align(load_lean(spec.model, spec.attention), file, inputs)


def reason(tap: Tap, found: Alignment) -> str:
    """Return why a tap is not in the file."""
    refused = found.refused
    return next((refused[name] for name in (tap.site, *tap.aliases) if name in refused), "not computed on the probes")

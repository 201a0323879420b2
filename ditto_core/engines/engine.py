"""An engine on disk: built once for a spec, verified on every read, opened as a session."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.backends.base import BuildRequest, BuildsFromSource, RunsElsewhere
from ditto_core.backends.registry import get_backend
from ditto_core.engines.copied import check_digests, write_digests
from ditto_core.engines.keys import versions_of
from ditto_core.errors import BuildError, DittoError, SelectorError, UsageError, first_line, nearest
from ditto_core.model.exported import Export
from ditto_core.profile import Range, ShapeProfile
from ditto_core.session import Session
from ditto_core.sites import RAW_PREFIXES, Tap, matches
from ditto_core.spec import DERIVED, EngineSpec, ModelSource
from ditto_core.system.cpu import INSTRUCTIONS, lacking
from ditto_core.system.files import parse_json, path_of, read_text, writing
from ditto_core.system.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ditto_core.model.loading import LoadedModel

MANIFEST_FILE = "engine.json"
PROVENANCE_FILE = "provenance.json"


@dataclass(frozen=True)
class Engine:
    """A built engine. ``taps`` are the sites it shows, ``refused`` those it could not (site -> reason).

    ``partial``: it shows only what was not fused; see :class:`~ditto_core.backends.base.BuildReport`. ``built_of`` is
    the content of its model (:func:`~ditto_core.engines.origin.content_of`), empty where it is not known.
    """

    directory: Path
    spec: EngineSpec
    taps: tuple[Tap, ...]
    decoder: bool
    refused: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    built_of: str = ""

    @property
    def fingerprint(self) -> str:
        """The cache's key (SHA-256, hex), empty for an engine that was copied out of the cache."""
        name = self.directory.name
        return name if re.fullmatch("[0-9a-f]{64}", name) else ""

    @property
    def running(self) -> str:
        """What runs when it is opened now (SHA-256, hex): its directory's name, with what a server tells of itself."""
        backend = get_backend(self.spec.backend)
        told = backend.running(self.spec, self.directory) if isinstance(backend, RunsElsewhere) else {}
        return fingerprint(self.directory.name, told) if told else self.directory.name

    def open(self, isolation: str = "", timeout: float = 0) -> Session:
        """Load the engine, in this process or in a child: see :func:`~ditto_core.backends.child.open_backend`.

        Raises what its backend raises when it cannot run here, and :class:`BuildError` for one that was compiled for
        another CPU and for what is no error of ours: that of files which are missing or damaged beside the engine.
        """
        from ditto_core.backends.child import open_backend

        backend = get_backend(self.spec.backend)
        if missing := lacking(self.versions.get(INSTRUCTIONS, "")):
            raise BuildError(
                f"the {backend.name} engine in {self.directory} was compiled for a CPU with {', '.join(missing)}, "
                "which this one lacks: build it here"
            )
        try:
            return open_backend(backend, self.spec, self.directory, self.taps, isolation, timeout)
        except DittoError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {first_line(error)}"
            raise BuildError(f"the {backend.name} engine in {self.directory} cannot be opened ({problem})") from error

    def save_manifest(self) -> None:
        """Write ``engine.json`` beside the engine's files."""
        data = {
            "spec": self.spec.to_json(),
            "taps": [tap.to_json() for tap in self.taps],
            "decoder": self.decoder,
            "refused": dict(self.refused),
            "facts": dict(self.facts),
            "versions": dict(self.versions),
            "partial": self.partial,
            "built_of": self.built_of,
        }
        (self.directory / MANIFEST_FILE).write_text(json.dumps(data, indent=1, default=str) + "\n")

    @classmethod
    def load(cls, directory: Path | str) -> Engine:
        """Open an engine directory. Raises :class:`BuildError` when it holds no engine, or one that is damaged.

        The files of a copied engine are verified; those of the cache are when it gives the engine.
        """
        directory = path_of(directory, "engine")
        check_digests(directory)
        try:
            text = read_text(directory / MANIFEST_FILE)
        except (OSError, ValueError) as error:
            raise BuildError(
                f"{directory} holds no engine: expected {MANIFEST_FILE}, written by `ditto build`"
            ) from error
        try:
            data = parse_json(text)
            taps = tuple(Tap.from_json(t) for t in data.pop("taps"))
            return cls(directory, spec_from_json(data.pop("spec")), taps, **data)
        except (ValueError, LookupError, TypeError, AttributeError, UsageError) as error:
            problem = f"{type(error).__name__} {first_line(error)}"
            raise BuildError(f"{directory / MANIFEST_FILE} is damaged ({problem}): build the engine again") from error

    def copy_to(self, directory: Path) -> Engine:
        """Copy the engine to a directory of the user's, which must be absent or empty.

        The copy names this engine's model: in the cache one engine serves every model of the same content.
        """
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise BuildError(f"{directory} is not empty, expected a new or empty output directory")
        copied = Engine(**{**self.__dict__, "directory": directory})
        with writing(directory):
            try:
                left_out = shutil.ignore_patterns("entry.json")
                shutil.copytree(self.directory, directory, dirs_exist_ok=True, ignore=left_out)
                copied.save_manifest()
                write_digests(directory)
            except BaseException:  # half a copy would be in the way of the next one
                shutil.rmtree(directory, ignore_errors=True)
                raise
        return copied


def spec_from_json(data: Mapping[str, Any]) -> EngineSpec:
    """Inverse of :meth:`EngineSpec.to_json`, except that a factory is known by its name alone, and that code of a
    model's own is not trusted: a person says so, no file does.
    """
    model = ModelSource(
        location=data["model"]["location"] or data["model"]["factory"], revision=data["model"]["revision"]
    )
    return EngineSpec(
        model=model,
        outputs=tuple(data["outputs"]),
        aliases=tuple((raw, alias) for raw, alias in data["aliases"]),
        profile=ShapeProfile.of({name: Range(*sizes) for name, sizes in data["profile"].items()}),
        options=tuple(sorted(data["options"].items())),
        dynamic=tuple((name, index, dimension) for name, index, dimension in data.get("dynamic", ())),
        **{name: data.get(name, False) for name in DERIVED},
        **{name: data[name] for name in ("backend", "dtype", "attention", "opset")},
    )


def resolve_taps(spec: EngineSpec, export: Export) -> tuple[Tap, ...]:
    """Return the taps that a spec's outputs mean, in topological order; raw names (``fx:``, ``onnx:``) last.

    Raises :class:`SelectorError` when one matches nothing, naming the closest sites, and when two tensors get one name.
    """
    provenance = export.provenance
    aliases = dict(spec.aliases)
    raw = [name for name in spec.outputs if name.startswith(RAW_PREFIXES) or name in aliases]
    taps = provenance.select(name for name in spec.outputs if name not in raw)
    backend = get_backend(spec.backend)

    def resolve(name: str) -> Sequence[Tap]:
        alias = aliases.get(name, name)
        if isinstance(backend, BuildsFromSource):
            return backend.raw_taps(name, alias)
        return raw_taps(name, alias, export)

    found = dict.fromkeys((*taps, *(tap for name in raw for tap in resolve(name))))
    for site, count in Counter(tap.site for tap in found).items():
        if count > 1:
            raise SelectorError(f"outputs give {count} tensors the name {site!r}, expected a name for each")
    return tuple(found)


def raw_taps(name: str, alias: str, export: Export) -> Sequence[Tap]:
    """Return the taps of a raw name: a glob over FX nodes and ONNX values, or a site.

    When an aliased name matches several values they are called ``alias_0``, ``alias_1`` …
    """
    bare = name.split(":", 1)[1] if name.startswith(RAW_PREFIXES) else name
    known = raw_names(export)
    hits = list(dict.fromkeys(tap for raw, tap in known.items() if matches(bare, raw)))  # a value may have two names
    hits += [site] if not hits and (site := export.provenance.find(bare)) else []
    if not hits:
        raise SelectorError(
            f"output {name!r} matches none of the {len(known)} values of the graph{nearest(bare, known)}; "
            f"graph.txt among the build artifacts lists them"
        )
    names = [alias] if len(hits) == 1 else [f"{alias}_{i}" for i in range(len(hits))]
    if name == alias:
        names = [f"{name.split(':', 1)[0]}:{tap.fx_node}" for tap in hits]
    return [named(tap, site) for site, tap in zip(names, hits, strict=True)]


def named(tap: Tap, site: str) -> Tap:
    """Return a tap under a name of the user's; the sites that it is stay its aliases, by which eager finds it."""
    own = (tap.site, *tap.aliases) if tap.module_class else ()
    return replace(tap, site=site, aliases=tuple(name for name in own if name != site))


def raw_names(export: Export) -> dict[str, Tap]:
    """Return every value of the graph under its ONNX name and its FX node's name.

    The two differ for the tensors at module ends, which the export named after their sites.
    """
    from ditto_core.graphs.graph import Graph

    graph = Graph.read(export.onnx_path)
    taps = export.provenance.taps
    known = {value: Tap(value, value, fx_node=value, axes=graph.axes(value)) for value in graph.producer}
    return known | {tap.value: tap for tap in taps} | {tap.fx_node: tap for tap in taps if tap.fx_node}


def build_into(
    spec: EngineSpec,
    export: Export,
    directory: Path,
    artifacts: Path | None = None,
    load: Callable[[], LoadedModel] | None = None,
    isolation: str = "",
) -> Engine:
    """Build the engine of a spec into an empty directory and write its manifest and provenance.

    ``isolation`` is that of :func:`~ditto_core.backends.child.build_backend`.
    """
    from ditto_core.backends.child import build_backend

    backend = get_backend(spec.backend)
    taps = resolve_taps(spec, export)
    request = BuildRequest(spec, export.onnx_path, taps, export.returned, export.decoder, directory, artifacts, load)
    report = build_backend(backend, request, isolation)
    shutil.copyfile(export.directory / PROVENANCE_FILE, directory / PROVENANCE_FILE)
    notes = [*report.facts.get("notes", ()), *export.provenance.notes]
    facts = {**report.facts, "notes": notes} if notes else dict(report.facts)
    engine = Engine(
        directory,
        spec,
        report.taps,
        export.decoder,
        refused=dict(report.refused),
        facts=facts,
        versions=versions_of(spec, backend),
        partial=report.partial,
    )
    engine.save_manifest()
    return engine

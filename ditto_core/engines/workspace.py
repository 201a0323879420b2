"""Where models, exports, engines and noise floors come from: made once, kept in the cache, loaded once a process."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ditto_core.backends.base import BuildRequest, BuildsFromSource, WritesArtifacts
from ditto_core.backends.registry import get_backend
from ditto_core.cache import Cache, content_digest
from ditto_core.engines.artifacts import artifacts_folder, write_artifacts
from ditto_core.engines.engine import Engine, build_into
from ditto_core.engines.keys import content_key, dequantized_key, engine_key, graph_key, outline_key
from ditto_core.engines.origin import content_of
from ditto_core.errors import check_type
from ditto_core.session import Session
from ditto_core.spec import EngineSpec, ModelSource
from ditto_core.system.fingerprint import directory_digest, fingerprint, matching, module_digest
from ditto_core.system.state import state_of

if TYPE_CHECKING:
    from ditto_core.model.checkpoint import Language
    from ditto_core.model.exported import Export
    from ditto_core.model.loading import LoadedModel
    from ditto_core.sites import Tap

ARTIFACTS_VARIABLE = "DEBUG_ARTIFACTS_DIR"
CHEAP = 256 << 20
"""Bytes of a factory's module up to which :meth:`Workspace.renew` calls it again: about half a second of hashing."""
LONG = 1 << 30
"""Bytes whose hashing is shown."""

Progress = Callable[[str], "AbstractContextManager[object]"]


def no_progress(message: str) -> AbstractContextManager[object]:
    """Show nothing."""
    return nullcontext()


@dataclass
class Workspace:
    """A cache, and the models that were loaded from it.

    ``say`` receives one line for each notable event (damage, waiting); ``progress(message)`` is entered around each
    long piece of work. ``artifacts`` is the folder for readable by-products (default: ``$DEBUG_ARTIFACTS_DIR``).
    """

    cache: Cache = field(default_factory=Cache.at)
    say: Callable[[str], None] = lambda message: None
    progress: Progress = no_progress
    artifacts: Path | None = None
    _models: dict[tuple[ModelSource, str], LoadedModel] = field(default_factory=dict, repr=False)
    _digests: dict[ModelSource, tuple[str, str]] = field(default_factory=dict, repr=False)
    _factories: dict[ModelSource, str] = field(default_factory=dict, repr=False)
    _unsteady: set[ModelSource] = field(default_factory=set, repr=False)
    _exports: dict[str, Export] = field(default_factory=dict, repr=False)
    _checked: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        folder = os.environ.get(ARTIFACTS_VARIABLE)
        self.artifacts = self.artifacts or (Path(folder) if folder else None)

    def model(self, source: ModelSource, attention: str = "eager") -> LoadedModel:
        """Return the model of a source in float32, a large checkpoint in half precision as it is stored. A GGUF file is
        dequantized once and kept in the cache. What computes takes a copy in the dtype that it needs."""
        from ditto_core.model.loading import load_lean

        key = (source, attention)
        if key not in self._models:
            with self.progress(f"loading {source.label}"):
                self._models[key] = load_lean(self._dequantized(source), attention)
        return self._models[key]

    def language(self, source: ModelSource) -> Language:
        """Return what makes text a model's tokens; of a model on disk, without loading it."""
        from ditto_core.model.checkpoint import Language, load_language, locate, vocab_size

        loaded = next((model for key, model in self._models.items() if key[0] == source), None)
        if loaded is None and source.factory is None:
            return load_language(locate(self._dequantized(source)), source.trust_remote_code)
        model = loaded or self.model(source)
        return Language(model.tokenizer, vocab_size(getattr(model.module, "config", None)))

    def digest(self, source: ModelSource, graph: bool = False) -> str:
        """Return the digest of a source's content: weight files, configuration and whether its own code is
        trusted, or a module's tensors and code. What a ``graph`` is made of lacks the file that says how tokens are
        chosen."""
        if source not in self._digests:
            if source.factory is not None:
                self._factories[source] = fingerprint(state_of(source.factory))
                self._digests[source] = (model_digest(self.model(source)),) * 2
            else:
                self._digests[source] = self._files_digests(source)
        return self._digests[source][graph]

    def _files_digests(self, source: ModelSource) -> tuple[str, str]:
        from ditto_core.model.checkpoint import CHOOSING_FILE, identity_of, locate
        from ditto_core.model.own_code import names_code

        (path, patterns), memo = identity_of(source), self.cache.memo
        runs_code = source.trust_remote_code and names_code(locate(source))
        unread = memo.unread(matching(path, patterns))
        with self.progress(f"hashing {source.label}") if unread >= LONG else nullcontext():
            found = tuple(directory_digest(path, patterns, memo, without) for without in ("", CHOOSING_FILE))
        whole, graph = (fingerprint(digest, "its own code") if runs_code else digest for digest in found)
        return whole, graph

    def renew(self, source: ModelSource) -> bool:
        """Forget a model that its source does not make any more, and tell whether there was one.

        Files are digested again, which reads those that changed. A factory is called again where its module has at most
        :data:`CHEAP` bytes; of a larger one only the factory's own code, closure and globals are looked at. A factory
        that makes another model each time it is called is said, and what it made first stays.
        """
        known, held = self._digests.get(source), [model for key, model in self._models.items() if key[0] == source]
        if known is None or source in self._unsteady:
            return False
        if source.factory is None:
            changed = self._files_digests(source) != known
        elif held and size(held[0]) <= CHEAP:
            changed = self._makes_another(source, known[0])
        else:
            changed = not held or fingerprint(state_of(source.factory)) != self._factories[source]
        if changed:
            del self._digests[source]
            self._models = {key: model for key, model in self._models.items() if key[0] != source}
        return changed

    def _makes_another(self, source: ModelSource, known: str) -> bool:
        from ditto_core.model.loading import load_model

        made = model_digest(load_model(source))
        if made != known and made != model_digest(load_model(source)):
            self._unsteady.add(source)
            self.say(f"{source.label} makes another model each time it is called; the first one is tested")
            return False
        return made != known

    def export(self, spec: EngineSpec) -> Export:
        """Return the export that a spec's engine is built from, made once for a model, dtype and attention.

        A backend that :class:`~ditto_core.backends.base.BuildsFromSource` gets one without a graph.
        """
        return self._outline(spec) if isinstance(get_backend(spec.backend), BuildsFromSource) else self.graph(spec)

    def graph(self, spec: EngineSpec) -> Export:
        """Return the export with its ONNX graph, whatever the backend is."""
        key = graph_key(spec, self.digest(spec.model, graph=True))

        def make(directory: Path) -> None:
            self._export_into(spec, directory)
            self._checked.add(key)

        known = self._verified("export", key, make, spec)
        if known.held and not self._holds_examples(spec, known):
            self.cache.replace("export", key, make, describe=description(spec), on_event=self.say)
            del self._exports[key]
            known = self._verified("export", key, make, spec)
        return known

    def _holds_examples(self, spec: EngineSpec, known: Export) -> bool:
        """Tell whether the numbers that an export holds are those of today's example inputs."""
        examples = self.model(spec.model, spec.attention).examples
        return all(name in examples and examples[name].tolist() == held for name, held in known.held.items())

    def _verified(self, kind: str, key: str, make: Callable[[Path], None], spec: EngineSpec) -> Export:
        """Return an export whose every byte was verified once in this workspace; it may be as large as the model."""
        from ditto_core.model.exported import Export

        known = self._exports.get(key)
        if known is None or not known.directory.is_dir():
            path = self.cache.get_or_build(kind, key, make, describe=description(spec), on_event=self.say)
            known = self._exports[key] = Export.load(path)
        return known

    def _export_into(self, spec: EngineSpec, directory: Path) -> None:
        import torch

        from ditto_core.model.export import export

        model = self.model(spec.model, spec.attention)
        named = spec.dimensions({name: tensor.ndim for name, tensor in model.examples.items()})
        if spec.later:
            model, named = model.later_steps(), []
        with self.progress(f"exporting {spec.model.label} {spec.dtype} to ONNX"):
            export(
                model,
                directory,
                dtype=getattr(torch, spec.dtype),
                opset=spec.opset,
                named=named,
                operators=spec.operators,
            )

    def correct(self, spec: EngineSpec) -> bool:
        """Export again, and tell whether the cached export was of another model; then the new one takes its place.

        A digest does not see all that decides what a model computes (see :func:`~ditto_core.system.state.state_of`).
        Each export is looked at once; one that this workspace made, and a backend that builds from no graph, never.
        """
        exported = self.export(spec)
        key = exported.directory.name
        if key in self._checked or not exported.onnx_path.exists():
            return False
        self._checked.add(key)
        with self.cache.scratch(key, self.say) as folder:
            self._export_into(spec, folder)
            if content_digest(folder) == content_digest(exported.directory):
                return False

            def make(directory: Path) -> None:
                shutil.copytree(folder, directory, dirs_exist_ok=True)

            self.cache.replace("export", key, make, describe=description(spec), on_event=self.say)
            del self._exports[key]
        return True

    def _outline(self, spec: EngineSpec) -> Export:
        from ditto_core.model.summary import outline

        key = outline_key(spec, self.digest(spec.model))

        def make(directory: Path) -> None:
            with self.progress(f"looking at {spec.model.label}"):
                outline(self.model(spec.model, spec.attention), directory, dtype=spec.dtype)

        return self._verified("outline", key, make, spec)

    def build(self, spec: EngineSpec, isolation: str = "") -> Engine:
        """Return the engine of a spec, built once and verified on every read; in a child process if ``isolation`` is
        ``process``, or where the backend always builds in one.
        """
        backend = get_backend(spec.backend)
        backend.check(spec)
        exported = self.export(spec)
        has_graph = exported.onnx_path.exists()
        content = content_key(exported.directory.name, content_digest(exported.directory) if has_graph else "")
        key = engine_key(spec, backend, content)
        made, built_of = [], content_of(spec.model, self.digest, backend)
        artifacts = artifacts_folder(self.artifacts, spec, built_of, self.say) if self.artifacts else None

        def make(directory: Path) -> None:
            made.append(directory)
            start = time.perf_counter()
            with self.progress(f"building {spec.model.label} {spec.label}"):
                load = partial(self.model, spec.model, spec.attention)
                engine = build_into(spec, exported, directory, artifacts, load, isolation)
            facts = {**engine.facts, "export": content, "build_seconds": round(time.perf_counter() - start, 3)}
            replace(engine, facts=facts, built_of=built_of).save_manifest()

        describe = {"model": spec.model.label, "engine": spec.label, "outputs": list(spec.outputs)}
        path = self.cache.get_or_build("engine", key, make, describe=describe, on_event=self.say)
        engine = replace(Engine.load(path), spec=spec, built_of=built_of)
        if artifacts is not None:
            write_artifacts(engine, exported, artifacts)
            if not made and isinstance(backend, WritesArtifacts):
                given = spec, exported.onnx_path, engine.taps, exported.returned, engine.decoder, engine.directory
                backend.write_artifacts(BuildRequest(*given, artifacts))
        return engine

    def eager(self, spec: EngineSpec, taps: tuple[Tap, ...], *, dtype: str = "", device: str = "cpu") -> Session:
        """Return the eager reference of an engine, in the next higher precision unless ``dtype`` says otherwise."""
        from ditto_core.backends.eager import HIGHER, EagerSession

        model = self.model(spec.model, spec.attention)
        return EagerSession(model, taps, dtype=dtype or HIGHER[spec.dtype], device=device)

    def keep_only(self, source: ModelSource) -> None:
        """Forget the loaded models of every other source; they are loaded again when they are asked for."""
        self._models = {key: model for key, model in self._models.items() if key[0] == source}

    def floor_path(self, key: str) -> Path:
        """Return the file in which the noise floor of a reference run is kept."""
        return self.cache.state("floors", f"{key}.json")

    def _dequantized(self, source: ModelSource) -> ModelSource:
        from ditto_core.model.checkpoint import is_gguf, locate

        if source.factory is not None or not is_gguf(locate(source)):
            return source

        def make(directory: Path) -> None:
            from ditto_core.model.loading import dequantize

            with self.progress(f"dequantizing {source.label}"):
                dequantize(source, directory)

        key = dequantized_key(self.digest(source))
        path = self.cache.get_or_build("model", key, make, describe={"model": source.label}, on_event=self.say)
        return replace(source, location=str(path))


def model_digest(model: LoadedModel) -> str:
    """Return the digest of a module, and of its example inputs' shapes and dtypes."""
    shapes = {k: [list(v.shape), str(v.dtype)] for k, v in model.examples.items()}
    return fingerprint(module_digest(model.module), shapes)


def size(model: LoadedModel) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.module.parameters(), *model.module.buffers()))


def description(spec: EngineSpec) -> dict[str, str]:
    """Return what people read about an export in the cache."""
    return {"model": spec.model.label, "dtype": spec.dtype, "attention": spec.attention}


def build(spec: EngineSpec, workspace: Workspace | None = None) -> Engine:
    """Return the engine of a spec, from the cache or newly built. Raises :class:`UsageError` for what is no spec."""
    check_type(spec, EngineSpec, "spec", "an EngineSpec")
    check_type(workspace, (Workspace, type(None)), "workspace", "a Workspace")
    return (workspace or Workspace()).build(spec)


def open_session(spec: EngineSpec, workspace: Workspace | None = None) -> Session:
    """Build the engine of a spec and load it."""
    return build(spec, workspace).open()

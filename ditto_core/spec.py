"""What decides the bits of an engine: model source, shapes, backend, dtype, outputs. Frozen and hashable."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from ditto_core.errors import UsageError, nearest, shown
from ditto_core.profile import IMAGE, ShapeProfile

DTYPES = ("float32", "float16", "bfloat16", "float64")
DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp64": "float64"}
BACKEND_ALIASES = {"ort": "onnxruntime", "trt": "tensorrt"}
ATTENTION = ("eager", "sdpa")
ALL_SITES = ("**",)
MOST_THREADS = 1024
DERIVED = ("operators", "later")
"""Fields of a spec that nobody gives: they follow from the others, or make another engine of the same spec."""
ENGINE_FILE_BACKEND = "onnx-file"
FILE_BACKENDS = {".onnx": ENGINE_FILE_BACKEND, ".pte": "pte-file", ".xml": "ir-file"}
"""The backends that run a file which is there already, by its suffix; a folder is one of an ONNX file."""


@dataclass(frozen=True)
class ModelSource:
    """Where the weights come from: ``location`` (Hub id, directory or GGUF file), or ``factory`` makes the module.

    A factory takes no argument and returns a ``transformers`` decoder, or ``(module, example_inputs)`` where
    ``example_inputs`` maps the names of forward's parameters to tensors with a leading batch dimension.
    Its identity in the cache is the content of the module's weights and code, not its name. A location that is there is
    made absolute: it names the same files in every working directory.
    """

    location: str = ""
    factory: Callable[[], Any] | None = None
    revision: str = ""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        there = os.path.expanduser(self.location)  # noqa: PTH111 - a user who is unknown is no error here
        if self.location and os.path.exists(there):  # noqa: PTH110 - nor is a name that no path can have
            object.__setattr__(self, "location", str(Path(there).absolute()))

    @property
    def label(self) -> str:
        """A short name for reports."""
        if self.factory is not None:
            return getattr(self.factory, "__name__", "callable")
        return self.location.rstrip("/").rsplit("/", 1)[-1]

    @classmethod
    def of(cls, model: ModelSource | str | Callable[[], Any]) -> ModelSource:
        """Wrap a Hub id, a path, a callable, or a module that is at hand; a source passes through."""
        if isinstance(model, ModelSource):
            return model
        if hasattr(model, "named_modules") or isinstance(model, tuple):
            return cls(factory=AtHand(model))
        if callable(model):
            return cls(factory=model)
        if not str(model):
            raise UsageError("the model is an empty string, expected a Hub id, a directory, a GGUF file or a callable")
        return cls(location=str(model))


@dataclass(frozen=True, eq=False)
class AtHand:
    """The factory of a module that exists, or of a pair of module and example inputs: it returns a copy."""

    made: Any

    @property
    def __name__(self) -> str:
        """The name of the module's class."""
        return type(self.made[0] if isinstance(self.made, tuple) else self.made).__name__

    def __call__(self) -> Any:
        """Return the copy."""
        return copy.deepcopy(self.made)


@dataclass(frozen=True)
class EngineSpec:
    """Everything that decides the bits of an engine.

    ``outputs`` are selectors (``model.layers.*.mlp``) or raw names (``fx:…``, ``onnx:…``); ``aliases`` renames raw
    names, as pairs ``(raw name, alias)``. ``options`` are the backend's own settings, as sorted pairs. ``dynamic`` are
    dimensions of inputs that may have other sizes than the example, besides batch and tokens, as (input, index, name).
    ``operators`` (set where ``outputs`` have one): those of the model's own code are sites of the export. ``later``:
    the engine of an encoder-decoder's steps after the first; :meth:`later_steps` makes it.
    """

    model: ModelSource
    backend: str = "onnxruntime"
    dtype: str = "float32"
    outputs: tuple[str, ...] = ALL_SITES
    aliases: tuple[tuple[str, str], ...] = ()
    profile: ShapeProfile = field(default_factory=ShapeProfile)
    attention: str = "eager"
    opset: int = 20
    options: tuple[tuple[str, Any], ...] = ()
    dynamic: tuple[tuple[str, int, str], ...] = ()
    operators: bool = False
    later: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", self.operators or any(" " in name for name in self.outputs))
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        object.__setattr__(self, "backend", parse_backend(self.backend))
        if not isinstance(self.opset, int):
            raise UsageError(f"opset is {self.opset!r}, expected a number such as 20")
        if self.attention not in ATTENTION:
            hint = nearest(self.attention, ATTENTION)
            raise UsageError(f"unknown attention {self.attention!r}, expected eager or sdpa{hint}")

    @classmethod
    def of(cls, model: ModelSource | str | Callable[[], Any], **fields: Any) -> EngineSpec:
        """Build a spec from plain values: ``outputs`` may be a string, a list or a dict ``raw name -> alias``.

        ``engine``: a file, or a folder with one, that is the engine already; its suffix chooses what runs it.
        Raises :class:`UsageError` for an unknown field or value.
        """
        engine = fields.pop("engine", None)
        for name in fields:
            if name not in cls.__dataclass_fields__ or name in DERIVED:
                known = (*(field for field in cls.__dataclass_fields__ if field not in DERIVED), "engine")
                raise UsageError(f"unknown engine argument {name!r}{nearest(name, known)} (known: {', '.join(known)})")
        outputs, aliases = parse_outputs(fields.pop("outputs", ALL_SITES))
        renamed = fields.pop("aliases", None) or ()
        if not isinstance(renamed, Sequence):
            raise UsageError(f"aliases is {renamed!r}, expected pairs (raw name, alias)")
        dynamic = parse_dynamic(fields.pop("dynamic", None) or {})
        profile = fields.pop("profile", None) or ShapeProfile()
        if not isinstance(profile, ShapeProfile):
            profile = ShapeProfile.parse(profile, [name for _, _, name in dynamic])
        options = fields.pop("options", ()) or ()
        if not isinstance(options, Mapping | tuple):
            raise UsageError(f"options is {options!r}, expected a table such as {{'quantize': 'int8'}}")
        if engine is not None:
            fields["backend"] = backend_of_file(str(engine), fields.get("backend"))
            options = {"file": str(engine), **dict(options)}
            if options["file"] != str(engine):
                raise UsageError(f"engine is {str(engine)!r} and options' file {options['file']!r}, expected one")
        if isinstance(options, Mapping):
            if odd := [name for name in options if not isinstance(name, str)]:
                raise UsageError(f"options has {odd[0]!r}, expected names such as 'quantize'")
            options = tuple(sorted(options.items()))
        return cls(
            model=ModelSource.of(model),
            outputs=outputs,
            aliases=aliases or tuple(renamed),
            profile=profile,
            options=options,
            dynamic=dynamic,
            **{k: v for k, v in fields.items() if v is not None},
        )

    @property
    def label(self) -> str:
        """A readable id, as used in parametrized tests: ``onnxruntime-float32``."""
        return f"{self.backend}-{self.dtype}"

    def option(self, name: str, default: Any = None) -> Any:
        """Return one of the backend's own settings."""
        return dict(self.options).get(name, default)

    def threads(self) -> int:
        """Return the setting ``threads``, 1 by default; 0 is the backend's own number. Raises :class:`UsageError`."""
        given = self.option("threads", 1)
        if not isinstance(given, int) or not 0 <= given <= MOST_THREADS:
            raise UsageError(f"{self.backend}'s option threads is {shown(given)}, expected 0 to {MOST_THREADS}")
        return given

    def table(self, name: str) -> dict[str, str]:
        """Return a setting that is a table of strings; on a command line it is JSON.

        Raises :class:`UsageError` for anything else.
        """
        given = self.option(name, {})
        try:
            read = json.loads(given) if isinstance(given, str) else given
        except ValueError:
            read = None
        if not isinstance(read, Mapping):
            raise UsageError(
                f"{self.backend}'s option {name} is {given!r}, expected a table such as {{'key': 'value'}}"
            )
        return {str(key): str(value) for key, value in read.items()}

    def dimensions(self, ranks: Mapping[str, int]) -> list[tuple[str, int, str]]:
        """Return the dimensions that have to be dynamic besides batch and tokens, as (input, index, name).

        ``ranks`` are the numbers of dimensions of the model's inputs: ``height`` and ``width`` are those of images.
        """
        images = [name for name, _ in self.profile.more if name in IMAGE]
        found = [(name, IMAGE[size], size) for name, rank in ranks.items() if rank == len(IMAGE) + 2 for size in images]
        return sorted({*self.dynamic, *found})

    def untapped(self) -> EngineSpec:
        """Return the same engine without any tap: the observer check compares against it."""
        return replace(self, outputs=(), aliases=())

    def later_steps(self, taps: Mapping[str, str]) -> EngineSpec:
        """Return the engine of an encoder-decoder's steps after the first; ``taps`` are sites by name in its graph."""
        renamed = tuple((name, site) for name, site in taps.items() if name != site)
        return replace(self, outputs=tuple(taps), aliases=renamed, dynamic=(), later=True)

    def to_json(self) -> dict[str, Any]:
        """Return the canonical JSON form; the model appears by location or factory name, its content by fingerprint."""
        profile = {n: [r.min, r.opt, r.max] for n, r in self.profile.ranges.items()}
        model = {"location": self.model.location, "factory": factory_name(self.model), "revision": self.model.revision}
        plain = {n: getattr(self, n) for n in ("backend", "dtype", "attention", "opset")}
        return {
            **plain,
            "model": model,
            "outputs": list(self.outputs),
            "aliases": [list(pair) for pair in self.aliases],
            "profile": profile,
            "options": dict(self.options),
            "dynamic": [list(dimension) for dimension in self.dynamic],
            **{name: True for name in DERIVED if getattr(self, name)},
        }


def parse_dtype(name: str) -> str:
    """Return torch's name of a dtype (``fp16`` -> ``float16``). Raises :class:`UsageError` for an unknown one."""
    known = DTYPE_ALIASES.get(str(name), str(name).removeprefix("torch."))
    if known not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}, expected one of {', '.join(DTYPES)}{nearest(str(name), DTYPES)}")
    return known


def parse_dynamic(dynamic: Any) -> tuple[tuple[str, int, str], ...]:
    """Return ``{"image": {2: "height"}}`` as (input, index, name), sorted; what is in that form already passes.

    Raises :class:`UsageError` for anything else.
    """
    if isinstance(dynamic, tuple):
        return dynamic
    expected = "expected a table such as {'image': {2: 'height', 3: 'width'}}"
    if not isinstance(dynamic, Mapping) or not all(isinstance(names, Mapping) for names in dynamic.values()):
        raise UsageError(f"dynamic is {dynamic!r}, {expected}")
    found = [(str(i), d, name) for i, names in dynamic.items() for d, name in names.items()]
    for _, index, name in found:
        if not isinstance(index, int) or index < 0 or not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"dynamic has {index!r}: {name!r}, {expected}")
    return tuple(sorted(found))


def parse_backend(name: str) -> str:
    """Return a backend's registered name (``ort`` -> ``onnxruntime``); any other name as it is.

    Raises :class:`UsageError` for what is no name.
    """
    if not isinstance(name, str):
        raise UsageError(f"backend is {name!r}, expected a name such as 'onnxruntime'")
    return BACKEND_ALIASES.get(name, name)


def backend_of_file(engine: str, given: str | None) -> str:
    """Return the backend that runs an engine file. Raises :class:`UsageError` where another one is given."""
    found = FILE_BACKENDS.get(PurePath(engine).suffix, ENGINE_FILE_BACKEND)
    if given is not None and parse_backend(given) not in (found, EngineSpec.backend):
        raise UsageError(f"engine {engine!r} is run by {found}, expected no backend beside it, not {given!r}")
    return found


def parse_outputs(outputs: Any) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Split the ``outputs`` argument into selectors and aliases."""
    if outputs is None:
        return (), ()
    if isinstance(outputs, str):
        return (outputs,), ()
    if isinstance(outputs, Mapping):
        return tuple(outputs), tuple(sorted((str(k), str(v)) for k, v in outputs.items()))
    if not isinstance(outputs, Iterable):
        raise UsageError(f"outputs is {outputs!r}, expected a selector such as 'model.layers.*', several, or a table")
    return tuple(str(o) for o in outputs), ()


def factory_name(source: ModelSource) -> str:
    """Return ``module.qualname`` of a factory, or an empty string."""
    factory = source.factory
    return "" if factory is None else f"{factory.__module__}.{getattr(factory, '__qualname__', source.label)}"

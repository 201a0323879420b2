"""What decides the bits of an engine: model source, shapes, backend, dtype, outputs. Frozen and hashable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ditto_core.errors import UsageError, nearest

DTYPES = ("float32", "float16", "bfloat16", "float64")
DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp64": "float64"}
BACKEND_ALIASES = {"ort": "onnxruntime", "trt": "tensorrt"}
ATTENTION = ("eager", "sdpa")
ALL_SITES = ("**",)


@dataclass(frozen=True)
class Range:
    """Smallest, typical and largest size of a dynamic dimension."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max:
            raise UsageError(f"a shape range needs 0 <= min <= opt <= max, got {self.min}, {self.opt}, {self.max}")

    def __contains__(self, size: int) -> bool:
        return self.min <= size <= self.max


@dataclass(frozen=True)
class ShapeProfile:
    """Sizes that an engine must serve: rows in a batch, new tokens in a step, tokens already in the cache."""

    batch: Range = Range(1, 1, 8)
    length: Range = Range(1, 16, 512)
    past: Range = Range(0, 64, 1024)

    @classmethod
    def parse(cls, data: Mapping[str, Iterable[int]]) -> ShapeProfile:
        """Build a profile from ``{"batch": (1, 1, 4), ...}``. Raises :class:`UsageError` for anything else."""
        if not isinstance(data, Mapping):
            raise UsageError(f"profile is {data!r}, expected a table such as {{'batch': (1, 2, 4)}}")
        for name in data:
            if name not in cls.__dataclass_fields__:
                known = tuple(cls.__dataclass_fields__)
                raise UsageError(
                    f"unknown profile dimension {name!r}, expected {', '.join(known)}{nearest(name, known)}"
                )
        for name, sizes in data.items():
            if not isinstance(sizes, Sequence) or len(sizes) != 3 or not all(isinstance(size, int) for size in sizes):
                raise UsageError(f"profile of {name} is {sizes!r}, expected three sizes: min, opt, max")
        return cls(**{name: Range(*sizes) for name, sizes in data.items()})

    def check(self, batch: int, length: int, past: int) -> None:
        """Raise :class:`UsageError` when a step of this size is outside the profile."""
        for name, size in (("batch", batch), ("length", length), ("past", past)):
            allowed: Range = getattr(self, name)
            if size not in allowed:
                raise UsageError(
                    f"step needs {name} {size}, outside the engine's profile {allowed.min}..{allowed.max}; "
                    f"build with profile={{{name!r}: ({allowed.min}, {allowed.opt}, {max(size, allowed.max)})}}"
                )


@dataclass(frozen=True)
class ModelSource:
    """Where the weights come from: ``location`` (Hub id, directory or GGUF file), or ``factory`` makes the module.

    A factory takes no argument and returns a ``transformers`` decoder, or ``(module, example_inputs)`` where
    ``example_inputs`` maps the names of forward's parameters to tensors with a leading batch dimension.
    Its identity in the cache is the content of the module's weights and code, not its name.
    """

    location: str = ""
    factory: Callable[[], Any] | None = None
    revision: str = ""
    trust_remote_code: bool = False

    @property
    def label(self) -> str:
        """A short name for reports."""
        if self.factory is not None:
            return getattr(self.factory, "__name__", "callable")
        return self.location.rstrip("/").rsplit("/", 1)[-1]

    @classmethod
    def of(cls, model: ModelSource | str | Callable[[], Any]) -> ModelSource:
        """Wrap a Hub id, a path or a callable; a source passes through."""
        if isinstance(model, ModelSource):
            return model
        if callable(model):
            return cls(factory=model)
        if not str(model):
            raise UsageError("the model is an empty string, expected a Hub id, a directory, a GGUF file or a callable")
        return cls(location=str(model))


@dataclass(frozen=True)
class EngineSpec:
    """Everything that decides the bits of an engine.

    ``outputs`` are selectors (``model.layers.*.mlp``) or raw names (``fx:…``, ``onnx:…``); ``aliases`` renames raw
    names, as pairs ``(raw name, alias)``. ``options`` are the backend's own settings, as sorted pairs.
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

    def __post_init__(self) -> None:
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

        Raises :class:`UsageError` for an unknown field or value.
        """
        for name in fields:
            if name not in cls.__dataclass_fields__:
                known = tuple(cls.__dataclass_fields__)
                raise UsageError(f"unknown engine argument {name!r}{nearest(name, known)} (known: {', '.join(known)})")
        outputs, aliases = parse_outputs(fields.pop("outputs", ALL_SITES))
        renamed = fields.pop("aliases", None) or ()
        if not isinstance(renamed, Sequence):
            raise UsageError(f"aliases is {renamed!r}, expected pairs (raw name, alias)")
        profile = fields.pop("profile", None) or ShapeProfile()
        if not isinstance(profile, ShapeProfile):
            profile = ShapeProfile.parse(profile)
        options = fields.pop("options", ()) or ()
        if not isinstance(options, Mapping | tuple):
            raise UsageError(f"options is {options!r}, expected a table such as {{'quantize': 'int8'}}")
        if isinstance(options, Mapping):
            options = tuple(sorted(options.items()))
        return cls(
            model=ModelSource.of(model),
            outputs=outputs,
            aliases=aliases or tuple(renamed),
            profile=profile,
            options=options,
            **{k: v for k, v in fields.items() if v is not None},
        )

    @property
    def label(self) -> str:
        """A readable id, as used in parametrized tests: ``onnxruntime-float32``."""
        return f"{self.backend}-{self.dtype}"

    def option(self, name: str, default: Any = None) -> Any:
        """Return one of the backend's own settings."""
        return dict(self.options).get(name, default)

    def untapped(self) -> EngineSpec:
        """Return the same engine without any tap: the observer check compares against it."""
        return replace(self, outputs=(), aliases=())

    def to_json(self) -> dict[str, Any]:
        """Return the canonical JSON form; the model appears by location or factory name, its content by fingerprint."""
        profile = {n: [r.min, r.opt, r.max] for n, r in self.profile.__dict__.items()}
        model = {"location": self.model.location, "factory": factory_name(self.model), "revision": self.model.revision}
        plain = {n: getattr(self, n) for n in ("backend", "dtype", "attention", "opset")}
        return {
            **plain,
            "model": model,
            "outputs": list(self.outputs),
            "aliases": [list(pair) for pair in self.aliases],
            "profile": profile,
            "options": dict(self.options),
        }


def parse_dtype(name: str) -> str:
    """Return torch's name of a dtype (``fp16`` -> ``float16``). Raises :class:`UsageError` for an unknown one."""
    known = DTYPE_ALIASES.get(str(name), str(name).removeprefix("torch."))
    if known not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}, expected one of {', '.join(DTYPES)}{nearest(str(name), DTYPES)}")
    return known


def parse_backend(name: str) -> str:
    """Return a backend's registered name (``ort`` -> ``onnxruntime``); any other name as it is."""
    return BACKEND_ALIASES.get(name, name) if isinstance(name, str) else name


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
    return "" if factory is None else f"{factory.__module__}.{getattr(factory, '__qualname__', repr(factory))}"

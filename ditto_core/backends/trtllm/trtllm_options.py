"""Settings of the backend, as they stand in ``options=`` of an engine spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ditto_core.errors import UsageError, nearest
from ditto_core.spec import EngineSpec

ENGINES = ("tensorrt", "pytorch")
BUILDERS = ("memory", "checkpoint", "ditto")
PREFIXES = ("build.", "plugin.")


@dataclass(frozen=True)
class TrtllmOptions:
    """Settings.

    ``engine``: ``tensorrt``, ``pytorch``, or empty for the first that is installed. ``builder``: ``memory`` (from the
    Hugging Face model), ``checkpoint`` (from a converted checkpoint, ``checkpoint=DIR``) or ``ditto`` (the upstream
    compiler). ``workers`` build ranks side by side. ``timeout`` in seconds, 0 for none; ``isolate`` builds in a child.
    ``build.X`` and ``plugin.X`` set a field of ``BuildConfig`` and of its ``plugin_config``.
    """

    engine: str = ""
    builder: str = "memory"
    checkpoint: str = ""
    workers: int = 1
    timeout: float = 0
    isolate: bool = True
    attn_backend: str = "TRTLLM"
    build: Mapping[str, Any] = field(default_factory=dict)
    plugin: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: EngineSpec) -> TrtllmOptions:
        """Read a spec's options. Raises :class:`UsageError` for an unknown name or value."""
        own = {name: value for name, value in spec.options if not name.startswith(PREFIXES)}
        known = [f.name for f in fields(cls) if f.name not in ("build", "plugin")]
        for name in own:
            if name not in known:
                told = ", ".join((*known, "build.FIELD", "plugin.FIELD"))
                raise UsageError(f"trtllm has no option {name!r}{nearest(name, known)} (known: {told})")
        groups = {p[:-1]: {k[len(p) :]: v for k, v in spec.options if k.startswith(p)} for p in PREFIXES}
        options = cls(build=groups["build"], plugin=groups["plugin"], **own)
        options._check()
        return options

    def _check(self) -> None:
        for name, value, choices in (("engine", self.engine, ("", *ENGINES)), ("builder", self.builder, BUILDERS)):
            if value not in choices:
                expected = ", ".join(filter(None, choices))
                raise UsageError(f"unknown {name} {value!r}, expected {expected}{nearest(value, choices)}")
        if (self.builder == "checkpoint") != bool(self.checkpoint):
            raise UsageError("builder='checkpoint' and checkpoint=DIR go together")

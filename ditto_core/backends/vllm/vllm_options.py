"""Settings of the backend, as they stand in ``options=`` of an engine spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditto_core.errors import UsageError, nearest
from ditto_core.spec import EngineSpec

PREFIX = "engine."
OWN = ("compiled", "checkpoint")
CHOICES = ("auto", "on", "off")


@dataclass(frozen=True)
class VllmOptions:
    """Settings.

    ``compiled``: ``off`` runs the modules one by one, ``on`` as vLLM serves them (``torch.compile``, CUDA graphs),
    where no hook fires inside; ``auto`` is off where tensors are to be shown and on where none are. ``checkpoint``: the
    directory that vLLM serves in the model's place, a quantized form of it. ``engine.X`` sets an argument of
    ``vllm.LLM``.
    """

    compiled: str = "auto"
    checkpoint: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: EngineSpec) -> VllmOptions:
        """Read a spec's options. Raises :class:`UsageError` for an unknown name or value."""
        own = {name: value for name, value in spec.options if not name.startswith(PREFIX)}
        for name in own:
            if name not in OWN:
                raise UsageError(f"vllm has no option {name!r}{nearest(name, OWN)} (known: {', '.join(OWN)}, engine.X)")
        compiled = own.get("compiled", "auto")
        if compiled not in CHOICES:
            raise UsageError(
                f"compiled is {compiled!r}, expected {', '.join(CHOICES)}{nearest(str(compiled), CHOICES)}"
            )
        checkpoint = str(own.get("checkpoint", ""))
        if checkpoint and not (Path(checkpoint) / "config.json").is_file():
            raise UsageError(f"checkpoint is {checkpoint!r}, expected a directory with a config.json")
        return cls(compiled, checkpoint, {k[len(PREFIX) :]: v for k, v in spec.options if k.startswith(PREFIX)})

    def eager(self, tapped: bool) -> bool:
        """Tell whether the modules are run one by one."""
        return self.compiled == "off" or (self.compiled == "auto" and tapped)

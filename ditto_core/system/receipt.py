"""What produced a result: commit, engine, model, versions, machine, settings of arithmetic, seeds, time."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("pytest-ditto-engine", "torch", "transformers", "onnx", "onnxruntime", "numpy")
COMMIT_VARIABLES = ("GITHUB_SHA", "CI_COMMIT_SHA")
"""Where CI systems name the commit, for checkouts without git."""


@dataclass(frozen=True)
class Receipt:
    """Where a result comes from. ``created``: seconds since 1970. ``commit`` ends in ``+`` when files were changed.

    ``engine``, ``reference`` and ``model`` are fingerprints (SHA-256), empty where they are not known (an engine
    directory that was copied out of the cache, a dump of another tool). ``machine`` holds ``gpu``, ``driver``, ``cpu``,
    ``system``; ``settings`` those of torch's arithmetic, and threads; ``seeds`` the bootstrap's and torch's.
    """

    created: float
    commit: str
    engine: str
    reference: str
    model: str
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Receipt:
        """Inverse of :meth:`to_json`."""
        return cls(**{item.name: data[item.name] for item in fields(cls)})

    @property
    def summary(self) -> str:
        """One line: commit, engine, GPU, driver."""
        gpu, driver = (self.machine.get(name, "none") for name in ("gpu", "driver"))
        engine = self.engine[:12] or "unknown"
        return f"commit {self.commit[:12] or 'unknown'}, engine {engine}, gpu {gpu}, driver {driver}"

    def facts(self) -> dict[str, str]:
        """Return everything as text by name, for reports; the time in UTC, what is not known left out."""
        when = datetime.fromtimestamp(self.created, timezone.utc).isoformat(" ", "seconds")
        prints = {name: getattr(self, name)[:12] for name in ("engine", "reference", "model")}
        seeds = {f"seed of {name}": str(seed) for name, seed in self.seeds.items()}
        found = {"created": when, "commit": self.commit, **prints}
        return {k: v for k, v in {**found, **self.machine, **self.settings, **seeds, **self.versions}.items() if v}

    @property
    def circumstances(self) -> tuple[Mapping[str, str], ...]:
        """What numbers depend on beside engine, reference and model: versions, machine, settings."""
        return self.versions, self.machine, self.settings

    def changes(self, other: Receipt) -> list[str]:
        """Return a line for each version and fact of the machine that differs from ``other``'s."""
        found = []
        for ours, theirs in zip(self.circumstances, other.circumstances, strict=True):
            for key in sorted({*ours, *theirs}):
                if ours.get(key) != theirs.get(key):
                    found.append(f"{key} was {theirs.get(key, 'absent')}, is {ours.get(key, 'absent')}")
        return found


def make_receipt(
    *,
    engine: str = "",
    reference: str = "",
    model: str = "",
    versions: Mapping[str, str] | None = None,
    threads: int = 0,
    seeds: Mapping[str, int] | None = None,
) -> Receipt:
    """Return a receipt of this moment, this process and this machine.

    ``versions`` are the backend's own; ``threads`` of torch, 0 for as many as it has now.
    """
    import torch

    return Receipt(
        created=time.time(),
        commit=commit(Path.cwd()),
        engine=engine,
        reference=reference,
        model=model,
        versions={**packages(), "python": platform.python_version(), **(versions or {})},
        machine=machine(),
        settings={**arithmetic(), "threads": str(threads or torch.get_num_threads())},
        seeds={"torch": torch.initial_seed(), **(seeds or {})},
    )


@cache
def packages() -> Mapping[str, str]:
    """Return the versions of the packages that decide results, of those that are installed."""
    return {name: number for name in PACKAGES if (number := version(name))}


def version(name: str) -> str:
    """Return a distribution's version, empty when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@cache
def commit(folder: Path) -> str:
    """Return the commit that is checked out in ``folder``, with ``+`` when files differ from it; empty without any.

    It is asked for once a process: in a large repository the answer takes a second.
    """
    try:
        head = git(folder, "rev-parse", "HEAD")
        return head + ("+" if git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return next((os.environ[name] for name in COMMIT_VARIABLES if os.environ.get(name)), "")


def git(folder: Path, *arguments: str) -> str:
    """Run git and return what it prints."""
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@cache
@cache
def machine() -> Mapping[str, str]:
    """Return GPU, driver, processor and system; a machine's name and address are nobody's business."""
    from ditto_core.system.gpus import describe_gpu

    system = f"{platform.system()} {platform.machine()}"
    return {**describe_gpu(), "cpu": processor(), "system": system}


def processor() -> str:
    """Return the processor's model name as Linux gives it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def arithmetic() -> dict[str, str]:
    """Return how torch may compute: TF32 and what NVIDIA's own variable says, sums in 16 bits, the kernels of attention
    and the processor's instructions that are allowed."""
    import torch
    from torch.backends import cpu, cuda

    convolution: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # torch makes it at run time
    sums = {name: getattr(cuda.matmul, f"allow_{name}_reduced_precision_reduction", False) for name in ("fp16", "bf16")}
    sums |= {"fp16 accumulation": getattr(cuda.matmul, "allow_fp16_accumulation", False)}
    kernels = {name: getattr(cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")}
    return {
        "tf32_matmul": str(cuda.matmul.fp32_precision == "tf32").lower(),
        "tf32_cudnn": str(convolution.fp32_precision == "tf32").lower(),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE", "unset"),
        "sums_in_16_bits": ", ".join(name for name, allowed in sums.items() if allowed) or "none",
        "sdpa": ", ".join(name for name, allowed in kernels.items() if allowed) or "none",
        "cpu_capability": cpu.get_cpu_capability(),
    }

"""The CPU's instruction sets: code that was compiled for one CPU may end the process on another."""

from __future__ import annotations

INSTRUCTIONS = "instruction sets"
"""Under which an engine's versions have those that its machine code may use."""


def instruction_sets() -> str:
    """Return the names of the CPU's instruction sets as torch gives them, sorted: ``avx avx2 fma3``. A torch without
    ``torch.cpu.get_capabilities`` gives that of its own kernels alone.
    """
    import torch

    known = getattr(torch.cpu, "get_capabilities", dict[str, object])()
    names = sorted(name for name, there in known.items() if there is True)
    return " ".join(names) or torch.backends.cpu.get_cpu_capability().lower()


def lacking(needed: str) -> list[str]:
    """Return those of ``needed``, in the form of :func:`instruction_sets`, that this CPU has not; loads torch if any
    are needed.
    """
    return sorted({*needed.split()} - {*instruction_sets().split()}) if needed else []

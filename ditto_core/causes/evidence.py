"""What is known of a site at one step, and how a rule that looks at it is applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.compare.blame import Cause
from ditto_core.errors import first_line

if TYPE_CHECKING:
    from torch import nn

    from ditto_core.causes.kinds import Kind


@dataclass(frozen=True)
class Seen:
    """A site at one step.

    ``actual`` is the engine's tensor, float64; ``valid`` marks the elements of real tokens (None: all). ``inputs`` are
    the step's model inputs, ``captured`` the engine's tensors by site and alias, as far as they were judged: one that
    was not may hold the fault itself. ``bound`` and ``floor`` are rel-L2.
    """

    site: str
    step: int
    actual: torch.Tensor
    valid: torch.Tensor | None
    inputs: Mapping[str, torch.Tensor]
    captured: Mapping[str, torch.Tensor]
    bound: float
    floor: float

    def chosen(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements that count, flat."""
        return tensor.reshape(-1) if self.valid is None else tensor[self.valid.expand(tensor.shape)]

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return real tokens as [token, channel]."""
        if self.valid is None:
            return tensor.reshape(-1, tensor.shape[-1])
        return tensor[self.valid.expand(tensor.shape)[..., 0]]

    @property
    def port(self) -> str:
        """The port of the site, an empty string for a module's output."""
        return self.site.partition(":")[2]

    @property
    def past_length(self) -> int:
        """Tokens in the cache before this step."""
        mask, ids = self.inputs.get("attention_mask"), self.inputs.get("input_ids")
        return 0 if mask is None or ids is None else mask.shape[1] - ids.shape[1]

    def tensor(self, site: str) -> torch.Tensor | None:
        """Return the engine's tensor at a site, by any of its names, float64."""
        found = self.captured.get(site)
        return None if found is None else found.double()


@dataclass(frozen=True)
class Evidence(Seen):
    """A blamed site at the first step that shows it, with what the model's own code computes from the engine's tensors.

    ``expected`` is float64. ``root`` is the model with the weights that the engine should have, ``path`` the
    module in it whose code computes the site, ``dtype`` the engine's. ``cached``: the site is a part of the KV cache;
    ``past`` is the engine's cache before the step, by site.
    """

    expected: torch.Tensor
    root: nn.Module
    path: str
    dtype: str
    cached: bool
    past: Mapping[str, torch.Tensor]
    failures: list[str] = field(default_factory=list)
    """Filled with what failed while the site was explained."""

    @property
    def module(self) -> nn.Module:
        """The module whose code computes the site."""
        return self.root.get_submodule(self.path)

    def cause(self, kind: Kind, confidence: float, lines: Sequence[str], next_step: str) -> Cause:
        """Name a cause at this site."""
        return Cause(kind, self.site, confidence, tuple(lines), next_step)


def left(now: float, bound: float, floor: float) -> float:
    """Return the error that an explanation may leave of ``now``: a tenth, or the noise floor up to a quarter."""
    return min(bound, max(0.1 * now, min(floor, 0.25 * now)))


def rel_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return |a - b| / |b|; infinity where either is not finite."""
    size, error = float(b.norm()), float((a - b).norm())
    if not math.isfinite(size) or not math.isfinite(error):
        return math.inf
    return error / size if size else (0.0 if not error else math.inf)


def slope(y: torch.Tensor, x: torch.Tensor) -> float:
    """Return the least-squares factor from x to y."""
    size = float((x * x).sum())
    return float((x * y).sum()) / size if size else 0.0


Rule = Callable[[Evidence], "Cause | None"]
"""Looks at the evidence of one site and returns the cause, or None if the rule does not fit."""


def first_cause(evidence: Evidence, rules: Iterable[Rule]) -> Cause | None:
    """Return the first cause that a rule names."""
    return next((found for rule in rules if (found := attempt(evidence, rule)) is not None), None)


def attempt(evidence: Evidence, rule: Rule) -> Cause | None:
    """Return what a rule names. One that fails names nothing and is written down: a verdict does not hang on it."""
    try:
        found = rule(evidence)
    except Exception as error:  # noqa: BLE001 - a rule may fail in any way on a model that it does not know
        text = f"rule {name_of(rule)} failed at {evidence.site}: {type(error).__name__}: {first_line(error)}"
        evidence.failures.append(text)
        return None
    return None if found is None else replace(found, rule=name_of(rule))


def name_of(rule: Callable[..., Any]) -> str:
    """Return the name of a rule: ``guards.zero``."""
    return f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"

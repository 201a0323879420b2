"""What a cause is, what a rule looks at, and how rules are applied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ditto_core.compare.blame import Blame, Cause
from ditto_core.compare.masks import NOTHING
from ditto_core.errors import first_line

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ditto_core.causes.kinds import Kind
    from ditto_core.compare.metrics import Metrics
    from ditto_core.sites import Tap


LEFT = 0.1
"""Share of the error that a candidate may leave."""


@dataclass(frozen=True)
class Evidence:
    """One blamed site at one step, with the tensors of both sides; all floating tensors are float64.

    ``actual`` is the engine's tensor, ``expected`` what the model's own code computes from the engine's tensors
    upstream. ``valid`` marks the elements that belong to real tokens (None: all). ``root`` is the model with the
    weights that the engine should have; ``inputs`` are the step's model inputs, ``past`` the engine's KV cache
    before it.
    """

    blame: Blame
    tap: Tap
    actual: torch.Tensor
    expected: torch.Tensor
    valid: torch.Tensor | None
    root: nn.Module
    dtype: str
    inputs: Mapping[str, torch.Tensor]
    captured: Mapping[str, torch.Tensor]
    past: Mapping[str, torch.Tensor]
    metrics: Metrics
    failures: list[str] = field(default_factory=list)
    """Filled with what failed while the site was explained."""

    @property
    def site(self) -> str:
        """The blamed site."""
        return self.blame.site

    @property
    def mask(self) -> bool:
        """Tell whether the site is an additive mask that hides something: no rule is about its numbers."""
        return self.expected.ndim == 4 and bool((self.expected < NOTHING).any())

    @property
    def port(self) -> str:
        """The port of the site, an empty string for a module's output."""
        return self.site.partition(":")[2]

    @property
    def module(self) -> nn.Module:
        """The module whose code computes the site."""
        return self.root.get_submodule(self.blame.module)

    @property
    def config(self) -> Any:
        """The decoder's configuration, or an empty object."""
        config: Any = getattr(self.root, "config", None)
        return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config

    @property
    def past_length(self) -> int:
        """Tokens in the cache before this step."""
        mask, ids = self.inputs.get("attention_mask"), self.inputs.get("input_ids")
        return 0 if mask is None or ids is None else mask.shape[1] - ids.shape[1]

    def tensor(self, site: str) -> torch.Tensor | None:
        """Return the engine's tensor at a site, by any of its names."""
        found = self.captured.get(site)
        return None if found is None else found.double()

    def sibling(self, port: str) -> torch.Tensor | None:
        """Return the engine's tensor at another port of the same module."""
        return self.tensor(f"{self.site.partition(':')[0]}:{port}")

    def distance(self, candidate: torch.Tensor) -> float:
        """Return the rel-L2 of the engine's tensor against another explanation of it."""
        return self.distance_between(self.actual, candidate)

    def distance_between(self, first: torch.Tensor, second: torch.Tensor) -> float:
        """Return the rel-L2 of one tensor against another of the site's shape, padding left out."""
        a, b = self.chosen(first), self.chosen(second)
        size, error = float(b.norm()), float((a - b).norm())
        return error / size if size else (0.0 if not error else float("inf"))

    def chosen(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements that count, flat."""
        return tensor.reshape(-1) if self.valid is None else tensor[self.valid.expand(tensor.shape)]

    def explains(self, candidate: torch.Tensor | None, share: float | None = None) -> bool:
        """Tell whether a candidate reproduces the engine's tensor.

        What is left must be within the local bound, and a tenth of the error at most: a candidate that is merely nearer
        (erf GELU for tanh GELU, no softcap for a large one) is another fault. ``share``: accounting for that share of
        the error is enough, for candidates that name rounding, whose details differ between engines.
        """
        if candidate is None or candidate.shape != self.actual.shape:
            return False
        error, now = self.distance(candidate), self.distance(self.expected)
        if share is not None:
            return error <= (1 - share) * min(now, 1.0)
        return error <= min(self.blame.bound, LEFT * now)

    def reproduces(self, candidate: torch.Tensor | None) -> bool:
        """Tell whether a rule's formula of the healthy site gives what the model's own code gives.

        A rule whose formula does not is about another computation than the model's, and what it would name is a guess.
        """
        if candidate is None or candidate.shape != self.expected.shape:
            return False
        return self.distance_between(candidate, self.expected) <= 0.1 * self.blame.bound

    def confidence(self, candidate: torch.Tensor) -> float:
        """Return 0.99 for a candidate that leaves rounding only, 0.9 for one that leaves a little more."""
        return 0.99 if self.distance(candidate) <= self.blame.bound else 0.9

    def cause(self, kind: Kind, confidence: float, evidence: Sequence[str], next_step: str) -> Cause:
        """Name a cause at this site."""
        return Cause(kind, self.site, confidence, tuple(evidence), next_step)


def parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return a parameter or buffer of a module in float64, or None if it has none."""
    import torch

    value = getattr(module, name, None)
    return value.double() if isinstance(value, torch.Tensor) else None


Rule = Callable[[Evidence], "Cause | None"]
"""Looks at the evidence of one site and returns the cause, or None if the rule does not fit."""


def first_cause(evidence: Evidence, rules: Iterable[Rule]) -> Cause | None:
    """Return the first cause that a family's rules name; they are ordered from the most specific on."""
    return next((found for rule in rules if (found := attempt(evidence, rule)) is not None), None)


def attempt(evidence: Evidence, rule: Rule) -> Cause | None:
    """Return what a rule names. One that fails names nothing and is written down: a verdict does not hang on it."""
    try:
        found = rule(evidence)
    except Exception as error:  # noqa: BLE001 - a rule may fail in any way on a model that it does not know
        text = f"rule {name_of(rule)} failed at {evidence.site}: {type(error).__name__}: {first_line(error)}"
        evidence.failures.append(text)
        return None
    return None if found is None else signed(found, rule)


def signed(cause: Cause, rule: Callable[..., Any]) -> Cause:
    """Write on a cause which rule found it, unless a finer rule did already."""
    return cause if cause.rule else replace(cause, rule=name_of(rule))


def name_of(rule: Callable[..., Any]) -> str:
    """Return the name of a rule: ``linear.transposed``."""
    return f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"

"""The sites of a loaded model, as a user looks for them: class, shape and source line, without building anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ditto_core.model.loading import LoadedModel
from ditto_core.model.summary import observe
from ditto_core.sites import Provenance, Tap

SIZED = ("", "head")
"""Axes that have one size in every step: it is shown in place of a name."""


@dataclass(frozen=True)
class ListedSite:
    """One site. ``shape`` holds a size for each fixed dimension, a name (batch, length, total) for each other one."""

    site: str
    aliases: tuple[str, ...]
    module_class: str
    dtype: str
    shape: tuple[int | str, ...]
    source: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


def list_sites(model: LoadedModel, selectors: Sequence[str]) -> list[ListedSite]:
    """Return the sites that match any selector, in the order in which the model computes them, from one forward pass.

    Raises :class:`~ditto_core.errors.SelectorError` when a selector matches nothing, and
    :class:`~ditto_core.errors.BuildError` when the model cannot run.
    """
    seen = observe(model, operators=any(" " in selector for selector in selectors))
    return [listed(tap, seen.shapes[tap.value]) for tap in Provenance(seen.taps).select(selectors)]


def listed(tap: Tap, sizes: Sequence[int]) -> ListedSite:
    """Return what is shown of a tap."""
    shape = tuple(size if axis in SIZED else axis for axis, size in zip(tap.axes, sizes, strict=True))
    return ListedSite(tap.site, tap.aliases, tap.module_class, tap.dtype, shape, tap.source)

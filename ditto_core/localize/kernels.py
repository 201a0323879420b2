"""What an engine's kernels were measured to do explains local errors where a site is computed by a product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ditto_core.compare.tolerance import by_kernels
from ditto_core.compare.verdict import DIVERGED, Verdict

if TYPE_CHECKING:
    from ditto_core.compare.blame import LocalResult
    from ditto_core.graphs.graph import Graph
    from ditto_core.session import Session
    from ditto_core.sites import Tap

PRODUCTS = frozenset(
    ("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "Attention", "MultiHeadAttention", "GroupQueryAttention")
)
"""Operators whose sums of products a matrix kernel computes."""


@dataclass(frozen=True)
class CoarseKernels:
    """The kernel properties of a session, and the sites that they speak of.

    ``graph`` returns the exported graph, or None where the backend builds from none: then every site may be a product.
    """

    session: Session
    taps: tuple[Tap, ...]
    graph: Callable[[], Graph | None]

    def explain(self, step: int, site: str, error: float, floor: float, factor: float) -> str:
        """Return the property that explains a local error (rel-L2) above its bound, empty for none."""
        kernels = self.session.info.kernels
        if not kernels or site not in self.products:
            return ""
        found = Verdict(DIVERGED, "rel_l2", error, factor * floor, "")
        return by_kernels(kernels, step, found, floor, factor).rule

    @cached_property
    def products(self) -> frozenset[str]:
        """The sites with a product between them and the nearest sites upstream."""
        graph = self.graph()
        known = {tap.value for tap in self.taps}
        return frozenset(
            tap.site
            for tap in self.taps
            if graph is None or any(op.operator in PRODUCTS for op in graph.segment(tap.value, known).operators)
        )


def explained_notes(results: Sequence[LocalResult]) -> Iterable[str]:
    """Say how many sites a kernel property explains, with the evidence of the largest error."""
    explained = [result for result in results if result.explained]
    if explained:
        worst = max(explained, key=lambda result: result.ratio)
        count = len({result.site for result in explained})
        sites = "1 site is" if count == 1 else f"{count} sites are"
        yield f"{sites} coarser than rounding by a measured property of the kernels; {worst.site}: {worst.explained}"

"""Localize with a pair: which engine to build, and what to build once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.compare.blame import Localization
from ditto_core.compare.tolerance import Tolerance
from ditto_core.errors import UsageError
from ditto_core.spec import EngineSpec
from ditto_core.stepping.prompts import Prompt

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.pair.pair import Pair


def localize_pair(
    pair: Pair,
    prompts: Prompt | Sequence[Prompt] | Mapping[str, torch.Tensor] | None,
    *,
    max_new_tokens: int,
    fp32: bool,
    operators: bool,
) -> Comparison:
    """Run a pair with every site tapped and return the comparison with its localization; see ``Pair.localize``."""
    whole = with_every_site(pair, "float32" if fp32 else pair.spec.dtype)

    def run(chosen: Pair, *, localize: bool = False) -> Comparison:
        if prompts is None or isinstance(prompts, Mapping):
            return chosen.run(prompts, localize=localize)
        return chosen.generate(prompts, max_new_tokens=max_new_tokens, localize=localize)

    if prompts is None and whole.engine_files.decoder:
        raise UsageError("localize needs a prompt: give text or token ids")
    comparison = run(whole, localize=True)
    if operators and comparison.localization:
        comparison = replace(comparison, localization=inside(whole, comparison.localization, run))
    if whole is not pair:
        whole.close()
        pair.comparisons.append(comparison)
    return comparison


def with_every_site(pair: Pair, dtype: str) -> Pair:
    """Return the pair itself when its engine shows every site in ``dtype``; else one whose engine does."""
    from ditto_core.localize import EVERYTHING

    known = {tap.site for tap in pair.engine_files.taps}
    every = {tap.site for tap in pair.workspace.export(pair.spec).provenance.taps}
    if dtype == pair.spec.dtype and every <= known:
        return pair
    return other_pair(pair, replace(pair.spec, dtype=dtype, outputs=EVERYTHING, aliases=()))


def other_pair(pair: Pair, spec: EngineSpec) -> Pair:
    """Return a pair of the same workspace and options with another engine; nothing is dumped twice.

    Tolerances of names that only the first engine has mean nothing there.
    """
    rules = Tolerance.of(pair.options.tolerance).optional()
    return type(pair)(pair.workspace, spec, replace(pair.options, dump=None, tolerance=rules))


def inside(whole: Pair, found: Localization, run: Any) -> Localization:
    """Build once more with the operators of the first blamed site tapped, and blame one of them."""
    from ditto_core.pair.operators import OperatorCheck

    first = found.blamed[0]
    check = OperatorCheck(whole, first)
    if len(check.values) < 2:
        return replace(found, blamed=(replace(first, operator=check.only), *found.blamed[1:]))
    spec = replace(whole.spec, outputs=(*whole.spec.outputs, *(f"onnx:{value}" for value in check.values)))
    closer = other_pair(whole, spec)
    try:
        operator = check.blame(closer, run)
    finally:
        closer.close()
    return replace(found, blamed=(replace(first, operator=operator), *found.blamed[1:]))

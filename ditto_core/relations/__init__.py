"""Relations that hold for any engine without a reference: the same inputs, fed another way, give the same numbers."""

from ditto_core.relations.checks import (
    Terms,
    chunked_prefill,
    left_padding,
    prefill_equals_steps,
    right_padding,
    row_in_batch,
    same_bits,
    shapes,
    warm_cache,
)
from ditto_core.relations.inputs import InputRelations
from ditto_core.relations.result import BROKEN, ROUNDING, SAME_BITS, Difference, Relation
from ditto_core.relations.suite import Relations

__all__ = [
    "BROKEN",
    "ROUNDING",
    "SAME_BITS",
    "Difference",
    "InputRelations",
    "Relation",
    "Relations",
    "Terms",
    "chunked_prefill",
    "left_padding",
    "prefill_equals_steps",
    "right_padding",
    "row_in_batch",
    "same_bits",
    "shapes",
    "warm_cache",
]

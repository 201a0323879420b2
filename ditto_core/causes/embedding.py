"""Embeddings: which ids the engine looked up, and in what table."""

from __future__ import annotations

import torch
from torch import nn

from ditto_core.causes.base import Evidence, first_cause
from ditto_core.causes.kinds import Kind
from ditto_core.causes.linear import rows, slope
from ditto_core.causes.rounding import integers, on_grid
from ditto_core.compare.blame import Cause

PIECE = 1 << 22
"""Elements of a table that are held in float64 at a time: a vocabulary of 256k rows would take gigabytes."""


def embedding(evidence: Evidence) -> Cause | None:
    """Explain an embedding's output; other sites are ignored."""
    if evidence.port or not isinstance(evidence.module, nn.Embedding):
        return None
    ids = wanted_ids(evidence)
    if ids is not None:
        table = table_of(evidence)
        looked_up = table[ids.clamp(0, len(table) - 1)]  # a model with an open vocabulary reads its last row
        if not evidence.reproduces(looked_up.double() * table_scale(evidence)):
            return None
    return first_cause(evidence, RULES)


def scale_missing(evidence: Evidence) -> Cause | None:
    """The rows are right up to one factor."""
    factor = slope(rows(evidence, evidence.actual), rows(evidence, evidence.expected))
    candidate = evidence.expected * factor
    if not factor or not evidence.explains(candidate):
        return None
    width = evidence.actual.shape[-1]
    if abs(factor * width**0.5 - 1) < 0.01:
        line = f"output = expected / sqrt({width}): the scale by the root of the width is missing"
        kind: Kind = "embedding scale missing"
    else:
        line, kind = f"output = {factor:.6g} x expected", "weight scaled"
    return evidence.cause(kind, evidence.confidence(candidate), [line], "multiply the embeddings as the model does")


def other_rows(evidence: Evidence) -> Cause | None:
    """The engine looked other ids up than it was given."""
    ids = wanted_ids(evidence)
    if ids is None:
        return None
    table, scale = table_of(evidence), table_scale(evidence)
    found = nearest_rows(evidence.actual.reshape(-1, table.shape[1]) / scale, table).reshape(ids.shape)
    if not evidence.explains(table[found].double() * scale):
        return None
    wrong = (found != ids) & valid_tokens(evidence, ids)
    return describe_ids(evidence, ids, found, wrong) if wrong.any() else None


def nearest_rows(wanted: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the index [n] of the table's row at the least distance from each of ``wanted`` [n, width], float64."""
    best = torch.full((wanted.shape[0],), torch.inf, dtype=torch.float64)
    found = torch.zeros_like(best, dtype=torch.int64)
    step = max(1, PIECE // table.shape[1])
    for start in range(0, table.shape[0], step):
        piece = table[start : start + step].double()
        # |w - r|^2 without |w|^2, which is the same for all rows
        least, index = (piece.square().sum(1) - 2 * wanted @ piece.T).min(1)
        nearer = least < best
        best[nearer], found[nearer] = least[nearer], index[nearer] + start
    return found


def describe_ids(evidence: Evidence, ids: torch.Tensor, found: torch.Tensor, wrong: torch.Tensor) -> Cause | None:
    """Name the pattern of wrong ids."""
    row, column = (int(i) for i in wrong.nonzero()[0])
    first = f"row {row}, token {column}: id {int(ids[row, column])} was looked up as {int(found[row, column])}"
    valid = valid_tokens(evidence, ids)
    words = ids.reshape(-1).contiguous().view(torch.int32)[: ids.numel()].reshape(ids.shape)
    if torch.equal(words.long()[valid], found[valid]):
        line = "the ids are the 32-bit halves of the 64-bit ids: every second one is 0"
        return evidence.cause(
            "int64 read as int32", 0.99, [line, first], "bind the input in the dtype the engine wants"
        )
    for bits in (32, 16, 8):
        if torch.equal(cut_ids(evidence, ids, bits)[valid], found[valid]):
            line = f"the ids are cut to {bits} bits"
            return evidence.cause("ids truncated", 0.98, [line, first], "keep token ids in a wider integer")
    if positional(evidence):
        return positions(evidence, ids, found, wrong, first)
    shift = torch.unique((found - ids)[valid])
    if len(shift) == 1:
        line = f"every id is off by {int(shift):+d}"
        return evidence.cause("ids shifted", 0.95, [line, first], "check the first id of the engine's table")
    bound = int(ids[wrong].min())
    if torch.equal(wrong[valid], (ids >= bound)[valid]) and len(torch.unique(ids[wrong])) > 1 == len(
        torch.unique(found[wrong])
    ):
        line = f"{int(wrong.sum())} ids from {bound} on became {int(found[wrong][0])}"
        return evidence.cause("ids replaced", 0.9, [line, first], "check the size of the engine's vocabulary")
    line = f"{int(wrong.sum())} of {wrong.numel()} tokens were looked up under other ids"
    return evidence.cause("other ids", 0.85, [line, first], "compare the inputs before the first layer")


def cut_ids(evidence: Evidence, ids: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the ids in so many bits; those that do not fit the table then are its first or last row."""
    if bits < 32:
        return torch.remainder(ids, 2**bits)
    return ids.to(torch.int32).long().clamp(0, table_of(evidence).shape[0] - 1)


def positions(
    evidence: Evidence, ids: torch.Tensor, found: torch.Tensor, wrong: torch.Tensor, first: str
) -> Cause | None:
    """Name the pattern of wrong positions in a table of learned positions."""
    mask = evidence.inputs["attention_mask"]
    length = ids.shape[1]
    plain = torch.arange(evidence.past_length, mask.shape[1]).expand_as(found)[:, -length:]
    padded = ~mask.bool().all(1)
    valid = valid_tokens(evidence, ids)
    if padded.any() and torch.equal(found[valid], plain[valid]):
        line = f"positions count padding: only padded rows {padded.nonzero().flatten().tolist()} are wrong"
        return evidence.cause(
            "padding positions", 0.98, [line, first], "pass position_ids made from the attention mask"
        )
    last = int(found[valid].max())
    if ids[valid].numel() > 1 and last > 0 and torch.equal(ids[valid].clamp(max=last), found[valid]):
        line = f"positions end at {last}: all later tokens have that one"
        return evidence.cause("positions bounded", 0.95, [line, first], "compare the longest position on both sides")
    shift = torch.unique((found - ids)[valid])
    if len(shift) != 1:
        return None
    line = f"every position is off by {int(shift):+d}"
    return evidence.cause("positions shifted", 0.95, [line, first], "check where the engine starts to count")


def offset_wrapped(evidence: Evidence) -> Cause | None:
    """The flat offset of a row, id x width, wraps at a power of two, as 32-bit arithmetic does."""
    ids = wanted_ids(evidence)
    flat = table_of(evidence).reshape(-1)
    if ids is None:
        return None
    width = evidence.actual.shape[-1]
    offsets = ids[..., None] * width + torch.arange(width)
    for bits in range(8, int(offsets.max()).bit_length()):
        if 2**bits >= flat.numel() or not evidence.explains(flat[offsets % 2**bits].double() * table_scale(evidence)):
            continue
        lines = [f"id x {width} wraps at 2^{bits} elements, from id {2**bits // width} on"]
        return evidence.cause("table offset wraps", 0.97, lines, "compute the offset in 64 bits, or split the table")
    return None


def quantized(evidence: Evidence) -> Cause | None:
    """Rows of a rounded table."""
    ids = wanted_ids(evidence)
    if ids is None:
        return None
    table = table_of(evidence)
    wanted, largest = table[ids].double(), table.abs().max().double()
    rounded = {
        "int8, one scale a row": integers(wanted, 8),
        "int8, one scale": on_grid(wanted, largest, 8),
        "int4": integers(wanted, 4),
    }
    for name, candidate in rounded.items():
        if evidence.explains(candidate * table_scale(evidence)):
            return evidence.cause(
                "weights quantized", 0.95, [f"the table holds {name}"], "keep the embedding unquantized"
            )
    return None


def zeroed(evidence: Evidence) -> Cause | None:
    """The table is empty."""
    if evidence.metrics.all_zero_actual and not evidence.metrics.all_zero_expected:
        return evidence.cause("weights zeroed", 0.97, ["all rows are zero"], "check that the table was loaded")
    return None


def table_of(evidence: Evidence) -> torch.Tensor:
    """Return the table [id, width] in its own dtype."""
    return evidence.module.get_parameter("weight").detach()


def positional(evidence: Evidence) -> bool:
    """Tell whether the table is looked up by position (GPT-2's ``wpe``)."""
    name = evidence.blame.module.rpartition(".")[2]
    return name == "wpe" or "position" in name


def wanted_ids(evidence: Evidence) -> torch.Tensor | None:
    """Return the ids that should be looked up, int64 [batch, length]."""
    ids = evidence.inputs.get("position_ids" if positional(evidence) else "input_ids")
    return ids if ids is not None and ids.shape == evidence.actual.shape[:-1] else None


def table_scale(evidence: Evidence) -> float:
    """Return the factor between the table and the module's output (Gemma scales by the root of the width)."""
    scale = getattr(evidence.module, "embed_scale", 1.0)
    return float(scale)


def valid_tokens(evidence: Evidence, ids: torch.Tensor) -> torch.Tensor:
    """Return which ids belong to real tokens."""
    if evidence.valid is None:
        return torch.ones_like(ids, dtype=torch.bool)
    return evidence.valid.expand(evidence.actual.shape)[..., 0]


RULES = (zeroed, scale_missing, other_rows, offset_wrapped, quantized)

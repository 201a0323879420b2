"""One way to feed rows of tokens into a session, and what comes out of it in a form that no way of feeding changes.

The form: for each site a tensor [row, position, …] of the real tokens alone, however they were padded and split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ditto_core.compare.masks import is_mask
from ditto_core.errors import UsageError
from ditto_core.sites import Tap

if TYPE_CHECKING:
    from ditto_core.profile import ShapeProfile
    from ditto_core.session import Session

LOGITS = Tap("logits", "logits", axes=("batch", "length", ""))


@dataclass(frozen=True, eq=False)
class Feed:
    """Token ids and mask, int64 [batch, columns] (the mask is 0 on padding), and the columns that each step takes."""

    ids: torch.Tensor
    mask: torch.Tensor
    chunks: tuple[int, ...]
    label: str

    def inputs(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the inputs of each step. Positions count real tokens only, as Hugging Face's ``generate`` does."""
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        start = 0
        for size in self.chunks:
            stop = start + size
            yield {
                "input_ids": self.ids[:, start:stop],
                "attention_mask": self.mask[:, :stop],
                "position_ids": positions[:, start:stop],
            }
            start = stop

    def check(self, profile: ShapeProfile | None) -> None:
        """Raise :class:`UsageError` when a step is outside an engine's profile."""
        past = 0
        for size in self.chunks if profile is not None else ():
            assert profile is not None
            profile.check(self.ids.shape[0], size, past)
            past += size

    def steps(self) -> tuple[tuple[int, ...], ...]:
        """Return for each row the step that computes each of its positions."""
        step_of = [step for step, size in enumerate(self.chunks) for _ in range(size)]
        real = self.mask.bool().tolist()
        return tuple(tuple(s for s, is_real in zip(step_of, row, strict=True) if is_real) for row in real)


def feed(
    rows: Sequence[Sequence[int]],
    *,
    chunks: Sequence[int] = (),
    left: int = 0,
    right: int = 0,
    tail: int = 0,
    pad: int = 0,
    label: str = "one prefill",
) -> Feed:
    """Lay out rows of one length: ``left`` pad columns before them, ``right`` before their last ``tail`` tokens.

    ``chunks`` are the columns of each step (default: the last ``tail`` tokens one by one, all before them at once).
    Raises :class:`UsageError` for rows of different lengths or too few tokens.
    """
    lengths = {len(row) for row in rows}
    if len(lengths) != 1 or (length := lengths.pop()) <= tail:
        raise UsageError(f"rows have {sorted({len(r) for r in rows})} tokens, expected one of at least {tail + 1}")
    ids = torch.tensor([list(row) for row in rows], dtype=torch.int64)
    parts = [(left, None), (0, ids[:, : length - tail]), (right, None), (0, ids[:, length - tail :])]
    columns, mask = zip(*(column_block(count, part, len(rows), pad) for count, part in parts), strict=True)
    laid = torch.cat(columns, 1)
    sizes = tuple(chunks) or (laid.shape[1] - tail, *[1] * tail)
    if sum(sizes) != laid.shape[1]:
        raise UsageError(f"chunks {list(sizes)} hold {sum(sizes)} tokens, the rows have {laid.shape[1]}")
    return Feed(laid, torch.cat(mask, 1), sizes, label)


def column_block(count: int, part: torch.Tensor | None, rows: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of ``count`` pad columns, or of a block of real tokens."""
    if part is None:
        return torch.full((rows, count), pad, dtype=torch.int64), torch.zeros(rows, count, dtype=torch.int64)
    return part, torch.ones_like(part)


@dataclass
class Captured:
    """What a run showed: ``values`` by site [row, position, …], ``axes`` of them, ``left_out`` with the reason."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def capture(session: Session, fed: Feed) -> Captured:
    """Run a feed from an empty cache and return its tensors by site. All taps of the run are in memory at once."""
    parts: dict[str, list[torch.Tensor]] = {}
    session.start(fed.ids.shape[0])
    for inputs in fed.inputs():
        outputs = session.step(inputs, lambda site, tensor: parts.setdefault(site, []).append(tensor.clone()))
        if "logits" in outputs and all(tap.value != "logits" for tap in session.taps):
            parts.setdefault("logits", []).append(outputs["logits"].clone())
    found = Captured()
    for tap in (*session.taps, LOGITS):
        if tap.site in parts:
            add(found, tap, parts.pop(tap.site), fed)
        elif tap is not LOGITS:
            found.left_out[tap.site] = "not delivered"
    return found


def add(found: Captured, tap: Tap, parts: list[torch.Tensor], fed: Feed) -> None:
    """Bring one site's tensors of all steps into the common form."""
    problem = unfit(tap, parts, fed)
    if problem:
        found.left_out[tap.site] = problem
        return
    names = [axis for axis in ("batch", "length", "total") if axis in tap.axes]
    moved = [part.movedim([tap.axes.index(n) for n in names], list(range(len(names)))) for part in parts]
    mask = fed.mask.bool()
    if names == ["batch", "total"]:
        whole = moved[-1]  # the last step sees every key
    elif names == ["batch", "length"] and all(part.shape[1] == 1 for part in moved):
        whole = torch.cat(moved, 1)  # a server's logits: the last token's of each step
        mask = mask[:, torch.tensor(fed.chunks).cumsum(0) - 1]
    else:
        if "total" in names:
            moved = full_width(moved, fed.ids.shape[1])
        whole = torch.cat(moved, 1)
    rest = [axis for axis in tap.axes if axis not in names]
    found.values[tap.site] = real_only(whole, mask, twice="total" in names and "length" in names)
    found.axes[tap.site] = ("batch", "length", *("" for _ in names[2:]), *rest)


def unfit(tap: Tap, parts: list[torch.Tensor], fed: Feed) -> str:
    """Return why a site cannot be brought into the common form, or an empty string."""
    if "batch" not in tap.axes or not {"length", "total"} & set(tap.axes):
        return f"axes {', '.join(a or '?' for a in tap.axes) or 'unknown'}: no row or no position to align by"
    if any(part.ndim != len(tap.axes) for part in parts) or len(parts) != len(fed.chunks):
        return "not delivered at every step with the axes that the export promised"
    return ""


def full_width(parts: list[torch.Tensor], width: int) -> list[torch.Tensor]:
    """Widen [batch, length, keys, …] to ``width`` keys: those of later steps have no weight, and a mask hides them."""
    masks = all(map(is_mask, parts))
    if masks:
        parts = [part < 0 for part in parts]
    wide = [part.new_full((*part.shape[:2], width, *part.shape[3:]), masks) for part in parts]
    for target, part in zip(wide, parts, strict=True):
        target[:, :, : part.shape[2]] = part
    return wide


def real_only(whole: torch.Tensor, real: torch.Tensor, *, twice: bool) -> torch.Tensor:
    """Drop padding: [batch, columns, …] -> [batch, tokens, …], along the keys too when ``twice``."""
    rows = [row[keep][:, keep] if twice else row[keep] for row, keep in zip(whole, real.to(whole.device), strict=True)]
    return torch.stack(rows)


def stacked(runs: Sequence[Captured]) -> Captured:
    """Put runs of single rows below each other, as if they were one batch."""
    first = runs[0]
    values = {site: torch.cat([run.values[site] for run in runs]) for site in first.values}
    return Captured(values, first.axes, first.left_out)


def differing_bits(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """Count the elements whose bits differ: -0 differs from 0, and a NaN equals itself. Devices may differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return actual.numel()
    expected = expected.to(actual.device)
    size = actual.element_size()
    if size not in BY_SIZE or not actual.is_floating_point():
        return int((actual != expected).sum())
    kind = BY_SIZE[size]
    return int((actual.contiguous().view(kind) != expected.contiguous().view(kind)).sum())


BY_SIZE: Mapping[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

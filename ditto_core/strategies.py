"""Hypothesis strategies for engines: prompts, batches, sizes inside a profile, and activations with hard values.

All of them shrink: to the shortest prompt, one row, the smallest token ids, a tensor without a special value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from ditto_core.errors import UsageError
from ditto_core.profile import Range, ShapeProfile
from ditto_core.spec import parse_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from hypothesis.strategies import SearchStrategy


def token_ids(
    vocab_size: int, *, min_length: int = 1, max_length: int = 32, exclude: Sequence[int] = ()
) -> SearchStrategy[list[int]]:
    """Prompts as token ids below ``vocab_size``, without those in ``exclude``. Raises :class:`UsageError`."""
    allowed = [token for token in sorted(set(exclude)) if 0 <= token < vocab_size]
    if vocab_size <= len(allowed):
        raise UsageError(f"a vocabulary of {vocab_size} without {len(allowed)} tokens is empty")
    if not 1 <= min_length <= max_length:
        raise UsageError(f"lengths {min_length} to {max_length} were given, expected at least 1 and a longer one")
    banned = frozenset(allowed)
    one = st.integers(0, vocab_size - 1)
    return st.lists(
        one.filter(lambda token: token not in banned) if banned else one, min_size=min_length, max_size=max_length
    )


def prompts(tokenizer: Any, *, min_tokens: int = 1, max_tokens: int = 32) -> SearchStrategy[str]:
    """Texts of ``min_tokens`` to ``max_tokens`` tokens that a tokenizer's own vocabulary spells.

    Special tokens are left out; a text that the tokenizer reads as other than its tokens is still a good prompt, but
    one that it reads as too many or too few tokens is not drawn.
    """
    special = tuple(getattr(tokenizer, "all_special_ids", ()))
    ids = token_ids(len(tokenizer), min_length=min_tokens, max_length=max_tokens, exclude=special)

    def fits(text: str) -> bool:
        return bool(text) and min_tokens <= len(tokenizer(text)["input_ids"]) <= max_tokens

    return ids.map(lambda drawn: str(tokenizer.decode(drawn))).filter(fits)


def token_batches(
    vocab_size: int, *, min_rows: int = 1, max_rows: int = 4, min_length: int = 1, max_length: int = 32
) -> SearchStrategy[list[list[int]]]:
    """Batches of prompts of different lengths, as ``ditto.generate`` takes them."""
    rows = token_ids(vocab_size, min_length=min_length, max_length=max_length)
    return st.lists(rows, min_size=min_rows, max_size=max_rows)


def lengths(size: Range) -> SearchStrategy[int]:
    """Sizes inside a range of a profile; its smallest, typical and largest come up often. Shrinks to the smallest."""
    edges = sorted({size.min, size.opt, size.max, max(size.min, size.max - 1), min(size.max, size.opt + 1)})
    return st.sampled_from(edges) | st.integers(size.min, size.max)


def shapes(profile: ShapeProfile) -> SearchStrategy[tuple[int, int, int]]:
    """``(batch, length, past)`` of a step that a profile allows."""
    return st.tuples(lengths(profile.batch), lengths(profile.length), lengths(profile.past))


def activations(
    shape: Sequence[int],
    dtype: str = "float32",
    *,
    outliers: bool = True,
    subnormals: bool = True,
    nan: bool = False,
    infinity: bool = False,
    max_special: int = 8,
) -> SearchStrategy[torch.Tensor]:
    """Tensors like activations: zeros or normal numbers, with up to ``max_special`` special values put in.

    Special are +0 and -0 always; ``outliers`` (50 to 1000 times the usual, and the dtype's largest number),
    ``subnormals`` (the smallest, and the largest below normal), ``nan``, ``infinity`` (of both signs) where asked for.
    Shrinks to zeros without a special value.
    """
    import torch

    kind: torch.dtype = getattr(torch, parse_dtype(dtype))
    size = torch.Size(shape).numel()
    if not size:
        raise UsageError(f"shape {list(shape)} has no element to put a value in")
    values = specials(kind, outliers=outliers, subnormals=subnormals, nan=nan, infinity=infinity)

    def make(scale: float, seed: int, puts: list[tuple[int, float]]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        flat = (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(kind)
        for place, value in puts:
            flat[place] = value
        return flat.reshape(tuple(shape))

    puts = st.lists(st.tuples(st.integers(0, size - 1), st.sampled_from(values)), max_size=max_special)
    return st.builds(make, st.sampled_from([0.0, 1.0, 0.02, 20.0]), st.integers(0, 2**31 - 1), puts)


def specials(
    kind: torch.dtype, *, outliers: bool = True, subnormals: bool = True, nan: bool = False, infinity: bool = False
) -> list[float]:
    """Return the special values of a dtype, each exact in it."""
    import torch

    info = torch.finfo(kind)
    found = [0.0, -0.0]
    if outliers:
        found += [50.0, -50.0, 1000.0, -1000.0, info.max, info.min]
    if subnormals:
        smallest = info.tiny * info.eps
        found += [smallest, -smallest, info.tiny - smallest, info.tiny]
    return found + [float("nan")] * nan + [float("inf"), float("-inf")] * infinity


def histories(prompts: int, *, max_events: int = 12, max_steps: int = 8) -> SearchStrategy[list[tuple[str, int]]]:
    """Histories of a server's requests for ``check_history``: of so many prompts some are sent, run and aborted."""
    event = st.one_of(
        st.tuples(st.just("submit"), st.integers(0, prompts - 1)),
        st.tuples(st.just("step"), st.integers(1, max_steps)),
        st.tuples(st.just("abort"), st.integers(0, max_events - 1)),
    )
    return st.lists(event, min_size=1, max_size=max_events)

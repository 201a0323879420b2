"""Inputs by name of the zoo's models: what is drawn is the same in every process."""

from __future__ import annotations

import torch

VOCABULARY = 128


def drawn(*shape: int) -> torch.Tensor:
    """Return normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def tokens(*shape: int, first: int = 9) -> torch.Tensor:
    """Return token ids from ``first`` on."""
    return torch.randint(first, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def points() -> dict[str, torch.Tensor]:
    """Images, and one point in each."""
    return {"pixel_values": drawn(2, 3, 32, 32), "input_points": torch.tensor([[[[3.0, 4.0]]], [[[9.0, 20.0]]]])}


def described() -> dict[str, torch.Tensor]:
    """Images, and the first words about each."""
    ids = tokens(2, 7)
    return {"pixel_values": drawn(2, 3, 32, 32), "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def pictured() -> dict[str, torch.Tensor]:
    """Text in which sixteen tokens stand for an image."""
    ids = tokens(2, 20)
    ids[:, 1:17] = 5
    return {"input_ids": ids, "pixel_values": drawn(2, 3, 32, 32), "attention_mask": torch.ones_like(ids)}


def tiled() -> dict[str, torch.Tensor]:
    """Text in which four tokens stand for an image of one tile."""
    ids = tokens(2, 10)
    ids[:, 1:5] = 5
    return {"input_ids": ids, "pixel_values": drawn(2, 1, 3, 32, 32), "attention_mask": torch.ones_like(ids)}


def typed() -> dict[str, torch.Tensor]:
    """Text that begins with sixteen tokens of an image, and each token's type."""
    ids = tokens(2, 20)
    ids[:, :16] = 5
    kinds = {"token_type_ids": (ids == 5).long(), "attention_mask": torch.ones_like(ids)}
    return {"input_ids": ids, **kinds, "pixel_values": drawn(2, 3, 32, 32)}


def patched() -> dict[str, torch.Tensor]:
    """Text in which four tokens stand for an image of 4 x 4 patches."""
    ids = tokens(1, 10)
    ids[:, 1:5], ids[:, 0] = 5, 7
    kinds = {"mm_token_type_ids": (ids == 5).long(), "attention_mask": torch.ones_like(ids)}
    return {"input_ids": ids, **kinds, "pixel_values": drawn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}

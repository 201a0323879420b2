"""Hypothesis strategies for tests of engines; see :mod:`ditto_core.strategies`."""

from ditto_core.strategies import activations, lengths, prompts, shapes, specials, token_batches, token_ids

__all__ = ["activations", "lengths", "prompts", "shapes", "specials", "token_batches", "token_ids"]

"""Engines of several ranks: each a process with its share of the weights, their tensors joined before comparing."""

from ditto_core.backends.ranks.backend import TensorParallelBackend

__all__ = ["TensorParallelBackend"]

"""Comparison of tensors: metrics, tolerances, tokens, and the structured result. Knows nothing of engines."""

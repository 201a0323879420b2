"""Servers that run a torch module from their own loop: hooks, joint projections, residual pairs, packed rows, tokens.

TensorRT-LLM's PyTorch backend and vLLM are each a small class over it.
"""

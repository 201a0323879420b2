"""TensorRT-LLM: engines (up to 1.2.1) and its PyTorch backend (from 1.0), behind one adapter."""

from ditto_core.backends.trtllm.backend import TrtllmBackend

__all__ = ["TrtllmBackend"]

"""TensorRT engines: one backend for ``tensorrt`` (10.x, 11.x) and TensorRT-RTX, chosen at run time."""

from ditto_core.backends.tensorrt.backend import TensorRTBackend

__all__ = ["TensorRTBackend"]

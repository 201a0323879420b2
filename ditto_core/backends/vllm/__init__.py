"""vLLM: its own modules in its own loop, in this process."""

from ditto_core.backends.vllm.backend import VllmBackend

__all__ = ["VllmBackend"]

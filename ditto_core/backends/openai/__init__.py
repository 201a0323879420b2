"""An OpenAI-compatible server as an engine: its log-probabilities, nothing inside."""

from ditto_core.backends.openai.backend import OpenAIBackend

__all__ = ["OpenAIBackend"]

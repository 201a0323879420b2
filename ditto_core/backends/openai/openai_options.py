"""Settings of the backend, as they stand in ``options=`` of an engine spec."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ditto_core.errors import UsageError, nearest
from ditto_core.spec import EngineSpec


@dataclass(frozen=True)
class OpenAIOptions:
    """Settings.

    ``url``: the server's address with its version, ``http://127.0.0.1:8000/v1``. ``model``: the name that the server
    knows (default: its only one). ``top``: log-probabilities asked for at each step, -1 for all of the vocabulary.
    ``timeout`` of a request in seconds. ``key_variable``: the environment variable with the key, where one is needed.
    """

    url: str
    model: str = ""
    top: int = -1
    timeout: float = 120.0
    key_variable: str = ""

    @classmethod
    def of(cls, spec: EngineSpec) -> OpenAIOptions:
        """Read a spec's options. Raises :class:`UsageError` for an unknown name, or without an address."""
        known = [each.name for each in fields(cls)]
        given = dict(spec.options)
        for name in given:
            if name not in known:
                raise UsageError(f"openai has no option {name!r}{nearest(name, known)} (known: {', '.join(known)})")
        url = str(given.get("url", ""))
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"openai needs the option url, got {url!r}, expected such as http://127.0.0.1:8000/v1")
        return cls(**{**given, "url": url.rstrip("/")})

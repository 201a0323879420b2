"""Requests to an OpenAI-compatible server, and what its answers say of the next token."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ditto_core.backends.openai.openai_options import OpenAIOptions
from ditto_core.errors import BackendError, RunError, first_line

TOKEN_ID = re.compile(r"token_id:(\d+)")


def request(options: OpenAIOptions, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return a server's answer as JSON. Raises :class:`BackendError` with its address and reason when there is none."""
    headers = {"Content-Type": "application/json"}
    if options.key_variable:
        headers["Authorization"] = f"Bearer {os.environ.get(options.key_variable, '')}"
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"{options.url}{path}", data, headers)
    try:
        with urllib.request.urlopen(asked, timeout=options.timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode(errors="replace")
        raise BackendError(f"{options.url}{path} answered {error.code}: {first_line(Exception(said))}") from error
    except (OSError, ValueError) as error:
        raise BackendError(f"{options.url}{path} gave no answer: {first_line(error)}") from error


def served_model(options: OpenAIOptions) -> str:
    """Return the name of the model that is asked for, else of the only one that the server has.

    Raises :class:`BackendError` when the server does not know it, or has several of which none is asked for.
    """
    names = [str(each["id"]) for each in request(options, "/models").get("data", ())]
    if options.model and options.model not in names:
        raise BackendError(f"{options.url} serves no {options.model!r}, it serves {', '.join(names)}")
    if not names:
        raise BackendError(f"{options.url} serves no model")
    if not options.model and len(names) > 1:
        raise BackendError(f"{options.url} serves {', '.join(names)}: choose one with the option model")
    return options.model or names[0]


def told(options: OpenAIOptions, model: str) -> dict[str, str]:
    """Return a model's checkpoint and the server's version by the names of facts, where it tells them (vLLM does)."""
    known: Mapping[str, Any] = next(
        (each for each in asked(options, "/models").get("data", ()) if each.get("id") == model), {}
    )
    found = {"checkpoint": known.get("root"), "server version": asked(above(options), "/version").get("version")}
    return {name: str(value) for name, value in found.items() if value}


def above(options: OpenAIOptions) -> OpenAIOptions:
    """Return the options with the server's own address, without the version of the protocol."""
    return replace(options, url=options.url.rpartition("/")[0])


def asked(options: OpenAIOptions, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a server's answer to what it need not know; empty where it gives none."""
    try:
        answer = request(options, path, body)
    except BackendError:
        return {}
    return answer if isinstance(answer, dict) else {}


def tokenized(options: OpenAIOptions, model: str, **text: Any) -> list[int] | None:
    """Return the ids that the server makes of a text by ``/tokenize`` (vLLM, SGLang, llama.cpp); None without it.

    ``text``: ``prompt`` or ``content``, as the server calls it, or a conversation's ``messages``.
    """
    found = asked(above(options), "/tokenize", {"model": model, **text}).get("tokens")
    # llama.cpp knows no conversations there and makes nothing of one
    return [int(token) for token in found] if isinstance(found, list) and found else None


def next_logprobs(options: OpenAIOptions, model: str, rows: Sequence[Sequence[int]], vocabulary: int) -> torch.Tensor:
    """Return log-probabilities of the token that follows each row, float32 [batch, 1, vocabulary].

    What the server does not list shares the probability that is left. Raises :class:`RunError` for an answer without
    log-probabilities, or whose tokens are not told by their ids.
    """
    body = {
        "model": model,
        "prompt": [list(row) for row in rows],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": vocabulary if options.top < 0 else options.top,
        "return_tokens_as_token_ids": True,
    }
    choices = request(options, "/completions", body).get("choices", ())
    if len(choices) != len(rows):
        raise RunError(f"{options.url} answered {len(choices)} of {len(rows)} prompts")
    ordered = sorted(choices, key=lambda choice: int(choice.get("index", 0)))
    return torch.stack([spread(listed(options, choice), vocabulary) for choice in ordered])[:, None]


def listed(options: OpenAIOptions, choice: Mapping[str, Any]) -> dict[int, float]:
    """Return the log-probabilities by token id that a choice lists for its first token."""
    found = ((choice.get("logprobs") or {}).get("top_logprobs") or [None])[0]
    if not found:
        raise RunError(f"{options.url} gives no log-probabilities: allow them (vllm serve --max-logprobs -1)")
    ids = {token: match for token in found if (match := TOKEN_ID.fullmatch(token))}
    if len(ids) < len(found):
        other = next(token for token in found if token not in ids)
        raise RunError(f"{options.url} names tokens by their text ({other!r}), expected token_id:NUMBER")
    return {int(match[1]): float(found[token]) for token, match in ids.items()}


def spread(known: Mapping[int, float], vocabulary: int) -> torch.Tensor:
    """Return log-probabilities [vocabulary], float32: those that are known, and the rest in equal shares.

    Raises :class:`RunError` for a token outside the vocabulary: the server serves another model.
    """
    if max(known) >= vocabulary:
        raise RunError(f"the server lists token {max(known)} of a vocabulary of {vocabulary}: it serves another model")
    values = torch.full((vocabulary,), -torch.inf, dtype=torch.float64)
    values[list(known)] = torch.tensor(list(known.values()), dtype=torch.float64)
    rest = max(1.0 - float(values.exp().sum()), 1e-12)
    others = values.isneginf()
    if bool(others.any()):
        values[others] = torch.tensor(rest / int(others.sum()), dtype=torch.float64).log()
    return values.float()

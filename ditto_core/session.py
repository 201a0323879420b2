"""The one protocol for everything that can be stepped: an engine, the eager reference, a recorded dump."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from ditto_core.sites import Tap

TapSink = Callable[[str, "torch.Tensor"], None]
"""Receives each tap of a step as ``(site, tensor)``. Copy a tensor to keep it past the session's next call."""


@dataclass(frozen=True)
class KernelProperty:
    """A property of an engine's kernels that makes them coarser than their dtype says, as a probe measured it.

    ``name``: ``TF32``, ``float16 accumulation``. ``ratio``: the probe's error over that of an ideal kernel of the
    dtype. ``phase``: ``prefill`` when only products of several rows have it, else ``both``. ``evidence``: the figures.
    """

    name: str
    ratio: float
    evidence: str
    phase: str = "both"


@dataclass(frozen=True)
class SessionInfo:
    """What a session is, for reports: ``label`` reads ``onnxruntime float32``; ``facts`` holds versions, GPU, TF32 …

    ``dtype`` is torch's name of what the engine computes in, or the name of a quantization such as ``int8``.
    ``kernels`` are measured properties that explain errors above the noise floor. ``recorded``: the tensors come from
    files, nothing runs. ``quantized``: weights or activations have fewer bits than ``dtype`` says, so the engine is
    judged by its logits; an engine whose ``dtype`` is the name of a quantization need not set it.
    """

    label: str
    backend: str
    dtype: str
    device: str = "cpu"
    model: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[KernelProperty, ...] = ()
    recorded: bool = False
    quantized: bool = False

    @property
    def judged_as(self) -> str:
        """The name by which bounds are chosen: the dtype, marked where a quantized engine has the name of a float."""
        return f"quantized {self.dtype}" if self.quantized and "float" in self.dtype else self.dtype

    def beside(self, reference: SessionInfo) -> SessionInfo:
        """Return the engine as it is judged beside a reference.

        Eager with the engine's own quantized weights differs by rounding only, which a noise floor measures: there a
        quantized engine is judged as one of floats.
        """
        if reference.backend != "eager" or not reference.quantized:
            return self
        dtype = "float32" if reference.dtype == "float64" else reference.dtype  # no engine computes in float64
        return replace(self, dtype=dtype, quantized=False)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SessionInfo:
        """Inverse of ``dataclasses.asdict``; a record without ``kernels`` has none. Raises ``TypeError`` for others."""
        for name in ("label", "backend", "dtype", "model"):
            if not isinstance(data.get(name, ""), str):
                raise TypeError(f"{name} of a session is {data[name]!r}, expected a text")
        return cls(**{**data, "kernels": tuple(KernelProperty(**kernel) for kernel in data.get("kernels", ()))})


class Session(Protocol):
    """A loaded engine, eager reference or recorded trace that can be stepped."""

    @property
    def info(self) -> SessionInfo:
        """What this session is."""
        ...

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What :meth:`step` delivers to its sink, in topological order."""
        ...

    def start(self, batch: int) -> None:
        """Begin a new sequence for ``batch`` rows: the KV cache becomes empty."""
        ...

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass, hand every tap to ``sink``, and return the final outputs.

        For a decoder, ``inputs`` are ``input_ids`` [batch, length], ``attention_mask`` [batch, past + length] and
        ``position_ids`` [batch, length], all int64; the session owns the KV cache, and the outputs hold
        ``logits`` [batch, length, vocab]. For any other model, the names are forward's parameters.
        Raises :class:`~ditto_core.errors.RunError` when the engine fails.
        """
        ...

    def close(self) -> None:
        """Release the engine."""
        ...


@runtime_checkable
class ShowsCache(Protocol):
    """A session whose KV cache can be read: a repro may then start at a tensor that is computed from the cache."""

    @property
    def past(self) -> Mapping[str, torch.Tensor]:
        """What the next step reads, by the names of the ONNX graph's inputs ``past_key_values.{i}.key|value``."""
        ...


@runtime_checkable
class Staged(Protocol):
    """A session whose steps are not all the same graph: an encoder runs in the first step alone."""

    @property
    def idle(self) -> frozenset[str]:
        """The sites among the taps that the last step did not compute."""
        ...


@runtime_checkable
class LacksTaps(Protocol):
    """A session that may lack taps of the engine for a known reason: what another tool did not dump."""

    @property
    def absent(self) -> frozenset[str]:
        """The sites that it never had. They are counted in a note; they do not fail the comparison."""
        ...


Pass = tuple[tuple[int, int], ...]
"""A forward pass of a server: for each row the tokens that were computed before, and those that it computes."""


@runtime_checkable
class ShowsPasses(Protocol):
    """A session of a server that cuts, joins and skips tokens by itself, and tells in which passes it computed them."""

    @property
    def passes(self) -> Sequence[Pass]:
        """The passes since :meth:`Session.start`. Equal ones run the same kernels on the same shapes."""
        ...


@runtime_checkable
class ScoresPrompts(Protocol):
    """A session of a server that gives log-probabilities of a prompt's own tokens."""

    def prompt_logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Return what the server gives for the token behind each prefix, float32 [length - 1, vocabulary]."""
        ...


@runtime_checkable
class RunsRanks(Protocol):
    """A session of several ranks, some of whose tensors every rank holds."""

    @property
    def disagreements(self) -> Mapping[str, str]:
        """The sites at which a rank has another tensor than the others, and how far off it is, in the order of the
        sequence."""
        ...


@runtime_checkable
class ReadsInputs(Protocol):
    """A session of a server that reads prompts and the model's configuration by itself."""

    def tokens(self, text: str) -> Sequence[int] | None:
        """Return the ids that the server makes of a text, None where it does not tell."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int] | None:
        """Return the ids that the server makes of a conversation, None where it has no template or does not tell."""
        ...

    def settings(self) -> Mapping[str, object]:
        """Return what the server took from the model's configuration, by the names that it has there."""
        ...

    def generation(self) -> Mapping[str, object] | None:
        """Return how the server samples unless a request says otherwise, by the names of transformers' generation
        configuration, without neutral values; None where it does not tell."""
        ...


@runtime_checkable
class TellsPositions(Protocol):
    """A session of a server that counts the tokens' positions by itself."""

    @property
    def other_positions(self) -> str:
        """Where its positions first were not the caller's since :meth:`Session.start`, in words; else empty."""
        ...


@runtime_checkable
class HoldsWeights(Protocol):
    """A session that can tell what weights its engine holds."""

    def weights(self) -> Mapping[str, tuple[int, int]]:
        """Return the :func:`~ditto_core.system.fingerprint.checksum` of each weight, in the engine's dtype, by its
        name in the model; those that the engine keeps in a form of its own are left out."""
        ...


@dataclass(frozen=True)
class Trail:
    """How a server computed a request since it was begun, or begun anew after it had lost its place to another.

    ``kept``: how many new tokens it had then. ``passes``: each with the request's row in it. Equal trails run the same
    kernels on the same shapes.
    """

    kept: int = 0
    passes: tuple[tuple[int, Pass], ...] = ()


@runtime_checkable
class TakesRequests(Protocol):
    """A server that is given requests one by one and schedules them by itself, each with the tokens that it chooses."""

    @property
    def info(self) -> SessionInfo:
        """What this server is."""
        ...

    @property
    def preempted(self) -> int:
        """How often a request lost its place to another since :meth:`forget`."""
        ...

    def submit(self, ids: Sequence[int], new_tokens: int) -> str:
        """Send a request for ``new_tokens`` greedy tokens and return its name."""
        ...

    def step(self) -> bool:
        """Run one pass; tell whether any request is left."""
        ...

    def abort(self, name: str) -> None:
        """End a request."""
        ...

    def logits(self, name: str) -> torch.Tensor:
        """Return what was computed of a request so far, float32 [new tokens, vocabulary]."""
        ...

    def trail(self, name: str) -> Trail:
        """Return how it was computed."""
        ...

    def forget(self) -> None:
        """End all requests and empty the cache of prefixes."""
        ...

    def close(self) -> None:
        """Release the engine."""
        ...

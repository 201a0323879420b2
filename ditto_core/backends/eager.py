"""The eager model as a session: every site is delivered as soon as its module has computed it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ditto_core.backends.cancellation import watching
from ditto_core.backends.rounding import OtherRounding
from ditto_core.errors import RunError, first_line
from ditto_core.model.buffers import Buffers
from ditto_core.model.forward import Forward
from ditto_core.model.loading import LoadedModel
from ditto_core.model.placing import placed
from ditto_core.model.recorder import Recorder
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap, is_operator
from ditto_core.system.ieee import exact_float32

HIGHER = {"float16": "float32", "bfloat16": "float32", "float32": "float64", "float64": "float64"}


class EagerSession:
    """A loaded model stepped by its own forward, with the KV cache that transformers gives it.

    ``taps`` limits what is delivered; sites that the model does not reach are simply not delivered, and the
    comparison counts them as missing. ``sample``: products are rounded in another way, which the number draws; 0
    for the kernels' own.
    """

    def __init__(
        self, model: LoadedModel, taps: tuple[Tap, ...], *, dtype: str = "float32", device: str = "cpu", sample: int = 0
    ) -> None:
        self.module = placed(model.module, getattr(torch, dtype), device)
        self._buffers = Buffers(self.module)
        self._forward = Forward(self.module, decoder=model.decoder, staged=model.staged)
        self._device = torch.device(device)
        self._sample = sample
        self.taps = taps
        self._sites = {name: tap.site for tap in reversed(taps) for name in cheapest(tap)}
        self._recorder = Recorder(self.module, self._deliver, self._sites)
        self._delivered: set[str] = set()
        self._sink: TapSink | None = None
        facts = {"torch": torch.__version__, "device": device_name(self._device)}
        self.info = SessionInfo(f"eager {dtype}", "eager", dtype, device, model.label, facts)

    def start(self, batch: int) -> None:
        """Empty the KV cache."""
        self._forward.start()

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass; see :class:`~ditto_core.backends.base.Session`."""
        self._delivered.clear()
        self._sink = sink
        inputs = {name: tensor.to(self._device) for name, tensor in inputs.items()}
        rounding = OtherRounding(self._sample) if self._sample else nullcontext()
        recording, kept = self._recorder.recording(), self._buffers.kept()
        with torch.inference_mode(), exact_float32(), widened(self.info.dtype), kept, rounding, recording:
            try:
                return {name: self._buffers.own(tensor) for name, tensor in self._forward(inputs).items()}
            except (RuntimeError, TypeError, IndexError) as error:
                raise RunError(f"eager {self.info.dtype} model failed: {first_line(error)}") from error

    def _deliver(self, name: str, tensor: torch.Tensor, _: Any) -> None:
        """Hand a tap to the sink."""
        site = self._sites.get(name)
        carried = tensor is self._forward.encoded  # it is handed in, no module computed it in this step
        if site is not None and site not in self._delivered and not carried and self._sink is not None:
            self._delivered.add(site)  # its other names are the same tensor
            with torch._C.DisableTorchFunction():  # a comparison is not the model's own code
                self._sink(site, tensor)

    def conditioning(self, sites: Collection[str]) -> AbstractContextManager[dict[str, float]]:
        """Enter a context that yields the condition of those sites that a linear layer or convolution computes, filled
        as the session is stepped; see :func:`~ditto_core.backends.cancellation.watching`."""
        return watching(self.module, {name: site for name, site in self._sites.items() if site in sites})

    def close(self) -> None:
        """Forget the cache."""
        self._forward.cache = None


def cheapest(tap: Tap) -> Sequence[str]:
    """Return the names by which a tap is read: no operator's where a module has it, for that takes a look at all."""
    names = (*tap.aliases, tap.site)
    return [name for name in names if not is_operator(name)] or names


def wider(value: Any) -> Any:
    """Replace float32 by float64."""
    return torch.float64 if value is torch.float32 else value


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def widened(dtype: str) -> AbstractContextManager[Any]:
    """Return the mode that a model of this dtype runs in: only float64 needs widening."""
    return Widen() if dtype == "float64" else nullcontext()


class Widen(TorchFunctionMode):
    """Lets a float64 model be float64 throughout: norms and softmax that ask for float32 by name get float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``; where it asks for float32 it gets float64."""
        if func is torch.Tensor.float:
            return torch.Tensor.to(args[0], torch.float64)
        if func in (torch.tensor, torch.full) and args and isinstance(args[-1], float):
            kwargs = {"dtype": torch.float64, **(kwargs or {})}  # the lowest float64 does not fit what is the default
        return func(*map(wider, args), **{k: wider(v) for k, v in (kwargs or {}).items()})

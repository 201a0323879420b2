"""Teacher-forced replay: the eager model, with its tensors replaced by those that the engine exposes.

One forward pass of the real module. At each site the module's own value is handed out, then the engine's value goes on
in its stead. So what is computed between two sites starts from the engine's own tensors, and the difference at a site
is the error that the engine adds right there: inside a module, in a residual addition, in the rotary embedding, in the
attention, in the KV cache. The exported graph takes no part, so a fault of the export shows too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from ditto_core.backends.eager import widened
from ditto_core.compare.masks import as_masks, is_mask
from ditto_core.errors import RunError, first_line
from ditto_core.model import states
from ditto_core.model.buffers import Buffers
from ditto_core.model.forward import Forward
from ditto_core.model.loading import LoadedModel
from ditto_core.model.placing import placed
from ditto_core.model.recorder import Recorder, named_by_code
from ditto_core.model.tape import Tape
from ditto_core.sites import Tap, final_site, is_operator
from ditto_core.system.ieee import exact_float32

OnValue = Callable[[Tap, torch.Tensor], None]
"""Receives a tap and what the replay computes there from the engine's tensors upstream; keep it only as a copy."""


class Replay:
    """Steps the eager model on an engine's captured tensors.

    The weights are those of the engine's dtype: rounding them is not the engine's error. ``dtype`` is the dtype of
    the arithmetic: the next higher one for the truth, the engine's own for the noise floor.
    """

    def __init__(self, model: LoadedModel, taps: tuple[Tap, ...], *, engine_dtype: str, dtype: str) -> None:
        self.module = placed(model.module, getattr(torch, dtype), via=getattr(torch, engine_dtype))
        self._buffers = Buffers(self.module)
        self._forward = Forward(self.module, decoder=model.decoder, staged=model.staged)
        self.dtype = dtype
        self._taps = {name: tap for tap in taps for name in (tap.site, *tap.aliases)}
        self._caches = [(tap, name) for tap in taps if (name := states.state_of(tap.value))]
        tensors = (*self.module.parameters(), *self.module.buffers())
        self._own = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def start(self) -> None:
        """Empty the KV cache."""
        self._forward.start()

    def step(
        self,
        inputs: Mapping[str, torch.Tensor],
        captured: Mapping[str, torch.Tensor],
        on_value: OnValue,
        tape: Tape | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run one step on what the engine ``captured``, by site; return the final outputs.

        Afterwards the KV cache is the engine's, as far as the engine shows it. ``tape`` records what is computed.
        Raises :class:`RunError` when the module fails on the engine's tensors.
        """
        forced = Forced(self._taps, captured, self._own, on_value, tape)
        recorder = Recorder(self.module, forced.visit, self._taps)
        recorded, kept = nullcontext() if tape is None else tape, self._buffers.kept()
        with torch.inference_mode(), exact_float32(), kept, recorded, widened(self.dtype), recorder.recording():
            try:
                outputs = {name: self._buffers.own(tensor) for name, tensor in self._forward(inputs).items()}
            except (RuntimeError, TypeError, IndexError) as error:
                raise RunError(f"replay of the engine's tensors failed: {first_line(error)}") from error
        forced.finish(outputs)
        self._adopt(captured)
        return outputs

    def names(self, inputs: Mapping[str, torch.Tensor]) -> dict[int, str]:
        """Return the names of weights, inputs and cached tensors by address: what the next step starts from."""
        past = states.items(self._forward.cache) if self._forward.cache is not None else ()
        named = [(f"past.{name}", tensor) for name, tensor in past]
        named += [(f"input {name}", tensor) for name, tensor in inputs.items()]
        named += [*self.module.named_buffers(), *self.module.named_parameters()]
        return {tensor.data_ptr(): name for name, tensor in named if tensor.numel()}

    def _adopt(self, captured: Mapping[str, torch.Tensor]) -> None:
        held = dict(states.items(self._forward.cache)) if self._caches else {}
        for tap, name in self._caches:
            if tap.site in captured:
                own = held[name]
                states.put(self._forward.cache, name, captured[tap.site].to(own.device, own.dtype, copy=True))


class Forced:
    """What one step puts in the place of the module's own tensors. A tap is compared once, at its first site.

    A tensor that passes a module boundary is overwritten, so that whoever else holds it (a residual branch, the next
    layer) goes on with the engine's values too; one that cannot be, and one that the code names itself, is replaced.
    """

    def __init__(
        self,
        taps: Mapping[str, Tap],
        captured: Mapping[str, torch.Tensor],
        own: Collection[int],
        on_value: OnValue,
        tape: Tape | None = None,
    ) -> None:
        self._tape = tape
        self._taps = taps
        self._captured = captured
        self._own = own
        self._on_value = on_value
        self._done: set[str] = set()

    def visit(self, site: str, tensor: torch.Tensor, _: Any) -> torch.Tensor | None:
        """Hand the module's value out and put the engine's in its place, where the engine shows one."""
        if self._tape is None or self._tape.ended:
            return self._force(site, tensor, None)
        with self._tape.paused():
            return self._force(site, tensor, self._tape)

    def _force(self, site: str, tensor: torch.Tensor, tape: Tape | None) -> torch.Tensor | None:
        tap = self._taps.get(site)
        if tap is None or tap.site in self._done or not tensor.is_floating_point():
            return None
        actual = self._captured.get(tap.site)
        if actual is None or actual.shape != tensor.shape:
            return None
        self._done.add(tap.site)
        self._on_value(tap, tensor)
        origin = None if tape is None else tape.ref(tensor)
        put, shown = self._put(site, tensor, actual)
        if tape is not None and origin is not None:
            value = tensor.clone() if shown is None else shown.to(tensor.device, tensor.dtype)
            tape.force(tap.site, origin, tensor if put is None else put, value)
        return put

    def _put(
        self, site: str, tensor: torch.Tensor, actual: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what takes the tensor's place, None for itself; and the engine's tensor, None where it is kept."""
        # The same mask in other numbers (-inf for the most negative one) is kept as the model writes it: a row that
        # becomes NaN through the engine's form must differ from the replay.
        if is_mask(tensor) and torch.equal(*as_masks(actual.to(tensor.device), tensor)):
            return None, None
        if (named_by_code(site) and not is_operator(site)) or not self._writable(tensor):
            return actual.to(tensor.device, tensor.dtype, copy=True), actual
        tensor.copy_(actual)
        return None, actual

    def finish(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Hand out the final outputs that no module returned: what the model's own code computes behind the last."""
        values = {tap.value: tap for tap in self._taps.values()}
        for name, tensor in outputs.items():
            tap = values.get(name) or self._taps.get(final_site(name, self._taps))
            if tap is None or tap.site in self._done or tap.value != name or not tensor.is_floating_point():
                continue
            actual = self._captured.get(tap.site)
            if actual is not None and actual.shape == tensor.shape:
                self._done.add(tap.site)
                self._on_value(tap, tensor)
                if self._tape is not None and not self._tape.ended:
                    self._tape.force(tap.site, self._tape.ref(tensor), tensor, None)

    def _writable(self, tensor: torch.Tensor) -> bool:
        """Tell whether overwriting is safe: no weight, and no element that stands for several."""
        expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return not expanded and tensor.untyped_storage().data_ptr() not in self._own

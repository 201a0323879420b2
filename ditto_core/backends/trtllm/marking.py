"""Outputs of the network that is being built: each under its name, copied by an identity layer.

So a tensor that is an output already keeps its name and role.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ditto_core.errors import BuildError
from ditto_core.sites import matches

if TYPE_CHECKING:
    from ditto_core.backends.trtllm.plan import Report

OURS = "ditto/"
LINE_NUMBER = re.compile(r"_L(\d+)(?=/|$)")
PAIR_FUSIONS = ("reduce_fusion", "norm_quant_fusion")
FUSED_MLP = "fused_fc"
FUSED_REASON = f"gate_proj and up_proj are one ({FUSED_MLP}): build with use_fused_mlp off"


@dataclass(frozen=True)
class Seen:
    """A tensor that passed a module's output, or its input, while the model was traced.

    ``listed``: the module is a list of modules, whose output is its last one's.
    """

    name: str
    sites: tuple[str, ...]
    tensor: Any
    listed: bool = False

    def matches(self, selector: str) -> bool:
        """Tell whether a selector means it, by TensorRT-LLM's name or by Hugging Face's. No glob means a list."""
        if self.listed:
            return selector == self.name
        return any(matches(selector, name) for name in (self.name, *self.sites))


class Marker:
    """Makes tensors outputs of one network."""

    def __init__(
        self, network: Any, report: Report, registered: Mapping[str, Any], marked: bool = False, dtype: str = ""
    ) -> None:
        """``marked``: the build itself marks what is ``registered``, after us, in ``dtype`` (empty: the tensor's)."""
        self._network = network
        self._trt = network.trt_network
        self._report = report
        self._registered = registered
        self._marked = set(registered) if marked else set()
        self._dtype = dtype
        self._fused = [n for n in PAIR_FUSIONS if getattr(network.plugin_config, n, False)]
        self.layers = {layer.name: layer for layer in (self._trt.get_layer(i) for i in range(self._trt.num_layers))}
        self._taken = {t.name for t in (self._trt.get_output(i) for i in range(self._trt.num_outputs))}
        self._taken |= {t.name for t in (self._trt.get_input(i) for i in range(self._trt.num_inputs))}
        self._taken |= self._marked

    def resolve(self, name: str, alias: str, seen: list[Seen]) -> bool:
        """Mark what a name means: modules and sites first, then registered outputs, then layers. False when nothing."""
        hits = [tensor for tensor in seen if tensor.matches(name)]
        if hits:
            for tensor, chosen in zip(hits, aliases(alias, len(hits)), strict=True):
                self._mark_module(tensor, chosen or tensor.name, name)
            return True
        if name in self._registered:
            if name in self._marked and alias in ("", name):
                self._list(name, [name])
            else:
                self.add(alias or name, self._registered[name].trt_tensor, name, name)
            return True
        layer = self._layer(name)
        if layer is None:
            return False
        tensors = [layer.get_output(i) for i in range(layer.num_outputs)]
        for tensor, chosen in zip(tensors, aliases(alias or name, len(tensors)), strict=True):
            self.add(chosen, tensor, layer.name, name)
        return True

    def _mark_module(self, seen: Seen, name: str, request: str) -> None:
        if self._fused and re.search(r"layers\.\d+(\.attention|\.mlp)?$", seen.name):
            self._report.refused[seen.name] = f"{self._fused[0]} makes it a pair (hidden, residual): build without it"
        elif seen.name.endswith(FUSED_MLP):
            self._report.refused[seen.name] = FUSED_REASON
        elif name in self._report.outputs and self._report.outputs[name]["source"] == seen.name:
            self._report.outputs[name]["requests"].append(request)
        else:
            self.add(name, seen.tensor.trt_tensor, seen.name, request)

    def _layer(self, name: str) -> Any:
        """Return a layer by its name; source line numbers in it, which differ by version, need not fit.

        Of several the one counts with which most of the numbers agree. Raises :class:`BuildError` when that is no one.
        """
        if name in self.layers:
            return self.layers[name]
        bare = LINE_NUMBER.sub("", name)
        hits = [known for known in self.layers if LINE_NUMBER.sub("", known) == bare]
        ranked = sorted(hits, key=lambda known: -agreeing(name, known))
        if len(ranked) > 1 and agreeing(name, ranked[0]) == agreeing(name, ranked[1]):
            listed = "".join(f"\n  {known}" for known in ranked)
            raise BuildError(
                f"layer {name!r} fits {len(ranked)} layers equally well but for line numbers, name one:{listed}"
            )
        return self.layers[ranked[0]] if ranked else None

    def list_registered(self) -> None:
        """Put into the report what the build marks by itself and nobody asked for."""
        for name in self._registered:
            if name in self._marked and name not in self._report.outputs:
                self._list(name, [])

    def _list(self, name: str, requests: list[str]) -> None:
        tensor = self._registered[name].trt_tensor
        shape = [int(size) for size in tensor.shape]
        dtype = self._dtype or tensor.dtype.name
        self._report.outputs[name] = {"source": name, "dtype": dtype, "shape": shape, "requests": requests}

    def add(self, name: str, tensor: Any, source: str, request: str) -> None:
        """Mark a tensor under a name through an identity layer, so that it keeps its own name and role."""
        if name in self._taken:
            raise BuildError(f"{name!r} is already the name of an input or output of the network, choose another alias")
        layer = self._trt.add_identity(tensor)
        if layer is None:
            self._report.refused[source] = f"TensorRT cannot copy a tensor of dtype {tensor.dtype.name}"
            return
        layer.name = OURS + name
        output = layer.get_output(0)
        output.name = name
        if not self._network.strongly_typed:
            output.dtype = tensor.dtype
        self._trt.mark_output(output)
        self._taken.add(name)
        shape = [int(size) for size in output.shape]
        found = {"source": source, "dtype": output.dtype.name, "shape": shape, "requests": [request]}
        self._report.outputs[name] = found


def agreeing(one: str, other: str) -> int:
    """Return how many source line numbers of two names, place by place, are the same."""
    pairs = zip(LINE_NUMBER.findall(one), LINE_NUMBER.findall(other), strict=True)
    return sum(a == b for a, b in pairs)


def aliases(alias: str, count: int) -> list[str]:
    """Return the names of ``count`` tensors that share an alias: the alias itself, or ``alias_0``, ``alias_1`` …"""
    if count == 1 or not alias:
        return [alias] * count
    return [f"{alias}_{i}" for i in range(count)]

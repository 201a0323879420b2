"""OpenVINO on the CPU, from the same ONNX file as ONNX Runtime: taps are further outputs of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ditto_core.backends.base import BuildReport, BuildRequest
from ditto_core.backends.onnx_file import write_tapped
from ditto_core.backends.openvino_precision import coarse, hint
from ditto_core.backends.outputs_file import read_outputs, write_outputs
from ditto_core.backends.registry import import_package
from ditto_core.errors import BackendError, BuildError, RunError, UsageError, first_line, nearest
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

ENGINE_FILE = "engine.onnx"
OPTIONS = ("threads", "config")
BITS = {"bf16": torch.bfloat16}
"""Types that numpy lacks: OpenVINO gives their bits."""


class OpenVinoBackend:
    """Builds an ONNX file that OpenVINO compiles when it is opened. Options: ``threads`` (default 1), ``config`` (a
    table of OpenVINO's properties of the CPU, such as ``INFERENCE_PRECISION_HINT``)."""

    name = "openvino"
    dtypes = ("float32", "float16", "bfloat16")

    def check(self, spec: EngineSpec) -> None:
        """Raise when openvino is missing, lacks the dtype, or an option is unknown."""
        load_library()
        if spec.dtype not in self.dtypes:
            raise BackendError(f"openvino is driven in {', '.join(self.dtypes)} only, got {spec.dtype}")
        for name, _ in spec.options:
            if name not in OPTIONS:
                known = ", ".join(OPTIONS)
                raise UsageError(f"openvino has no option {name!r}{nearest(name, OPTIONS)} (known: {known})")
        configuration(load_library(), spec)

    def versions(self) -> dict[str, str]:
        """OpenVINO compiles when it loads a file, so its version decides the bits."""
        return {"openvino": load_library().__version__}

    def build(self, request: BuildRequest) -> BuildReport:
        """Write the graph with the taps as outputs; the weights are linked, not copied."""
        write_tapped(request, request.directory / ENGINE_FILE)
        write_outputs(request.directory, request.outputs)
        return BuildReport(request.taps)

    def graph_file(self, directory: Path) -> Path:
        """Return the file that OpenVINO compiles."""
        return directory / ENGINE_FILE

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> OpenVinoSession:
        """Compile the engine. Raises :class:`BuildError` when OpenVINO refuses the graph."""
        return OpenVinoSession(spec, directory, taps)


def load_library() -> Any:
    """Import openvino, or say how to get it."""
    return import_package("openvino")


def configuration(library: Any, spec: EngineSpec) -> dict[str, str]:
    """Return OpenVINO's properties of an engine: the spec's dtype and threads, and the user's table over them.

    Raises :class:`UsageError` when the option is no table or has a property that the CPU does not.
    """
    given = spec.table("config")
    core = library.Core()
    known = core.get_property("CPU", "SUPPORTED_PROPERTIES")
    for name in given:
        if name not in known:
            raise UsageError(f"openvino's CPU has no property {name!r}{nearest(name, known)}")
    threads = str(spec.threads())
    own = {"INFERENCE_PRECISION_HINT": hint(core, spec.dtype), "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": threads}
    return own | given


class OpenVinoSession:
    """One compiled model, and the KV cache of the sequence that it is stepping."""

    def __init__(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...], file: str = ENGINE_FILE) -> None:
        library = load_library()
        # Without a hint, float32 graphs are computed in bfloat16 on processors that have it.
        config = configuration(library, spec)
        try:
            compiled = library.Core().compile_model(str(directory / file), "CPU", config)
        except RuntimeError as error:
            raise BuildError(f"openvino refuses the engine: {first_line(error)}") from error
        self._tensor = library.Tensor
        self.taps = taps
        self._shape = library.PartialShape
        self._request = compiled.create_infer_request()
        self._inputs = {name: port for port in compiled.inputs for name in port.get_names()}
        self._outputs = {name: index for index, port in enumerate(compiled.outputs) for name in port.get_names()}
        self._finals = read_outputs(directory, self._outputs, taps)
        self._past: dict[str, torch.Tensor] = {}
        precision = str(compiled.get_property("INFERENCE_PRECISION_HINT").to_string())
        facts = {"openvino": library.__version__, "precision": precision}
        label = f"openvino {spec.dtype}"
        kernels = coarse(spec.dtype, tuple(sorted(config.items())))
        self.info = SessionInfo(label, "openvino", spec.dtype, "cpu", spec.model.label, facts, kernels)

    @property
    def past(self) -> Mapping[str, torch.Tensor]:
        """The KV cache that the next step reads, by the names of the graph's inputs."""
        return self._past

    def start(self, batch: int) -> None:
        """Give every layer an empty past [batch, kv_head, 0, head_dim], or zeros where a state has a fixed size."""
        for name, port in self._inputs.items():
            if name.startswith("past_key_values."):
                _, *sizes = port.get_partial_shape()
                shape = batch, *(size.get_length() if size.is_static else 0 for size in sizes)
                self._past[name] = torch.zeros(shape, dtype=dtype_of(port))

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass; see :class:`~ditto_core.session.Session`."""
        feed = {name: tensor.detach().cpu() for name, tensor in inputs.items() if name in self._inputs}
        feed |= self._past
        self._check(feed)
        try:
            self._request.infer({name: self._given(name, tensor) for name, tensor in feed.items()}, share_inputs=False)
        except (RuntimeError, TypeError, ValueError) as error:
            raise RunError(f"openvino failed: {first_line(error)}") from error
        for name in self._past:
            self._past[name] = self._value(name.replace("past_key_values", "present"))
        for tap in self.taps:
            sink(tap.site, self._value(tap.value))
        return {name: self._value(name) for name in self._finals}

    def _given(self, name: str, tensor: torch.Tensor) -> Any:
        """Return an input for OpenVINO, in the dtype of its port."""
        port = self._inputs[name]
        cast = tensor.to(dtype_of(port)).contiguous()
        if cast.dtype not in BITS.values():
            return cast.numpy()
        if not cast.numel():
            return self._tensor(port.get_element_type(), list(cast.shape))
        return self._tensor(cast.view(torch.int16).numpy(), list(cast.shape), port.get_element_type())

    def _value(self, name: str) -> torch.Tensor:
        """Return a copy of an output."""
        tensor = self._request.get_output_tensor(self._outputs[name])
        kind = BITS.get(tensor.get_element_type().get_type_name())
        if kind is None:
            return torch.from_numpy(tensor.data.copy())
        return torch.from_numpy(tensor.data.view(np.int16).copy()).view(kind)

    def _check(self, feed: Mapping[str, Any]) -> None:
        """Refuse what OpenVINO runs: for a missing input the last step's, for one of another rank anything."""
        for name, port in self._inputs.items():
            if name not in feed:
                raise RunError(f"openvino failed: input {name!r} is not given")
            expected = port.get_partial_shape()
            if not expected.compatible(self._shape(list(feed[name].shape))):
                raise RunError(f"openvino failed: input {name!r} is {list(feed[name].shape)}, expected {expected}")

    def close(self) -> None:
        """Release the engine."""
        self._past.clear()
        del self._request


def dtype_of(port: Any) -> torch.dtype:
    """Return torch's dtype of an input."""
    kind = port.get_element_type()
    return BITS.get(kind.get_type_name()) or torch.from_numpy(np.zeros(0, kind.to_dtype())).dtype

"""OpenVINO on the CPU, from the same ONNX file as ONNX Runtime: taps are further outputs of the graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ditto_core.backends.base import BuildReport, BuildRequest
from ditto_core.backends.onnx_file import write_tapped
from ditto_core.errors import BackendError, BuildError, RunError, UsageError, first_line, nearest
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

ENGINE_FILE = "engine.onnx"
SESSION_FILE = "session.json"
OPTIONS = ("threads",)


class OpenVinoBackend:
    """Builds an ONNX file that OpenVINO compiles when it is opened. Option: ``threads`` (default 1)."""

    name = "openvino"
    dtypes = ("float32",)

    def check(self, spec: EngineSpec) -> None:
        """Raise when openvino is missing, lacks the dtype, or an option is unknown."""
        load_library()
        if spec.dtype not in self.dtypes:
            raise BackendError(f"openvino is driven in {', '.join(self.dtypes)} only, got {spec.dtype}")
        for name, _ in spec.options:
            if name not in OPTIONS:
                known = ", ".join(OPTIONS)
                raise UsageError(f"openvino has no option {name!r}{nearest(name, OPTIONS)} (known: {known})")

    def versions(self) -> dict[str, str]:
        """OpenVINO compiles when it loads a file, so its version decides the bits."""
        return {"openvino": load_library().__version__}

    def build(self, request: BuildRequest) -> BuildReport:
        """Write the graph with the taps as outputs; the weights are linked, not copied."""
        write_tapped(request, request.directory / ENGINE_FILE)
        (request.directory / SESSION_FILE).write_text(json.dumps({"outputs": request.outputs}))
        return BuildReport(request.taps)

    def graph_file(self, directory: Path) -> Path:
        """Return the file that OpenVINO compiles."""
        return directory / ENGINE_FILE

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> OpenVinoSession:
        """Compile the engine. Raises :class:`BuildError` when OpenVINO refuses the graph."""
        return OpenVinoSession(spec, directory, taps)


def load_library() -> Any:
    """Import openvino, or say how to get it."""
    try:
        import openvino
    except ImportError as error:
        raise BackendError("openvino is not installed: pip install 'pytest-ditto-engine[openvino]'") from error
    return openvino


class OpenVinoSession:
    """One compiled model, and the KV cache of the sequence that it is stepping."""

    def __init__(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> None:
        library = load_library()
        # Without the hint, float32 graphs are computed in bfloat16 on processors that have it.
        threads = int(spec.option("threads", 1))
        config = {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": threads}
        try:
            compiled = library.Core().compile_model(str(directory / ENGINE_FILE), "CPU", config)
        except RuntimeError as error:
            raise BuildError(f"openvino refuses the engine: {first_line(error)}") from error
        self.taps = taps
        self._shape = library.PartialShape
        self._request = compiled.create_infer_request()
        self._inputs = {name: port for port in compiled.inputs for name in port.get_names()}
        self._outputs = {name: index for index, port in enumerate(compiled.outputs) for name in port.get_names()}
        self._finals: list[str] = json.loads((directory / SESSION_FILE).read_text())["outputs"]
        self._past: dict[str, Any] = {}
        facts = {
            "openvino": library.__version__,
            "precision": str(compiled.get_property("INFERENCE_PRECISION_HINT").to_string()),
        }
        self.info = SessionInfo(f"openvino {spec.dtype}", "openvino", spec.dtype, "cpu", spec.model.label, facts)

    @property
    def past(self) -> dict[str, torch.Tensor]:
        """The KV cache that the next step reads, by the names of the graph's inputs."""
        return {name: torch.from_numpy(value) for name, value in self._past.items()}

    def start(self, batch: int) -> None:
        """Give every layer an empty past [batch, kv_head, 0, head_dim], or zeros where a state has a fixed size."""
        for name, port in self._inputs.items():
            if name.startswith("past_key_values."):
                _, *sizes = port.get_partial_shape()
                shape = batch, *(size.get_length() if size.is_static else 0 for size in sizes)
                self._past[name] = np.zeros(shape, port.get_element_type().to_dtype())

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass; see :class:`~ditto_core.session.Session`."""
        feed = {name: tensor.detach().cpu().numpy() for name, tensor in inputs.items() if name in self._inputs}
        feed |= self._past
        self._check(feed)
        try:
            values = self._request.infer(feed, share_inputs=False, share_outputs=False)
        except (RuntimeError, TypeError, ValueError) as error:
            raise RunError(f"openvino failed: {first_line(error)}") from error
        for name in self._past:
            self._past[name] = values[self._outputs[name.replace("past_key_values", "present")]]
        for tap in self.taps:
            sink(tap.site, torch.from_numpy(values[self._outputs[tap.value]]))
        return {name: torch.from_numpy(values[self._outputs[name]]) for name in self._finals}

    def _check(self, feed: Mapping[str, Any]) -> None:
        """Refuse what OpenVINO runs: for a missing input the last step's, for one of another rank anything."""
        for name, port in self._inputs.items():
            if name not in feed:
                raise RunError(f"openvino failed: input {name!r} is not given")
            expected = port.get_partial_shape()
            if not expected.compatible(self._shape(feed[name].shape)):
                raise RunError(f"openvino failed: input {name!r} is {feed[name].shape}, expected {expected}")

    def close(self) -> None:
        """Release the engine."""
        self._past.clear()
        del self._request

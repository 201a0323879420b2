"""What a backend that builds from the ONNX file needs: taps as outputs, and the weights beside it."""

from __future__ import annotations

from pathlib import Path

import onnx

from ditto_core.backends.base import BuildRequest
from ditto_core.graphs.files import place_weights, read_graph
from ditto_core.graphs.outputs import add_outputs


def write_tapped(request: BuildRequest, path: Path, *, copy: bool = False) -> onnx.ModelProto:
    """Write the request's graph with its taps as further outputs, and return it without its weights.

    The weights files are linked beside ``path`` where the disk allows; ``copy`` makes files of their own.
    """
    model = read_graph(request.onnx_path)
    add_outputs(model, [tap.value for tap in request.taps])
    place_weights(model, request.onnx_path.parent, path.parent, copy=copy)
    onnx.save(model, str(path))
    return model

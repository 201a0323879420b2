"""What a backend that builds from the ONNX file needs: taps as outputs, and the weights beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx

from ditto_core.backends.base import BuildRequest
from ditto_core.cache import link_or_copy
from ditto_core.graphs.files import add_outputs, read_graph


def write_tapped(
    request: BuildRequest, path: Path, place: Callable[[Path, Path], object] = link_or_copy
) -> onnx.ModelProto:
    """Write the request's graph with its taps as further outputs, and return it without its weights.

    ``place(source, target)`` puts each weight file beside ``path``; by default it is linked where the disk allows.
    """
    model = read_graph(request.onnx_path)
    add_outputs(model, [tap.value for tap in request.taps])
    for data in request.onnx_path.parent.glob("*.onnx.data"):
        place(data, path.parent / data.name)
    onnx.save(model, str(path))
    return model

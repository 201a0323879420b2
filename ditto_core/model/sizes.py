"""Which dimensions of an exported graph have one size only; those that the exporter suspects are tried."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

Sizes = Mapping[tuple[str, int], int]
"""Sizes of inputs' dimensions, by input and index."""


def frozen_sizes(
    path: Path, settled: Sizes, names: Mapping[str, Mapping[int, str]], examples: Mapping[str, torch.Tensor]
) -> Sizes:
    """Return those of ``settled`` at which the graph in ``path`` fails with another size, tried in ONNX Runtime.

    ``names`` are the dimensions' names by input and index: those of one name change together. Nothing is frozen where
    the graph does not run at the sizes of ``examples`` either, or ONNX Runtime is not installed.
    """
    run = runner(path)
    if run is None or not run(examples):
        return {}
    frozen: dict[tuple[str, int], int] = {}
    for name in {names[given][index] for given, index in settled}:
        alike = [(given, index) for given, found in names.items() for index in found if found[index] == name]
        if not run(longer(examples, alike)):
            frozen |= {place: settled[place] for place in alike if place in settled}
    return frozen


def longer(examples: Mapping[str, torch.Tensor], places: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
    """Return the examples with one more of what comes last, in dimensions of inputs."""
    made = dict(examples)
    for name, index in places:
        made[name] = torch.cat([made[name], made[name].narrow(index, made[name].shape[index] - 1, 1)], index)
    return made


def runner(path: Path) -> Any:
    """Return a function that tells whether a graph runs on inputs by name; None without ONNX Runtime."""
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # Whether a graph runs does not hang on it, and optimizing a float16 GRU in full can end the process.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - it may raise anything for a graph that it cannot take
        return None

    def run(inputs: Mapping[str, torch.Tensor]) -> bool:
        try:
            session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        except Exception:  # noqa: BLE001 - likewise
            return False
        return True

    return run

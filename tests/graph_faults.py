"""Faults put into the ONNX file of a built engine: the engine that then runs is a real one that computes wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ditto_core.backends.onnxruntime import OnnxRuntimeSession
from ditto_core.engines.engine import Engine

Edit = Callable[[onnx.ModelProto], None]
MASK = "model.layers.0:in.attention_mask"


def faulty_engine(engine: Engine, directory: Path, edit: Edit) -> Engine:
    """Copy an engine and edit its graph."""
    copy = engine.copy_to(directory)
    path = directory / "engine.onnx"
    model = onnx.load(str(path), load_external_data=False)
    edit(model)
    path.unlink()
    onnx.save(model, str(path))
    return replace(copy, spec=engine.spec)


def constant(model: onnx.ModelProto, name: str, values: object, dtype: str = "int64") -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.array(values, dtype), name))
    return name


def redirect(model: onnx.ModelProto, value: str, nodes: list[onnx.NodeProto], result: str) -> None:
    """Let every reader of ``value`` read ``result``, which ``nodes`` make of it."""
    readers = [node for node in model.graph.node if value in node.input]
    assert readers, value
    first = list(model.graph.node).index(readers[0])
    for node in readers:
        node.input[:] = [result if name == value else name for name in node.input]
    for i, node in enumerate(nodes):
        model.graph.node.insert(first + i, node)


def scaled(value: str, factor: float, dtype: str = "float32") -> Edit:
    """Readers see the value times ``factor``, and so does the tap."""

    def edit(model: onnx.ModelProto) -> None:
        maker = next(node for node in model.graph.node if value in node.output)
        maker.output[list(maker.output).index(value)] = "fault_in"
        constant(model, "fault_factor", factor, dtype)
        place = list(model.graph.node).index(maker) + 1
        model.graph.node.insert(place, helper.make_node("Mul", ["fault_in", "fault_factor"], [value]))

    return edit


def stale_kv_row(model: onnx.ModelProto) -> None:
    """The cache of keys is read one row late: every decode step sees the first row twice and never the newest."""
    value = "past_key_values.0.key"
    for name, number in (("f_zero", [0]), ("f_one", [1]), ("f_minus", [-1]), ("f_axis", [2])):
        constant(model, name, number)
    nodes = [
        helper.make_node("Slice", [value, "f_zero", "f_one", "f_axis"], ["f_head"]),
        helper.make_node("Slice", [value, "f_zero", "f_minus", "f_axis"], ["f_rest"]),
        helper.make_node("Concat", ["f_head", "f_rest"], ["f_past"], axis=2),
    ]
    redirect(model, value, nodes, "f_past")


def positions_from_arange(model: onnx.ModelProto) -> None:
    """The engine counts columns, padding included, and does not look at ``position_ids``."""
    for name, number in (("f_0", 0), ("f_1", 1), ("f_2", 2), ("f_axis0", [0])):
        constant(model, name, number)
    nodes = [
        helper.make_node("Shape", ["past_key_values.0.key"], ["f_pshape"]),
        helper.make_node("Gather", ["f_pshape", "f_2"], ["f_past"]),
        helper.make_node("Shape", ["input_ids"], ["f_ishape"]),
        helper.make_node("Gather", ["f_ishape", "f_1"], ["f_length"]),
        helper.make_node("Add", ["f_past", "f_length"], ["f_total"]),
        helper.make_node("Range", ["f_past", "f_total", "f_1"], ["f_range"]),
        helper.make_node("Unsqueeze", ["f_range", "f_axis0"], ["f_row"]),
        helper.make_node("Expand", ["f_row", "f_ishape"], ["f_positions"]),
    ]
    redirect(model, "position_ids", nodes, "f_positions")


def mask_anchored_top_left(model: onnx.ModelProto) -> None:
    """Row i of the mask allows keys up to i instead of i + past: right in a prefill, wrong in every later step."""
    for name, number in (("f_0", 0), ("f_1", 1), ("f_2", 2), ("f_3", 3), ("f_axis0", [0]), ("f_axis1", [1])):
        constant(model, name, number)
    constant(model, "f_lowest", np.finfo(np.float32).min, "float32")
    nodes = [
        helper.make_node("Shape", [MASK], ["f_shape"]),
        helper.make_node("Gather", ["f_shape", "f_2"], ["f_rows"]),
        helper.make_node("Gather", ["f_shape", "f_3"], ["f_keys"]),
        helper.make_node("Range", ["f_0", "f_rows", "f_1"], ["f_i"]),
        helper.make_node("Range", ["f_0", "f_keys", "f_1"], ["f_j"]),
        helper.make_node("Unsqueeze", ["f_i", "f_axis1"], ["f_column"]),
        helper.make_node("Unsqueeze", ["f_j", "f_axis0"], ["f_line"]),
        helper.make_node("Greater", ["f_line", "f_column"], ["f_future"]),
        helper.make_node("Where", ["f_future", "f_lowest", MASK], ["f_mask"]),
    ]
    redirect(model, MASK, nodes, "f_mask")


def mask_ignored(model: onnx.ModelProto) -> None:
    """The engine takes every column for a real token."""
    constant(model, "f_true", 1)
    nodes = [
        helper.make_node("Shape", ["attention_mask"], ["f_mshape"]),
        helper.make_node("Expand", ["f_true", "f_mshape"], ["f_ones"]),
    ]
    redirect(model, "attention_mask", nodes, "f_ones")


def rows_mixed(value: str) -> Edit:
    """A hundredth of the batch's mean leaks into every row."""

    def edit(model: onnx.ModelProto) -> None:
        constant(model, "f_axis0", [0])
        constant(model, "f_share", 0.01, "float32")
        nodes = [
            helper.make_node("ReduceMean", [value, "f_axis0"], ["f_mean"], keepdims=1),
            helper.make_node("Sub", ["f_mean", value], ["f_away"]),
            helper.make_node("Mul", ["f_away", "f_share"], ["f_leak"]),
            helper.make_node("Add", [value, "f_leak"], ["f_mixed"]),
        ]
        redirect(model, value, nodes, "f_mixed")

    return edit


def noise(value: str) -> Edit:
    """Every run adds other noise, as atomics in another order do."""

    def edit(model: onnx.ModelProto) -> None:
        nodes = [
            helper.make_node("RandomNormalLike", [value], ["f_random"], scale=1e-6),
            helper.make_node("Add", [value, "f_random"], ["f_noisy"]),
        ]
        redirect(model, value, nodes, "f_noisy")

    return edit


def wrong_from_length(value: str, length: int) -> Edit:
    """Steps of ``length`` tokens and more take a kernel that is 1 % off."""

    def edit(model: onnx.ModelProto) -> None:
        constant(model, "f_1", 1)
        constant(model, "f_limit", length)
        constant(model, "f_off", 1.01, "float32")
        nodes = [
            helper.make_node("Shape", [value], ["f_shape"]),
            helper.make_node("Gather", ["f_shape", "f_1"], ["f_length"]),
            helper.make_node("Less", ["f_length", "f_limit"], ["f_short"]),
            helper.make_node("Mul", [value, "f_off"], ["f_scaled"]),
            helper.make_node("Where", ["f_short", value, "f_scaled"], ["f_chosen"]),
        ]
        redirect(model, value, nodes, "f_chosen")

    return edit


class LeakySession(OnnxRuntimeSession):
    """A real engine whose runtime puts the last cached row of the last sequence in the first place of the next."""

    def start(self, batch: int) -> None:
        self._kept = {name: past[:, :, -1:].copy() for name, past in self._past.items()}
        super().start(batch)

    def step(self, inputs, sink):
        first = next(iter(self._past.values())).shape[2] == 0
        outputs = super().step(inputs, sink)
        for name, kept in self._kept.items() if first else ():
            if kept.shape[2] and kept.shape[0] == self._past[name].shape[0]:
                self._past[name] = np.concatenate([kept, self._past[name][:, :, 1:]], 2)
        return outputs

"""Faults of token ids and positions. Each returns a function that edits an engine."""

import numpy as np
from onnx import TensorProto


def as_int32(site="model.embed_tokens"):
    """Read the int64 ids as twice as many int32."""

    def fault(edit):
        node = edit.node(site)
        ids = node.input[1]
        column = edit.insert_before(node, "Reshape", [ids, edit.constant(np.array([-1, 1], np.int64))])
        zeros = edit.insert_before(node, "Mul", [column, edit.constant(np.array(0, np.int64))])
        words = edit.insert_before(node, "Concat", [column, zeros], axis=1)
        flat = edit.insert_before(node, "Reshape", [words, edit.constant(np.array([-1], np.int64))])
        size = edit.insert_before(node, "Size", [ids])
        size = edit.insert_before(node, "Reshape", [size, edit.constant(np.array([1], np.int64))])
        first = edit.insert_before(node, "Slice", [flat, edit.constant(np.array([0], np.int64)), size])
        shape = edit.insert_before(node, "Shape", [ids])
        node.input[1] = edit.insert_before(node, "Reshape", [first, shape])

    return fault


def changed(kind, number, site="model.embed_tokens"):
    """Compute the ids that are looked up for ``site`` by one more operator: Add, Mod, Min, Mul with a number."""
    return lambda edit: edit.change_input(edit.node(site), 1, (kind, [edit.constant(np.array(number, np.int64))], {}))


def scrambled(site="model.embed_tokens", size=256):
    """id x 3 modulo the size of the table: no pattern that one would look for."""

    def fault(edit):
        three, top = (edit.constant(np.array(n, np.int64)) for n in (3, size))
        edit.change_input(edit.node(site), 1, ("Mul", [three], {}), ("Mod", [top], {}))

    return fault


def replaced(bad, other, site="model.embed_tokens"):
    """One id is looked up as another."""

    def fault(edit):
        node = edit.node(site)
        bad_id, other_id = (edit.constant(np.array(n, np.int64)) for n in (bad, other))
        found = edit.insert_before(node, "Equal", [node.input[1], bad_id])
        node.input[1] = edit.insert_before(node, "Where", [found, other_id, node.input[1]])

    return fault


def positions_shifted(offset):
    return positions_changed("Add", offset)


def positions_changed(kind, number):
    """Whatever is computed from ``position_ids`` sees other ones."""

    def fault(edit):
        for node in [n for n in edit.graph.node if "position_ids" in n.input and n.op_type != "Shape"]:
            index = list(node.input).index("position_ids")
            edit.change_input(node, index, (kind, [edit.constant(np.array(number, np.int64))], {}))

    return fault


def low_word(site="model.embed_tokens"):
    """The int64 ids go through int32 before they are clipped to the table, as an int32 kernel of Clip has them."""

    def fault(edit):
        clip = edit.node(edit.node(site).input[1])
        edit.change_input(clip, 0, ("Cast", [], {"to": TensorProto.INT32}), ("Cast", [], {"to": TensorProto.INT64}))

    return fault


def offset_wraps(bits, site="model.embed_tokens"):
    """Elements of the table are found by their flat offset, which wraps at 2^bits as unsigned arithmetic does."""

    def fault(edit):
        node = edit.node(site)
        table = edit.array(node.input[0])
        last, width = (edit.constant(np.array(n, np.int64)) for n in ([-1], table.shape[1]))
        every, end = (edit.constant(np.array(n, np.int64)) for n in (range(table.shape[1]), 2**bits))
        node.input[0] = edit.constant(table.reshape(-1))
        places = ("Unsqueeze", [last], {}), ("Mul", [width], {}), ("Add", [every], {}), ("Mod", [end], {})
        edit.change_input(node, 1, *places)

    return fault

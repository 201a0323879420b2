"""Faults of the KV cache. Each returns a function that edits an engine."""

import numpy as np
from onnx import helper

from tests.faults.graph import SINGLE, sort


def scaled(layer, kind, factor):
    def fault(edit):
        node = edit.node(f"present.{layer}.{kind}")
        edit.change_input(node, 0, ("Mul", [edit.scalar(factor)], {}))

    return fault


def repeats_last(layer, kind):
    """The last cached token repeats the one before it."""

    def fault(edit):
        node = edit.node(f"present.{layer}.{kind}")
        past = node.input[0]
        cut = lambda a, b: edit.insert_before(  # noqa: E731
            node, "Slice", [past, *(edit.constant(np.array([x], np.int64)) for x in (a, b, 2))]
        )
        most, one_before = cut(0, -1), cut(-2, -1)
        joined = edit.insert_before(node, "Concat", [most, one_before], axis=2)
        # With an empty or one-token cache the cut is shorter: take the real past's length.
        node.input[0] = joined

    return fault


def of_other_row(layer, kind, rows):
    def fault(edit):
        node = edit.node(f"present.{layer}.{kind}")
        edit.change_input(node, 0, ("Gather", [edit.constant(np.array(rows, np.int64))], {"axis": 0}))

    return fault


def of_other_layer(layer, kind, other):
    def fault(edit):
        edit.node(f"present.{layer}.{kind}").input[0] = f"past_key_values.{other}.{kind}"

    return fault


def rounded(layer, kind, scale):
    """Integers times one scale, in what is written and read."""

    def fault(edit):
        edit.change_value(
            f"present.{layer}.{kind}",
            ("Div", [edit.scalar(scale)], {}),
            ("Round", [], {}),
            ("Mul", [edit.scalar(scale)], {}),
        )

    return fault


def late_by_one(layer, kind):
    """Each step reads the row before: the first cached token comes twice, the newest never."""

    def fault(edit):
        node = edit.node(f"present.{layer}.{kind}")
        past = node.input[0]
        zero, one, minus, axis = (edit.constant(np.array([n], np.int64)) for n in (0, 1, -1, 2))
        first = edit.insert_before(node, "Slice", [past, zero, one, axis])
        rest = edit.insert_before(node, "Slice", [past, zero, minus, axis])
        node.input[0] = edit.insert_before(node, "Concat", [first, rest], axis=2)

    return fault


def new_repeats_last(layer, kind):
    """A decoding step stores the last cached token again in place of the new one; a prefill is right."""

    def fault(edit):
        name = f"present.{layer}.{kind}"
        node = edit.node(name)
        past, whole = node.input[0], f"{name}_clean"
        node.output[0] = whole
        zero, one = (edit.constant(np.array(n, np.int64)) for n in (0, 1))
        made = [
            ("Shape", [whole], {"start": 2, "end": 3}),
            ("Shape", [past], {"start": 2, "end": 3}),
        ]
        total, length = (append(edit, kind, inputs, attributes) for kind, inputs, attributes in made)
        total, length = (append(edit, "Squeeze", [value], {}) for value in (total, length))
        empty = append(edit, "Equal", [length, zero], {})
        end = append(edit, "Where", [empty, total, length], {})
        last = append(edit, "Sub", [end, one], {})
        every = append(edit, "Range", [zero, total, one], {})
        chosen = append(edit, "Min", [every, last], {})
        edit.graph.node.append(helper.make_node("Gather", [whole, chosen], [name], axis=2))
        sort(edit)

    return fault


def append(edit, kind, inputs, attributes):
    """Add a node at the end and return its output's name; the graph is sorted later."""
    output = f"appended_{len(edit.graph.node)}"
    edit.graph.node.append(helper.make_node(kind, inputs, [output], **attributes))
    return output


def new_scaled(layer, kind, factor):
    """What is written to the cache is multiplied, what was cached is not."""
    return lambda edit: edit.change_input(edit.node(f"present.{layer}.{kind}"), 1, ("Mul", [edit.scalar(factor)], {}))


def past_through(layer, kind, dtype):
    """What was cached comes back through another format."""
    casts = ("Cast", [], {"to": dtype}), ("Cast", [], {"to": SINGLE})
    return lambda edit: edit.change_input(edit.node(f"present.{layer}.{kind}"), 0, *casts)


def of_values(layer):
    """Cached values come back as keys."""

    def fault(edit):
        edit.node(f"present.{layer}.key").input[0] = f"past_key_values.{layer}.value"

    return fault


def past_heads(layer, kind, order):
    """What was cached comes back with its heads in another order."""

    def fault(edit):
        heads = edit.constant(np.array(order, np.int64))
        edit.change_input(edit.node(f"present.{layer}.{kind}"), 0, ("Gather", [heads], {"axis": 1}))

    return fault

"""Faults of the attention mask. Each returns a function that edits an engine."""

import numpy as np


def anchored_top_left():
    """Queries count from zero in the causal comparison, whatever is cached."""

    def fault(edit):
        order = next(n for n in edit.graph.node if n.op_type == "LessOrEqual")
        total = edit.upstream(order.input[1], "Add")
        plain = next(n for n in total.input if edit.node(n).op_type == "Range")
        consumer = next(n for n in edit.graph.node if total.output[0] in n.input and n.op_type == "Unsqueeze")
        consumer.input[0] = plain

    return fault


def sees_ahead(tokens=1):
    def fault(edit):
        order = next(n for n in edit.graph.node if n.op_type == "LessOrEqual")
        edit.change_input(order, 1, ("Add", [edit.constant(np.array(tokens, np.int64))], {}))

    return fault


def without_self():
    """Compare with < in place of <=."""

    def fault(edit):
        order = next(n for n in edit.graph.node if n.op_type == "LessOrEqual")
        order.op_type = "Less"

    return fault


def ignores_padding():
    def fault(edit):
        mask = next(n for n in edit.graph.node if n.op_type == "Where")
        both = edit.upstream(mask.input[0], "And")
        both.input[1] = both.input[0]

    return fault


def added_twice(site):
    """``finfo.min`` twice is -inf, and a row of -inf is NaN after softmax."""

    def fault(edit):
        node = edit.upstream(site, "Add")
        mask = next(n for n in node.input if "mask" in n)
        edit.change_input(node, list(node.input).index(mask), ("Add", [mask], {}))

    return fault


def window(change):
    """Change the sliding window: the constant that is subtracted from the query's position."""

    def fault(edit):
        for node in edit.graph.node:
            if node.op_type in ("Greater", "GreaterOrEqual", "Less") and node.op_type != "LessOrEqual":
                for name in node.input:
                    sub = next((n for n in edit.graph.node if name in n.output and n.op_type in ("Sub", "Add")), None)
                    index = next((i for i, n in enumerate(sub.input) if edit.is_constant(n)), None) if sub else None
                    if index is not None:
                        old = edit.array(sub.input[index])
                        sub.input[index] = edit.constant(np.asarray(change(old)).astype(old.dtype))

    return fault


def blinds_first(tokens):
    """The first queries see nothing, the others what they should."""

    def fault(edit):
        order = next(n for n in edit.graph.node if n.op_type == "LessOrEqual")
        query, causal = order.input[1], order.output[0]
        edit.change_value(causal, ("And", [f"{causal}_late"], {}))
        node = edit.node(causal)
        bound = edit.constant(np.array(tokens, np.int64))
        node.input[1] = edit.insert_before(node, "GreaterOrEqual", [query, bound])

    return fault


def at_padding(change):
    """Change what is read of ``attention_mask``."""

    def fault(edit):
        for node in list(edit.graph.node):
            for i, value in enumerate(node.input):
                if value == "attention_mask" and node.op_type != "Shape":
                    change(edit, node, i)

    return fault


def padding_inverted():
    """Padding counts as real, real tokens as padding."""
    one = np.array(1, np.int64)
    return at_padding(lambda edit, n, i: edit.change_input(n, i, ("Sub", [edit.constant(one)], {}), ("Neg", [], {})))


def padding_of_rows(rows):
    order = np.array(rows, np.int64)
    return at_padding(lambda edit, n, i: edit.change_input(n, i, ("Gather", [edit.constant(order)], {"axis": 0})))

"""Faults of rotary embedding and positions. Each returns a function that edits an engine."""

import numpy as np

from tests.faults.graph import replace, sort


def frequencies(change, name="inv_freq"):
    """Change the rotary frequencies [dim / 2]."""

    def fault(edit):
        found = [(node, i) for node in edit.graph.node for i, value in enumerate(node.input) if name in value]
        constants = [(node, i) for node, i in found if edit.is_constant(node.input[i])]
        assert constants, f"the graph has no constant {name!r}: the fault would change nothing"
        for node, i in constants:
            old = edit.array(node.input[i])
            node.input[i] = edit.constant(
                np.asarray(change(old.astype(np.float64))).reshape(old.shape).astype(old.dtype)
            )

    return fault


def missing(site):
    """``site`` becomes the unrotated states."""

    def fault(edit):
        node = edit.node(site)
        plain = edit.node(node.input[0]).input[0]
        replace(edit, node, "Identity", [plain])

    return fault


def backwards(site):
    def fault(edit):
        product = edit.node(edit.node(site).input[1])
        edit.change_input(product, 1, ("Neg", [], {}))

    return fault


def positions_from_zero():
    """Positions count padding: indices 0, 1, 2 … whatever the mask says."""

    def fault(edit):
        order = next(n for n in edit.graph.node if n.op_type == "LessOrEqual")
        plain = edit.upstream(order.input[1], "Add").output[0]
        for node in list(edit.graph.node):
            for i, value in enumerate(node.input):
                if value == "position_ids" and node.op_type != "Shape":
                    at_end_of_range(edit, node, i, plain)

    return fault


def at_end_of_range(edit, node, index, plain):
    zero = edit.insert_before(node, "Mul", ["position_ids", edit.constant(np.array(0, np.int64))])
    # The plain positions [length] are computed later in the file than their new consumer may be: keep the order.
    node.input[index] = edit.insert_before(node, "Add", [zero, plain])
    sort(edit)


def amplified(factor):
    """Cosine and sine are multiplied."""

    def fault(edit):
        for site in ("model.rotary_emb", "model.rotary_emb:out.1"):
            edit.change_value(site, ("Mul", [edit.constant(np.array(factor, np.float32))], {}))

    return fault


def parts(edit, site):
    """Return the node, the states before rotation, cosine and sine, as value names."""
    node = edit.node(site)
    plain, turned = (edit.node(name) for name in node.input)
    return node, plain.input[0], plain.input[1], turned.input[1]


def exchanged(site):
    """Cosine and sine are exchanged."""

    def fault(edit):
        node, _, cosine, sine = parts(edit, site)
        plain, turned = (edit.node(name) for name in node.input)
        plain.input[1], turned.input[1] = sine, cosine

    return fault


def half(site):
    """The states are multiplied by the cosine, and that is all."""
    return lambda edit: replace(edit, edit.node(site), "Identity", [edit.node(site).input[0]])


def interleaved(site, dim, *, grouped=False):
    """Neighbours are rotated as pairs, GPT-J's way; ``grouped``: then even dimensions first, odd ones after them."""

    def fault(edit):
        node, x, cosine, sine = parts(edit, site)
        twice = np.repeat(np.arange(dim // 2), 2)
        swapped = np.arange(dim).reshape(-1, 2)[:, ::-1].reshape(-1)
        sign = np.tile(np.array([-1, 1], np.float32), dim // 2)
        pick = lambda value, order: edit.insert_before(  # noqa: E731
            node, "Gather", [value, edit.constant(order.astype(np.int64))], axis=3
        )
        turned = edit.insert_before(node, "Mul", [pick(x, swapped), edit.constant(sign)])
        terms = [
            edit.insert_before(node, "Mul", [value, pick(table, twice)])
            for value, table in ((x, cosine), (turned, sine))
        ]
        total = edit.insert_before(node, "Add", terms)
        order = np.arange(dim).reshape(-1, 2).T.reshape(-1) if grouped else np.arange(dim)
        replace(edit, node, "Identity", [pick(total, order)])

    return fault


def tables_exchanged():
    """The table of cosines holds sines, and that of sines cosines."""

    def fault(edit):
        cosine, sine = edit.upstream("model.rotary_emb", "Cos"), edit.upstream("model.rotary_emb:out.1", "Sin")
        cosine.op_type, sine.op_type = "Sin", "Cos"

    return fault

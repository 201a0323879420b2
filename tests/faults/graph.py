"""Faults of the graph. Each returns a function that edits an engine; names are sites, which are ONNX values too."""

import numpy as np
from onnx import TensorProto, helper

HALF, BRAIN, SINGLE, INT64 = TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.INT64


def rope_frequencies(change, name="inv_freq"):
    """Change the rotary frequencies [dim / 2]."""

    def fault(edit):
        for node in edit.graph.node:
            for i, value in enumerate(node.input):
                if name in value and edit.is_constant(value):
                    old = edit.array(value)
                    node.input[i] = edit.constant(
                        np.asarray(change(old.astype(np.float64))).reshape(old.shape).astype(old.dtype)
                    )

    return fault


def rope_missing(site):
    """``site`` becomes the unrotated states."""

    def fault(edit):
        node = edit.node(site)
        plain = edit.node(node.input[0]).input[0]
        replace(edit, node, "Identity", [plain])

    return fault


def rope_backwards(site):
    def fault(edit):
        product = edit.node(edit.node(site).input[1])
        edit.change_input(product, 1, ("Neg", [], {}))

    return fault


def positions_from_zero(site):
    """Positions count padding: indices 0, 1, 2 … whatever the mask says. ``site`` is computed from ``position_ids``."""

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


def tiled_heads(site, order, operand=1):
    """Reorder the repeated key or value heads that the MatMul before ``site`` takes."""

    def fault(edit):
        product = edit.upstream(site, "MatMul")
        edit.change_input(product, operand, ("Gather", [edit.constant(np.array(order, np.int64))], {"axis": 1}))

    return fault


def constant_changed(site, kind, change, skip=0):
    """Change the scalar of the nearest ``kind`` node upstream of ``site``."""

    def fault(edit):
        nodes = (edit.upstream(site, kind, n) for n in range(skip, 99))
        node, index = next((n, i) for n in nodes for i, name in enumerate(n.input) if edit.is_constant(name))
        old = edit.array(node.input[index])
        node.input[index] = edit.constant(np.asarray(change(old)).astype(old.dtype))

    return fault


def mask_anchored_top_left():
    """Queries count from zero in the causal comparison, whatever is cached."""

    def fault(edit):
        order = next(n for n in edit.graph.node if n.op_type == "LessOrEqual")
        total = edit.upstream(order.input[1], "Add")
        plain = next(n for n in total.input if edit.node(n).op_type == "Range")
        consumer = next(n for n in edit.graph.node if total.output[0] in n.input and n.op_type == "Unsqueeze")
        consumer.input[0] = plain

    return fault


def mask_sees_ahead(tokens=1):
    def fault(edit):
        order = next(n for n in edit.graph.node if n.op_type == "LessOrEqual")
        edit.change_input(order, 1, ("Add", [edit.constant(np.array(tokens, np.int64))], {}))

    return fault


def mask_without_self(lowest=None):
    """Compare with < in place of <=; ``lowest`` also replaces the mask's number."""

    def fault(edit):
        order = next(n for n in edit.graph.node if n.op_type == "LessOrEqual")
        order.op_type = "Less"

    return fault


def mask_ignores_padding():
    def fault(edit):
        mask = next(n for n in edit.graph.node if n.op_type == "Where")
        both = edit.upstream(mask.input[0], "And")
        both.input[1] = both.input[0]

    return fault


def mask_added_twice(site):
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


def past_scaled(layer, kind, factor):
    def fault(edit):
        node = edit.node(f"present.{layer}.{kind}")
        edit.change_input(node, 0, ("Mul", [edit.scalar(factor)], {}))

    return fault


def past_stale(layer, kind):
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


def past_of_other_row(layer, kind, rows):
    def fault(edit):
        node = edit.node(f"present.{layer}.{kind}")
        edit.change_input(node, 0, ("Gather", [edit.constant(np.array(rows, np.int64))], {"axis": 0}))

    return fault


def past_of_other_layer(layer, kind, other):
    def fault(edit):
        edit.node(f"present.{layer}.{kind}").input[0] = f"past_key_values.{other}.{kind}"

    return fault


def cache_rounded(layer, kind, scale):
    """Integers times one scale, in what is written and read."""

    def fault(edit):
        edit.change_value(
            f"present.{layer}.{kind}",
            ("Div", [edit.scalar(scale)], {}),
            ("Round", [], {}),
            ("Mul", [edit.scalar(scale)], {}),
        )

    return fault


def ids_as_int32(site="model.embed_tokens"):
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


def half_square(site):
    """The square of a norm's input goes through float16."""

    def fault(edit):
        square = edit.upstream(site, "Pow").output[0]
        edit.change_value(square, ("Cast", [], {"to": HALF}), ("Cast", [], {"to": SINGLE}))

    return fault


def residual_missing(site, keep):
    def fault(edit):
        node = edit.node(site)
        replace(edit, node, "Identity", [node.input[keep]])

    return fault


def clipped(site, low, high):
    return lambda edit: edit.change_value(site, ("Clip", [edit.scalar(low), edit.scalar(high)], {}))


def scaled(site, factor):
    return lambda edit: edit.change_value(site, ("Mul", [edit.scalar(factor)], {}))


def through(site, dtype=BRAIN):
    return lambda edit: edit.change_value(site, ("Cast", [], {"to": dtype}), ("Cast", [], {"to": SINGLE}))


def tf32(edit):
    """Round both factors of every matrix product to 10 mantissa bits (Veltkamp's splitting in float32)."""
    for node in [n for n in edit.graph.node if n.op_type in ("MatMul", "Gemm")]:
        for i in (0, 1):
            split = edit.insert_before(node, "Mul", [node.input[i], edit.constant(np.array(2.0**13 + 1, np.float32))])
            low = edit.insert_before(node, "Sub", [split, node.input[i]])
            node.input[i] = edit.insert_before(node, "Sub", [split, low])


def half_accumulation(site, chunk=2):
    """Sum the products of a float16 MatMul with 10 mantissa bits after each addition, ``chunk`` products at a time.

    ONNX Runtime's CPU provider computes float16 in float32 and drops casts in between, so the sum is rounded by
    Veltkamp's splitting.
    """

    def fault(edit):
        node = edit.weighted(site)
        x = edit.insert_before(node, "Cast", [node.input[0]], to=SINGLE)
        weight = edit.weight(site).astype(np.float32)
        split_factor = edit.constant(np.array(2.0**13 + 1, np.float32))
        total = None
        for start in range(0, weight.shape[0], chunk):
            ends = [edit.constant(np.array([v], np.int64)) for v in (start, start + chunk, -1)]
            part = edit.insert_before(node, "Slice", [x, *ends])
            part = edit.insert_before(node, "MatMul", [part, edit.constant(weight[start : start + chunk])])
            total = part if total is None else edit.insert_before(node, "Add", [total, part])
            split = edit.insert_before(node, "Mul", [total, split_factor])
            low = edit.insert_before(node, "Sub", [split, total])
            total = edit.insert_before(node, "Sub", [split, low])
        replace(edit, node, "Cast", [total], to=HALF)

    return fault


def gelu(site, approximate):
    """Compute another GELU from the input of ``site``."""

    def fault(edit):
        node = edit.node(site)
        x = edit.node(node.input[0]).input[0]
        replace(edit, node, "Gelu", [x], approximate=approximate)

    return fault


def without_softcap(site):
    """Take scores as they are before Div, Tanh, Mul."""

    def fault(edit):
        tanh = edit.upstream(site, "Tanh")
        scores = edit.node(tanh.input[0]).input[0]
        last = next(n for n in edit.graph.node if tanh.output[0] in n.input and n.op_type == "Mul")
        for node in edit.graph.node:
            for i, name in enumerate(node.input):
                if name == last.output[0]:
                    node.input[i] = scores

    return fault


def only_plain(fault):
    """Put the fault into the engine without taps: what tapping changes."""
    return lambda edit: None if "model.embed_tokens" in {o.name for o in edit.graph.output} else fault(edit)


def none(edit):
    """No fault."""


def replace(edit, node, kind, inputs, **attributes):
    """Compute a node's output another way."""
    at = list(edit.graph.node).index(node)
    output = node.output[0]
    edit.graph.node.remove(node)
    edit.graph.node.insert(at, helper.make_node(kind, list(inputs), [output], **attributes))


def sort(edit):
    """Put nodes in topological order."""
    made = {i.name for i in edit.graph.initializer} | {i.name for i in edit.graph.input} | {""}
    waiting, ordered = list(edit.graph.node), []
    while waiting:
        ready = [n for n in waiting if all(i in made for i in n.input)]
        ordered += ready
        made |= {o for n in ready for o in n.output}
        waiting = [n for n in waiting if not all(o in made for o in n.output)]
    del edit.graph.node[:]
    edit.graph.node.extend(ordered)

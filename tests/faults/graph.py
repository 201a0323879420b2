"""Faults of the graph. Each returns a function that edits an engine; names are sites, which are ONNX values too."""

import numpy as np
from onnx import TensorProto, helper

HALF, BRAIN, SINGLE = TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT
EIGHT = TensorProto.FLOAT8E4M3FN


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


def clipped(site, low, high):
    return lambda edit: edit.change_value(site, ("Clip", [edit.scalar(low), edit.scalar(high)], {}))


def scaled(site, factor):
    return lambda edit: edit.change_value(site, ("Mul", [edit.scalar(factor)], {}))


def through(site, dtype=BRAIN):
    return lambda edit: edit.change_value(site, ("Cast", [], {"to": dtype}), ("Cast", [], {"to": SINGLE}))


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


def without_last_softcap(edit):
    """The logits are the scores as they are before Div, Tanh, Mul."""
    tanh = edit.upstream("logits", "Tanh")
    replace(edit, edit.node("logits"), "Identity", [edit.node(tanh.input[0]).input[0]])


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


def products_rounded(bits, sites=None):
    """Round both factors of the products at ``sites`` (None: of all) to ``bits`` mantissa bits."""

    def fault(edit):
        every = [n for n in edit.graph.node if n.op_type in ("MatMul", "Gemm")]
        for node in every if sites is None else [edit.weighted(site) for site in sites]:
            for i in (0, 1):
                node.input[i] = rounded(edit, node, node.input[i], bits)

    return fault


def rounded(edit, node, value, bits):
    """Round a float32 value to ``bits`` stored mantissa bits before ``node``, by Veltkamp's splitting."""
    split = edit.insert_before(node, "Mul", [value, edit.constant(np.array(2.0 ** (23 - bits) + 1, np.float32))])
    low = edit.insert_before(node, "Sub", [split, value])
    return edit.insert_before(node, "Sub", [split, low])


def operand_alone(site, keep):
    """The sum or product that computes ``site`` becomes one of its operands."""

    def fault(edit):
        node = edit.node(site)
        replace(edit, node, "Identity", [node.input[keep]])

    return fault


def term_scaled(site, index, factor):
    """One term of the addition that computes ``site`` is multiplied."""
    return lambda edit: edit.change_input(edit.node(site), index, ("Mul", [edit.scalar(factor)], {}))


def left_out(site, kind, skip=0):
    """The nearest operator of a kind upstream gives what it takes."""

    def fault(edit):
        node = edit.upstream(site, kind, skip)
        replace(edit, node, "Identity", [node.input[0]])

    return fault


def input_through(site, dtype=BRAIN):
    """What the node that computes ``site`` takes first is cast and cast back."""

    def fault(edit):
        edit.change_input(edit.node(site), 0, ("Cast", [], {"to": dtype}), ("Cast", [], {"to": SINGLE}))

    return fault


def rolled(site, axis):
    """Everything moves on by one along an axis; what falls off comes back at the start."""

    def fault(edit):
        ends = {n: edit.constant(np.array([n], np.int64)) for n in (-1, 0, np.iinfo(np.int64).max)}
        where = edit.constant(np.array([axis], np.int64))
        node = edit.node(site)
        clean = node.output[0] = f"{site}_clean"
        at = list(edit.graph.node).index(node) + 1
        last, rest = f"{site}_last", f"{site}_rest"
        for made in (
            helper.make_node("Slice", [clean, ends[-1], ends[np.iinfo(np.int64).max], where], [last]),
            helper.make_node("Slice", [clean, ends[0], ends[-1], where], [rest]),
            helper.make_node("Concat", [last, rest], [site], axis=axis),
        ):
            edit.graph.node.insert(at, made)
            at += 1

    return fault


def not_a_number(site, width, channel=3):
    """One channel of a tensor is NaN, whatever comes in."""
    poison = np.zeros(width, np.float32)
    poison[channel] = np.nan
    return lambda edit: edit.change_value(site, ("Add", [edit.constant(poison.astype(edit.dtype()))], {}))


def reordered_heads(site, order, axis=1):
    return lambda edit: edit.change_value(site, ("Gather", [edit.constant(np.array(order, np.int64))], {"axis": axis}))


def appended(edit, site, nodes):
    """Compute ``site`` anew by nodes (kind, inputs, output) after the one that computes it, called ``clean`` there."""
    node = edit.node(site)
    clean = node.output[0] = f"{site}_clean"
    at = list(edit.graph.node).index(node) + 1
    rename = {"clean": clean, "site": site}
    for kind, inputs, output in reversed(nodes):
        names = [rename.get(name, name) for name in inputs]
        edit.graph.node.insert(at, helper.make_node(kind, names, [rename.get(output, output)]))


def cut_to_brain(site):
    """Cut to bfloat16 towards zero rather than round: |x| down to a multiple of 2^(floor(log2 |x|) - 7)."""

    def fault(edit):
        log2, bits, two = edit.scalar(np.log(2)), edit.scalar(7), edit.scalar(2)
        size = [
            ("Abs", ["clean"], "cut_size"),
            ("Log", ["cut_size"], "cut_log"),
            ("Div", ["cut_log", log2], "cut_log2"),
        ]
        unit = [("Floor", ["cut_log2"], "cut_power"), ("Sub", ["cut_power", bits], "cut_bit")]
        unit += [("Pow", [two, "cut_bit"], "cut_unit"), ("Div", ["cut_size", "cut_unit"], "cut_units")]
        down = [("Floor", ["cut_units"], "cut_whole"), ("Mul", ["cut_whole", "cut_unit"], "cut_down")]
        sign = [("Sign", ["clean"], "cut_sign"), ("Mul", ["cut_down", "cut_sign"], "site")]
        appended(edit, site, size + unit + down + sign)

    return fault


def one_more_in_softmax(site):
    """exp(x) / (1 + sum of exp(x)), as an attention that may attend to nothing has it."""

    def fault(edit):
        node = edit.node(site)
        scores = edit.insert_before(node, "Exp", [node.input[0]])
        total = edit.insert_before(node, "ReduceSum", [scores, edit.constant(np.array([-1], np.int64))], keepdims=1)
        more = edit.insert_before(node, "Add", [total, edit.scalar(1)])
        replace(edit, node, "Div", [scores, more])

    return fault


def softcap_changed(site, cap):
    """Scores are capped at another bound: the constants of Div and Mul around Tanh."""

    def fault(edit):
        tanh = edit.upstream(site, "Tanh")
        after = next(n for n in edit.graph.node if tanh.output[0] in n.input)
        for node in (edit.node(tanh.input[0]), after):
            index = next(i for i, name in enumerate(node.input) if edit.is_constant(name))
            node.input[index] = edit.scalar(cap)

    return fault


def capped(site, cap):
    """Scores are capped before the mask is added."""

    def fault(edit):
        node = edit.upstream(site, "Add")
        index = next(i for i, name in enumerate(node.input) if "mask" not in name)
        bound = edit.scalar(cap)
        edit.change_input(node, index, ("Div", [bound], {}), ("Tanh", [], {}), ("Mul", [bound], {}))

    return fault


def floored(site, least):
    return lambda edit: edit.change_value(site, ("Max", [edit.scalar(least)], {}))


def added(site, vector):
    return lambda edit: edit.change_value(site, ("Add", [edit.constant(vector.astype(edit.dtype()))], {}))


def replaced(site, kind, **attributes):
    """Compute ``site`` by one operator from what its node takes first."""
    return lambda edit: replace(edit, edit.node(site), kind, [edit.node(site).input[0]], **attributes)


def gate_scaled(site, factor):
    """x sigmoid(factor x)."""
    return lambda edit: edit.change_input(edit.upstream(site, "Sigmoid"), 0, ("Mul", [edit.scalar(factor)], {}))


def softmax_over(site, axis):
    return lambda edit: replace(edit, edit.node(site), "Softmax", [edit.node(site).input[0]], axis=axis)


def flushed(site, least):
    """Magnitudes up to a bound become zero."""

    def fault(edit):
        bound = edit.scalar(least)
        nodes = [("Abs", ["clean"], "flush_size"), ("Greater", ["flush_size", bound], "flush_kept")]
        nodes += [("CastLike", ["flush_kept", "clean"], "flush_factor"), ("Mul", ["clean", "flush_factor"], "site")]
        appended(edit, site, nodes)

    return fault


def operand_is(site, index, other):
    def fault(edit):
        edit.node(site).input[index] = other
        sort(edit)

    return fault

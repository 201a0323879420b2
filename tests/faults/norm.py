"""Faults of norms. Each returns a function that edits an engine; ``site`` is the output of a norm."""

import numpy as np

from tests.faults.graph import HALF, SINGLE, replace


def half_square(site):
    """The square of a norm's input goes through float16."""

    def fault(edit):
        square = edit.upstream(site, "Pow").output[0]
        edit.change_value(square, ("Cast", [], {"to": HALF}), ("Cast", [], {"to": SINGLE}))

    return fault


def centred(site):
    """An RMSNorm subtracts the mean of its input, as LayerNorm does."""

    def fault(edit):
        square = edit.upstream(site, "Pow")
        x = square.input[0]
        mean = edit.insert_before(square, "ReduceMean", [x, edit.constant(np.array([-1], np.int64))], keepdims=1)
        less = edit.insert_before(square, "Sub", [x, mean])
        for node in (square, edit.node(edit.node(site).input[1])):
            node.input[list(node.input).index(x)] = less

    return fault


def missing(site):
    """The norm hands its input on."""
    return lambda edit: replace(edit, edit.node(site), "Identity", [edit.upstream(site, "Pow").input[0]])


def only_multiplies(site):
    """The norm multiplies by its weight and does not normalize."""

    def fault(edit):
        node = edit.node(site)
        node.input[1] = edit.upstream(site, "Pow").input[0]

    return fault


def without_bias(site):
    """A LayerNormalization's bias is zero."""

    def fault(edit):
        node = edit.node(site)
        node.input[2] = edit.constant(np.zeros_like(edit.array(node.input[2])))

    return fault


def chain(edit, site):
    """Return the nodes that add epsilon and take the root, and which input of the first is the mean square."""
    root = edit.node(edit.upstream(site, "Reciprocal").input[0])
    total = edit.node(root.input[0])
    return total, root, next(i for i, name in enumerate(total.input) if not edit.is_constant(name))


def epsilon_outside(site, epsilon):
    """``x / (sqrt(mean of squares) + epsilon)``."""

    def fault(edit):
        total, root, mean = chain(edit, site)
        total.input[1 - mean] = edit.scalar(0)
        edit.change_value(root.output[0], ("Add", [edit.scalar(epsilon)], {}))

    return fault


def mean_scaled(site, factor):
    """The mean of squares is multiplied: by the width, it is their sum."""

    def fault(edit):
        total, _, mean = chain(edit, site)
        edit.change_input(total, mean, ("Mul", [edit.scalar(factor)], {}))

    return fault

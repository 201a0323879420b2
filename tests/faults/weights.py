"""Faults of weights. Each returns a function that edits an engine; ``site`` is the output of a linear layer or norm."""

import numpy as np


def scaled(site, factor):
    return lambda edit: edit.change_weight(site, lambda w: w * factor)


def zeroed(site):
    return lambda edit: edit.change_weight(site, np.zeros_like)


def transposed(site):
    return lambda edit: edit.change_weight(site, lambda w: w.T)


def not_a_number(site, channel=3):
    def change(w):
        w[..., channel] = np.nan
        return w

    return lambda edit: edit.change_weight(site, change)


def exchanged(site, other):
    """``site`` gets the weight of ``other``."""
    return lambda edit: edit.change_weight(site, lambda w: edit.weight(other))


def interleaved(site, groups):
    """Rows of a fused weight in interleaved order, as [groups, n] read as [n, groups]. Columns of the MatMul weight."""

    def change(w):
        order = np.arange(w.shape[-1]).reshape(groups, -1).T.reshape(-1)
        return w[..., order]

    return lambda edit: edit.change_weight(site, change)


def rows_changed(site, channels, factor=2.0):
    def change(w):
        w[..., channels] *= factor
        return w

    return lambda edit: edit.change_weight(site, change)


def ignored(site):
    """A norm's weight is one everywhere."""
    return lambda edit: edit.change_weight(site, np.ones_like)


def table_quantized(site):
    """An embedding's rows are int8 with one scale each."""

    def change(w):
        scale = np.maximum(np.abs(w).max(-1, keepdims=True), 1e-30) / 127
        return np.round(w / scale) * scale

    return lambda edit: edit.change_weight(site, change)


def quantized(site, bits=8, group=0):
    """Symmetric integers, one scale an output channel, or one a group of inputs."""
    top = 2 ** (bits - 1) - 1

    def change(w):
        rows = w.T.reshape(-1, group) if group else w.T
        scale = np.abs(rows).max(-1, keepdims=True) / top
        return (np.round(rows / scale) * scale).reshape(w.T.shape).T

    return lambda edit: edit.change_weight(site, change)


def bias_scaled(site, factor):
    """Multiply the bias of a Gemm."""

    def fault(edit):
        node = edit.weighted(site)
        for i, name in enumerate(node.input):
            if edit.is_constant(name) and edit.array(name).ndim == 1 and i == 2:
                node.input[i] = edit.constant((edit.array(name) * factor).astype(np.float32))
                return
        raise LookupError(f"{site} has no bias")

    return fault


def affine(site, bits=4, group=32):
    """Unsigned integers with a scale and a zero point a group of inputs."""

    def change(w):
        rows = w.T.reshape(-1, group)
        low = rows.min(-1, keepdims=True)
        scale = (rows.max(-1, keepdims=True) - low) / (2**bits - 1)
        zero = np.round(-low / scale)
        codes = np.clip(np.round(rows / scale) + zero, 0, 2**bits - 1)
        return ((codes - zero) * scale).reshape(w.T.shape).T

    return lambda edit: edit.change_weight(site, change)


def noisy(site, size):
    """Every weight is off by its own share."""
    return lambda edit: edit.change_weight(site, lambda w: w * (1 + size * draw(0, w.shape)))


def low_rank(site, size, rank=2):
    """An adapter that should not be there, or is merged twice: an update of so many ranks and that relative size."""

    def change(w):
        update = draw(1, (w.shape[0], rank)) @ draw(2, (rank, w.shape[1]))
        return w + update * (size * np.linalg.norm(w) / np.linalg.norm(update))

    return lambda edit: edit.change_weight(site, change)


def draw(seed, shape):
    """Return normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape)


def inputs_rolled(site):
    """Each input channel takes the weights of the one before."""
    return lambda edit: edit.change_weight(site, lambda w: np.roll(w, 1, 0))


def inputs_lost(site, first):
    """Input channels from ``first`` on count nothing, as without the other shard's part of a sum."""
    return lambda edit: edit.change_weight(site, lambda w: np.where(np.arange(len(w))[:, None] < first, w, 0))


def rows_scaled(site, rows, factor):
    """Some rows of a table are multiplied."""
    return lambda edit: edit.change_weight(
        site, lambda w: np.where(np.isin(np.arange(len(w)), rows)[:, None], w * factor, w)
    )

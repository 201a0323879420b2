"""Whether a file's weight is a rounding of the model's: a line through its values, with only a rounding error left.

Within each row, and each block of it, the file's numbers are fitted by ``gain * weight + offset``. Rounding to the
nearest step leaves a gain of 1 and no offset, within the standard error of the fit. Wrong scales are another gain,
wrong zero points an offset. The distance alone tells neither: rounding to 4 bits is 0.1 off, scales that are wrong by
10 % make it 0.14.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ditto_core.align.values import Array

BLOCK = 32
LEAST = {"rows": 0.06, "blocks": 0.2}
"""Gains and offsets (in units of the group's size) below this are not told from rounding. In a block all numbers may be
rounded alike, as those of a file that was quantized before: by half a step at most, which is 0.17 in 4 bits."""
ERRORS = 6.0
"""So many standard errors of the fit are no chance."""
FAINT = 1e-3
"""Groups this small, by the size of the whole weight, have no gain."""
AT_ONCE = 1 << 22
"""Numbers that are fitted at a time, in float64."""
SHARE = 0.01
"""One row is wrong by itself; of blocks, which are small samples, this share must be."""


@dataclass(frozen=True)
class Fit:
    """Worst gain and offset (by the group's root mean square) of the groups of a weight that are no rounding of it.

    ``share``: how many of the rows, or blocks, are not.
    """

    gain: float = 1.0
    offset: float = 0.0
    share: float = 0.0
    groups: str = "rows"

    def __bool__(self) -> bool:
        return not self.share

    def __str__(self) -> str:
        if self:
            return "a rounding of the model's weight"
        scale, zero = abs(self.gain - 1), abs(self.offset)
        what = f"{self.gain:.2f} times" if scale >= zero else f"{zero:.2f} of its size away from"
        where = "" if self.share == 1 else f" in {self.share:.0%} of its {self.groups}"
        cause = "scales" if scale >= zero else "zero points"
        return f"no rounding of the model's weight but {what} it{where}: wrong {cause}"


def fit(found: Array, weight: Array) -> Fit:
    """Fit a file's weight [outputs, inputs, …] with the model's of the same shape."""
    rows = weight.reshape(len(weight), -1)
    for groups, size in (("rows", rows.shape[1]), ("blocks", BLOCK)):
        if rows.shape[1] % size or rows.shape[1] < BLOCK:
            continue
        sides = found.reshape(-1, size), rows.reshape(-1, size)
        step = max(1, AT_ONCE // size)
        starts = range(0, len(sides[0]), step)
        parts = [line(sides[0][i : i + step], sides[1][i : i + step], LEAST[groups]) for i in starts]
        gain, offset, wrong = (np.concatenate(each) for each in zip(*parts, strict=True))
        share = float(wrong.mean())
        if share > (0 if groups == "rows" else SHARE):
            return Fit(float(np.median(gain[wrong])), float(np.median(np.abs(offset[wrong]))), share, groups)
    return Fit()


def line(found: Array, weight: Array, least: float) -> tuple[Array, Array, Array]:
    """Return gain, offset and whether one is wrong by more than ``least`` of every group [groups, size].

    By least squares in float64.
    Of a group without numbers, such as the row of a padding token, nothing is wrong.
    """
    count = weight.shape[1]
    mean = weight.mean(1, dtype=np.float64)[:, None]
    centred = weight - mean
    faintest = FAINT * float(np.sqrt(np.square(weight, dtype=np.float64).mean())) + 1e-30
    size = np.maximum(np.sqrt(np.einsum("ij,ij->i", weight, weight, dtype=np.float64) / count), faintest)
    energy = np.einsum("ij,ij->i", centred, centred)
    faint = energy < count * faintest**2
    energy[faint] = count * size[faint] ** 2
    gain = np.where(faint, 1.0, np.einsum("ij,ij->i", centred, found) / energy)
    shift = found.mean(1, dtype=np.float64) - mean[:, 0]
    rest = found - weight - shift[:, None] - (gain - 1)[:, None] * centred
    error = ERRORS * np.sqrt(np.einsum("ij,ij->i", rest, rest) / max(count - 2, 1))
    steep = np.abs(gain - 1) > np.maximum(least, error / np.sqrt(energy))
    aside = np.abs(shift / size) > np.maximum(least, error / (size * np.sqrt(count)))
    return gain, shift / size, steep | aside

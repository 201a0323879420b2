"""What a screenshot holds: its colours, counted."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable

from PIL import Image

Color = tuple[int, int, int]


def counted(shot: bytes) -> Counter[Color]:
    """Count the colours of a screenshot."""
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    return Counter({color: n for n, color in image.getcolors(image.width * image.height)})


def pixels(locator) -> Counter[Color]:
    """Take a screenshot of one element and count its colours."""
    return counted(locator.first.screenshot())


def orange(color: Color) -> bool:
    """Tell whether a colour is one of those above the bound."""
    red, green, blue = color
    return red > 90 and red > 1.4 * green and green > blue


def blue(color: Color) -> bool:
    """Tell whether a colour is one of those below the bound."""
    red, green, blue = color
    return blue > 120 and blue > 1.3 * red and green > red


def black(color: Color) -> bool:
    """Tell whether a colour is that of cells that are not finite."""
    return max(color) < 10


def share(counts: Counter[Color], of: Callable[[Color], bool]) -> float:
    """Return which share of the pixels has a colour."""
    return sum(n for color, n in counts.items() if of(color)) / counts.total()


def luminance(color: Color) -> float:
    """Return the relative luminance of a colour, 0 to 1 (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in color)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: Color, other: Color) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)

"""Where a tensor is made in the model's own code, as a recorder can tell while it runs."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType

from ditto_core.visible import source_path

FOREIGN = ("/torch/", "<eval_with_key>", "/transformers/modeling_layers.py", str(Path(__file__).parents[1]))
"""Code that calls modules for others: torch's containers, what it traced, the wrapper around transformers' layers, and
our own."""


def running_line(outermost: CodeType) -> str:
    """Return ``file:line function: code`` of the line of the model that is running.

    An empty string when there is none within the call of ``outermost``: torch's own containers call their children.
    """
    frame = running_frame(outermost)
    if frame is None:
        return ""
    path = frame.f_code.co_filename
    code = linecache.getline(path, frame.f_lineno).strip()
    return f"{source_path(path)}:{frame.f_lineno} {frame.f_code.co_name}: {code}"


def running_frame(outermost: CodeType | None = None) -> FrameType | None:
    """Return the innermost frame of the model's own code within the call of ``outermost``; None when there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        if not any(part in frame.f_code.co_filename for part in FOREIGN):
            return frame
        frame = frame.f_back
    return None

"""Faults that are put into real engines: edits of the ONNX graph and weights between build and open."""

from tests.faults.files import edit_weight, scale_weight
from tests.faults.inject import Edit, FaultyWorkspace

__all__ = ["Edit", "FaultyWorkspace", "edit_weight", "scale_weight"]

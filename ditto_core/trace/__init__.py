"""Traces: what a session produced, step by step, in a directory of safetensors files and one manifest.

``docs/traces.md`` describes the format. Nothing here reads or writes pickle.
"""

from ditto_core.trace.manifest import Manifest, StepMeta, TensorMeta
from ditto_core.trace.reader import StepData, Trace
from ditto_core.trace.writer import StepWriter, TraceWriter

__all__ = ["Manifest", "StepData", "StepMeta", "StepWriter", "TensorMeta", "Trace", "TraceWriter"]

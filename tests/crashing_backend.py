"""ONNX Runtime, which dies at the decoding step of a token of ``ENDS`` in the way that stands there."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from ditto_core.backends.onnxruntime import OnnxRuntimeBackend, OnnxRuntimeSession

ENDS = {
    10: os.abort,
    11: lambda: ctypes.string_at(0),
    12: lambda: os.kill(os.getpid(), signal.SIGKILL),
    13: lambda: os._exit(0),
    14: lambda: time.sleep(600),
    15: lambda: 1 / 0,
}


class CrashingBackend(OnnxRuntimeBackend):
    name = "crashing"

    def open(self, spec, directory, taps):
        return CrashingSession(spec, directory, taps)


class AbortingBackend(CrashingBackend):
    def open(self, spec, directory, taps):
        os.abort()


class CrashingSession(OnnxRuntimeSession):
    def step(self, inputs, sink):
        if inputs["input_ids"].shape[1] == 1:
            print(f"the kernel of {len(self.past)} caches fails", flush=True)
            ENDS[int(inputs["input_ids"][0, 0])]()
        return super().step(inputs, sink)

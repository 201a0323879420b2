"""The check that both tools run: is polygraphy_debug.onnx off? Exit status 1 when it is.

The part's weights are replaced by those of the good model, both run on the values that were captured in the failing
model, and their outputs are compared; or it fails when all the nodes that `check.json` names are there. It has no
options, because Polygraphy reads words that follow its own `--check` as abbreviations of its options.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime


def main():
    settings = json.loads(Path("check.json").read_text())
    with Path("checks.log").open("a") as log:
        log.write("check\n")
    part = onnx.load("polygraphy_debug.onnx")
    if settings["together"]:
        return set(settings["together"]) <= {node.name for node in part.graph.node}
    return rel_l2(part, onnx.load("good.onnx"), np.load("captured.npz")) > settings["tolerance"]


def rel_l2(part, good, captured):
    weights = {tensor.name: tensor for tensor in good.graph.initializer}
    fixed = onnx.ModelProto()
    fixed.CopyFrom(part)
    for tensor in fixed.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(weights[tensor.name])
    actual, expected = (run(model, captured) for model in (part, fixed))
    pairs = [(a.astype(np.float64), e.astype(np.float64)) for a, e in zip(actual, expected, strict=True)]
    return max(float(np.linalg.norm(a - e) / (np.linalg.norm(e) or 1)) for a, e in pairs)


def run(model, captured):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: captured[value.name] for value in session.get_inputs()})


if __name__ == "__main__":
    sys.exit(int(main()))

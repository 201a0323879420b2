"""The check that both tools run: is polygraphy_debug.onnx off? Exit status 1 when it is.

What the part puts out is also computed by the good model's nodes, both from the values that were captured in the
failing model, and the two are compared; or it fails when all the nodes that `check.json` names are there. A value that
the part holds frozen counts as given, so that the operators are judged and not what was wrong before them. It has no
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
    held = frozen(part, good)
    captured = {**captured, **held}
    fixed = corrected(part, good, captured, set(held))
    if fixed is None:
        return 0.0
    names = [value.name for value in fixed.graph.output]
    actual, expected = (run(model, captured, names) for model in (part, fixed))
    pairs = [(a.astype(np.float64), e.astype(np.float64)) for a, e in zip(actual, expected, strict=True)]
    return max(float(np.linalg.norm(a - e) / (np.linalg.norm(e) or 1)) for a, e in pairs)


def frozen(part, good):
    """Return the values of the good model, by name, that are constants in the part."""
    names = {name for node in good.graph.node for name in node.output} | {value.name for value in good.graph.input}
    return {t.name: onnx.numpy_helper.to_array(t) for t in part.graph.initializer if t.name in names}


def corrected(part, good, captured, held):
    """Return the good model's nodes for those outputs of the part that they can compute, from the part's inputs."""
    producers = {name: node for node in good.graph.node for name in node.output}
    weights = {tensor.name: tensor for tensor in good.graph.initializer}
    given = {value.name for value in part.graph.input}
    known = {*producers, *(value.name for value in good.graph.input)}
    if given <= known:  # a fault may have lost an operand: the good nodes then read more than the part does
        given = set(captured) - {name for node in part.graph.node for name in node.output}
    ends, nodes = [], set()
    for value in part.graph.output:
        found = set() if value.name in held else upstream(value.name, producers, {*given, *held, *weights})
        if found:
            ends.append(onnx.ValueInfoProto(name=value.name))
            nodes |= found
    if not ends:
        return None
    kept = [node for node in good.graph.node if node.output[0] in nodes]
    read = {name for node in kept for name in node.input if name}
    types = {
        name: onnx.helper.np_dtype_to_tensor_dtype(captured[name].dtype) for name in sorted(read & {*given, *held})
    }
    starts = [onnx.helper.make_tensor_value_info(name, kind, captured[name].shape) for name, kind in types.items()]
    graph = onnx.helper.make_graph(kept, "good", starts, ends, [weights[name] for name in sorted(read & set(weights))])
    return onnx.helper.make_model(graph, opset_imports=good.opset_import, ir_version=good.ir_version)


def upstream(value, producers, given):
    """Return the first outputs of the nodes that lead from ``given`` values to ``value``; empty when they cannot."""
    waiting, found = [value], set()
    while waiting:
        name = waiting.pop()
        if name not in producers:
            return set()
        node = producers[name]
        if node.output[0] not in found:
            found.add(node.output[0])
            waiting += [source for source in node.input if source and source not in given]
    return found


def run(model, captured, outputs):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(outputs, {value.name: captured[value.name] for value in session.get_inputs()})


if __name__ == "__main__":
    sys.exit(int(main()))

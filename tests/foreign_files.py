"""Engine files as other tools leave them, made by what the development set-up has."""

from __future__ import annotations

import random

import onnx
from onnx import helper, numpy_helper

from ditto_core.graphs.files import read_model


def stripped(source, target):
    """Write a copy without any name that tells: values, nodes, dimensions and inputs are renamed and shuffled."""
    model = read_model(source)
    graph = model.graph
    values = [v.name for v in (*graph.input, *graph.initializer)] + [o for n in graph.node for o in n.output if o]
    order = random.Random(3).sample(range(len(values)), len(values))
    names = dict(zip(values, (f"v{i}" for i in order), strict=True)) | {"": ""}
    for node in graph.node:
        node.input[:] = [names[name] for name in node.input]
        node.output[:] = [names[name] for name in node.output]
        node.name = ""
        del node.metadata_props[:]
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names[value.name]
    del graph.value_info[:]
    dims = {}
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = dims.setdefault(dim.dim_param, f"s{len(dims)}")
    shuffled = random.Random(4).sample(list(graph.input), len(graph.input))
    del graph.input[:]
    graph.input.extend(shuffled)
    onnx.save(model, str(target))
    return names


def with_weight(source, target, site, edit):
    """Write a copy with another weight in the matrix product that makes a value."""
    model = read_model(source)
    maker = {o: n for n in model.graph.node for o in n.output}
    found = maker[site]
    while found.op_type != "MatMul":
        found = maker[found.input[0]]
    tensor = next(t for t in model.graph.initializer if t.name == found.input[1])
    tensor.CopyFrom(numpy_helper.from_array(edit(numpy_helper.to_array(tensor)), tensor.name))
    onnx.save(model, str(target))
    return found


def with_exchanged_weights(source, target, one, other):
    """Write a copy in which two matrix products read each other's weights."""
    model = read_model(source)
    maker = {o: n for n in model.graph.node for o in n.output}
    a, b = maker[one], maker[other]
    a.input[1], b.input[1] = b.input[1], a.input[1]
    onnx.save(model, str(target))


def packed(source, target, names):
    """Write a copy in which the matrix products that make ``names`` are one, whose columns are then split."""
    model = read_model(source)
    graph = model.graph
    nodes = [next(n for n in graph.node if name in n.output) for name in names]
    weights = [numpy_helper.to_array(next(t for t in graph.initializer if t.name == n.input[1])) for n in nodes]
    import numpy as np

    joined = numpy_helper.from_array(np.concatenate(weights, 1), "packed_weight")
    sizes = numpy_helper.from_array(np.array([w.shape[1] for w in weights]), "packed_sizes")
    graph.initializer.extend([joined, sizes])
    place = list(graph.node).index(nodes[0])
    made = [
        helper.make_node("MatMul", [nodes[0].input[0], "packed_weight"], ["packed"], "packed_product"),
        helper.make_node("Split", ["packed", "packed_sizes"], list(names), "packed_split", axis=-1),
    ]
    kept = [n for n in graph.node if n not in nodes]
    del graph.node[:]
    graph.node.extend([*kept[:place], *made, *kept[place:]])
    onnx.save(model, str(target))


def whole(source, target):
    """Write a copy with its weights inside, and return it."""
    onnx.save(read_model(source), str(target))
    return target


def optimized(source, target, level):
    """Write what ONNX Runtime makes of a file offline."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])

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


def replaced(model, nodes, initializers, domains=("com.microsoft",)):
    """Put nodes in the place of those that compute the same values; drop what nothing needs any more."""
    from ditto_core.graphs.graph import Graph

    made = {name for node in nodes for name in node.output}
    graph = model.graph
    kept = [node for node in graph.node if not made & set(node.output)]
    graph.initializer.extend(initializers)
    del graph.node[:]
    known = {v.name for v in (*graph.input, *graph.initializer)} | {""}
    waiting = [*kept, *nodes]
    while waiting:  # in topological order
        node = next(n for n in waiting if set(n.input) <= known)
        waiting.remove(node)
        graph.node.append(node)
        known |= set(node.output)
    needed = Graph(model).upstream([v.name for v in graph.output], ())
    left = [graph.node[i] for i in needed]
    del graph.node[:]
    graph.node.extend(left)
    model.opset_import.extend(helper.make_opsetid(domain, 1) for domain in domains)


def with_multi_head_attention(source, target, layer, heads=4, **attributes):
    """Write a copy of BERT in which one layer's attention is a MultiHeadAttention; return the node's name."""
    model = read_model(source)
    maker = {o: n for n in model.graph.node for o in n.output}
    scope = f"encoder.layer.{layer}.attention.self"
    mask = maker[maker[f"{scope}:probs"].input[0]].input[1]
    end = next(n.output[0] for n in model.graph.node if f"{scope}:context" in n.input)
    reads = [f"{scope}.{name}" for name in ("query", "key", "value")]
    node = helper.make_node(
        "MultiHeadAttention", [*reads, "", "", mask], [end], "fused", domain="com.microsoft", num_heads=heads, **attributes
    )
    replaced(model, [node], [])
    onnx.save(model, str(target))
    return node.name


def with_group_query_attention(source, target, layer, tables, edit=lambda table: table, **attributes):
    """Write a copy of a Llama in which one layer's attention is a GroupQueryAttention with ``tables`` [positions, half]
    of cosines and sines; return the node's name."""
    import numpy as np

    model = read_model(source)
    scope = f"model.layers.{layer}.self_attn"
    end = next(n.output[0] for n in model.graph.node if f"{scope}:context" in n.input)
    reads = [f"{scope}.{name}_proj" for name in "qkv"]
    pasts, presents = ([f"{kind}.{layer}.{name}" for name in ("key", "value")] for kind in ("past_key_values", "present"))
    nodes = [
        helper.make_node("ReduceSum", ["attention_mask", "axis_1"], ["tokens"], keepdims=0),
        helper.make_node("Sub", ["tokens", "one"], ["last"]),
        helper.make_node("Cast", ["last"], ["seqlens_k"], to=onnx.TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["mask_shape"]),
        helper.make_node("Gather", ["mask_shape", "one"], ["total_long"]),
        helper.make_node("Cast", ["total_long"], ["total"], to=onnx.TensorProto.INT32),
        helper.make_node(
            "GroupQueryAttention",
            [*reads, *pasts, "seqlens_k", "total", "cosines", "sines"],
            [end, *presents],
            "fused",
            domain="com.microsoft",
            **{"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, **attributes},
        ),
    ]
    arrays = {"axis_1": np.array([1]), "one": np.array(1), "cosines": edit(tables[0]), "sines": tables[1]}
    replaced(model, nodes, [numpy_helper.from_array(np.ascontiguousarray(a), name) for name, a in arrays.items()])
    onnx.save(model, str(target))
    return "fused"

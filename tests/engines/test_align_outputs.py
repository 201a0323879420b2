"""Files of models that are no transformers: outputs of integers, stored ones, inputs whose rows are not a batch."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from ditto_core.align.file import OnnxFile
from ditto_core.align.making import align
from ditto_core.align.running import usable
from ditto_core.model.loading import load_model
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec, ModelSource


class Detector(nn.Module):
    """Scores [rows, 3], their classes, which are positive, and anchors [5, 3] that depend on nothing."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("boxes", torch.randn(5, 3))

    def forward(self, x):
        scores = self.head(x)
        return {
            "scores": scores,
            "classes": scores.argmax(-1),
            "positive": scores > 0,
            "last": scores.argmin(-1),
            "anchors": 2 * self.boxes,
        }


class Graph(nn.Module):
    """Sums what the ``edges`` [2, count] bring to each of the ``nodes`` [nodes, 4]."""

    def __init__(self):
        super().__init__()
        self.message = nn.Linear(4, 4)

    def forward(self, nodes, edges):
        return nodes.index_add(0, edges[1], self.message(nodes)[edges[0]])


def detector():
    torch.manual_seed(0)
    return Detector(), {"x": torch.randn(5, 4)}


def graph():
    torch.manual_seed(0)
    return Graph(), {"nodes": torch.randn(7, 4), "edges": torch.randint(0, 7, (2, 9))}


def file_of(factory, folder, change=lambda graph: None):
    module, inputs = factory()
    names = list(inputs)
    made = torch.onnx.export(
        module.eval(), tuple(inputs.values()), input_names=names, dynamo=True, verbose=False, opset_version=20
    )
    proto = made.model_proto
    change(proto.graph)
    onnx.save(proto, str(folder / "model.onnx"))
    return folder / "model.onnx"


def inverted(graph):
    next(node for node in graph.node if node.op_type == "Greater").op_type = "Less"


def without_anchors(graph):
    stored = {tensor.name for tensor in graph.initializer}
    (anchors,) = [value for value in graph.output if value.name in stored]
    graph.output.remove(anchors)


@pytest.fixture(scope="module")
def run(workspace):
    def run(factory, path):
        pair = Pair(workspace, EngineSpec.of(ModelSource.of(factory), engine=path))
        comparison = pair.run()
        pair.close()
        return comparison

    return run


def test_integers_and_what_is_stored_are_compared_whatever_they_are_called(run, tmp_path):
    comparison = run(detector, file_of(detector, tmp_path))
    assert comparison
    assert {r.site for r in comparison.results} >= {"classes", "positive", "last", "anchors"}


def test_a_wrong_truth_value_fails(run, tmp_path):
    comparison = run(detector, file_of(detector, tmp_path, inverted))
    assert not comparison
    assert comparison.worst.site == "positive"


def test_an_output_that_the_file_lacks_takes_no_other_s_place(tmp_path):
    found = align(load_model(ModelSource.of(detector)), OnnxFile(file_of(detector, tmp_path, without_anchors)))
    assert found.absent["anchors"] == "not among the file's outputs"
    assert found.finals.keys() == {"scores", "classes", "positive", "last"}
    assert found.off == {}


def test_a_sequence_is_no_tensor():
    assert not usable([[np.zeros(3)], [np.zeros(3)]])
    assert usable([np.zeros(3), np.zeros(4)])


def test_rows_of_one_input_may_count_those_of_another(run, tmp_path):
    path = file_of(graph, tmp_path)
    assert run(graph, path)
    found = align(load_model(ModelSource.of(graph)), OnnxFile(path))
    assert found.notes == ("aligned on inputs of the example's sizes only",)

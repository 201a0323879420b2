"""`BuildRequest.exported_program()`: what a backend that builds from the module gets."""

from dataclasses import replace

import pytest
import torch
from exporting_backend import ExportingBackend
from models import conv_net, many_ids

from ditto_core.backends.base import BuildRequest
from ditto_core.errors import BuildError
from ditto_core.model.loading import load_model
from ditto_core.model.program import trace_program
from ditto_core.profile import ShapeProfile
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec, ModelSource
from ditto_core.testing import check_backend
from ditto_core.testing.suite import PROMISES

CHECKED = {"outputs", "decoding", "batch_sizes", "padding", "restart", "missing_input", "wrong_shape"}
"""What needs one engine of the decoder: tracing it takes most of the time."""


def request(tmp_path, *taps, model=conv_net):
    spec = EngineSpec.of(model, profile={"batch": (1, 2, 4)})
    return BuildRequest(spec, tmp_path / "model.onnx", taps, ("output",), False, tmp_path)


def test_outputs_come_first_then_the_taps_and_what_is_no_tensor_of_the_module_is_refused(tmp_path):
    relu, raw, final = Tap("2", "2"), Tap("onnx:Relu_3", "Relu_3"), Tap("5", "output")
    program = request(tmp_path, relu, raw, final).exported_program()
    assert (program.inputs, program.outputs) == (("input",), ("output", "2"))
    assert program.taps == (relu, final)
    assert set(program.refused) == {"onnx:Relu_3"}
    module, examples = conv_net()
    module.eval()
    images = torch.cat([examples["input"]] * 2)  # four rows, two of which tracing did not see
    output, tap = program.exported.module()(images)
    assert torch.allclose(tap, module[:3](images), atol=1e-6)
    assert torch.allclose(output, module(images), atol=1e-6)


def test_rows_are_bounded_by_the_profile(tmp_path):
    (rows,) = request(tmp_path).exported_program().exported.range_constraints.values()
    assert rows.upper == 4


def test_dimensions_that_the_spec_names_are_dynamic_and_bounded(tmp_path):
    dynamic = {"input": {2: "rows", 3: "columns"}}
    spec = EngineSpec.of(conv_net, dynamic=dynamic, profile={"rows": (8, 16, 20), "columns": (8, 16, 30)})
    program = BuildRequest(spec, tmp_path / "model.onnx", (), ("output",), False, tmp_path).exported_program().exported
    assert {size.upper for size in program.range_constraints.values()} == {8, 20, 30}
    module = conv_net()[0].eval()
    images = torch.randn(3, 3, 18, 10)
    assert torch.allclose(program.module()(images)[0], module(images), atol=1e-6)


class Refusing(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.sum().item() > 0 else x


def refusing():
    return Refusing(), {"x": torch.ones(2, 3)}


def test_what_torch_refuses_is_one_line(tmp_path):
    with pytest.raises(BuildError, match="refusing") as caught:
        request(tmp_path, model=refusing).exported_program()
    assert len(str(caught.value).splitlines()) == 1


def test_a_backend_that_builds_from_the_module_decodes_from_an_empty_past(workspace):
    others = {promise.__name__ for promise in PROMISES} - CHECKED
    check_backend(ExportingBackend(), workspace=workspace, without=others)


def test_the_model_is_cast_to_the_dtype_of_the_spec(tmp_path):
    half = replace(request(tmp_path), spec=EngineSpec.of(conv_net, dtype="float16"))
    weights = half.exported_program().exported.state_dict.values()
    assert {weight.dtype for weight in weights if weight.is_floating_point()} == {torch.float16}


@pytest.mark.parametrize(
    ("model", "profile"),
    [
        (conv_net, {"batch": (1, 1, 1)}),
        (conv_net, {"batch": (4, 4, 4)}),
        (many_ids, {"batch": (1, 1, 1), "length": (1, 1, 1), "past": (0, 1, 2)}),
    ],
)
def test_a_profile_of_one_size_is_traced(model, profile):
    """Tracing needs two sizes, and that of the example among them; torch refuses anything else."""
    program = trace_program(load_model(ModelSource.of(model)), (), ShapeProfile.parse(profile))
    assert min(size.upper for size in program.exported.range_constraints.values()) == max(3, profile["batch"][2])

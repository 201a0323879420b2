"""What a failed export says."""

import pytest
import torch

from ditto_core.errors import BuildError
from ditto_core.model.export import export
from ditto_core.model.export_failure import export_failure
from ditto_core.model.loading import load_model
from ditto_core.spec import ModelSource
from tests.models import tapped_net
from tests.module_models import complains


def test_the_innermost_reason_is_told_with_the_models_own_line_and_a_way_out(tmp_path):
    with pytest.raises(BuildError) as failed:
        export(load_model(ModelSource.of(complains)), tmp_path)
    told = str(failed.value)
    assert len(told.splitlines()) == 1
    assert "data-dependent" in told
    assert "module_models.py" in told
    assert "if hidden.sum() > 0" in told
    assert "torch.cond" in told


@pytest.mark.parametrize("opset", [13, 40])
def test_an_opset_that_the_exporter_does_not_write_is_refused(tmp_path, opset):
    with pytest.raises(BuildError, match=f"has no opset {opset}, the exporter wrote 18: give opset=18$"):
        export(load_model(ModelSource.of(tapped_net)), tmp_path, opset=opset)


class Rotating(torch.nn.Module):
    def forward(self, z):
        return {"turned": torch.view_as_complex(z) * 1j} if not z.is_complex() else {"length": z.abs()}


@pytest.mark.parametrize(("name", "z"), [("z", torch.ones(3, dtype=torch.complex64)), ("turned", torch.ones(3, 2))])
def test_complex_inputs_and_outputs_are_refused_by_name(tmp_path, name, z):
    with pytest.raises(BuildError, match=rf"complex numbers \('{name}'\).* torch.view_as_real"):
        export(load_model(ModelSource.of(lambda: (Rotating(), {"z": z}))), tmp_path)


def test_causes_are_followed_to_their_end_without_colours():
    def fail():
        raise ValueError("\n\x1b[96mNo ONNX function found\x1b[0m for aten.frob\nmore")

    outer = RuntimeError("step 3 of 3")
    with pytest.raises(ValueError, match="frob") as inner:
        fail()
    outer.__cause__ = inner.value
    told = export_failure("net", outer)
    assert told.startswith("net could not be exported: No ONNX function found for aten.frob at ")
    assert "test_export_failure.py" in told
    assert "write it with others" in told


def test_torchs_own_symbols_are_left_out():
    said = "Could not guard on data-dependent expression Eq(u3, 0) (unhinted: Eq(u3, 0)).  (Size-like symbols: u3)"
    told = export_failure("net", RuntimeError(said + "\n\nmore"))
    assert told.startswith("net could not be exported: Could not guard on data-dependent expression Eq(u3, 0); its ")


def test_a_node_that_cannot_be_translated_is_told_by_site_and_line():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.act = torch.nn.Tanh()

        def forward(self, x):
            return self.act(x) + 1

    program = torch.export.export(Net(), (torch.zeros(2),), strict=False)
    told = export_failure("net", RuntimeError("Error when translating node %tanh : [num_users=1]"), program)
    assert " at act, " in told
    assert "self.act(x) + 1" in told


class Windowed(torch.nn.Module):
    """Makes a tensor of float32, whatever its own dtype is."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) @ torch.eye(4)


@pytest.mark.parametrize(
    ("module", "shape", "advice"),
    [
        (Windowed, (2, 4), "a tensor made in the model has a fixed dtype: give it that of the weights or inputs"),
        (lambda: torch.nn.LocalResponseNorm(3), (1, 4, 2, 2), "no such kernel in this dtype on a CPU: dtype='float32'"),
    ],
)
def test_a_model_that_does_not_run_in_half_precision_is_told_what_helps(tmp_path, module, shape, advice):
    source = ModelSource.of(lambda: (module(), {"x" if module is Windowed else "input": torch.randn(shape)}))
    with pytest.raises(BuildError) as failed:
        export(load_model(source), tmp_path, dtype=torch.float16)
    assert str(failed.value).endswith(advice)
    assert "could not be run: " in str(failed.value)

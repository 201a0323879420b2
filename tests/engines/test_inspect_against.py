"""``ditto inspect A --against B``: what two builds are made of, module by module."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from ditto_core.backends.base import EngineLayer, EngineTensor, Inspection
from ditto_core.cli import application
from ditto_core.engines.difference import by_module, changed_modules, differences
from ditto_core.spec import EngineSpec


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    return net.eval(), {"input": torch.ones(2, 4)}


@pytest.fixture(scope="module")
def engines(workspace):
    return {kind: workspace.build(EngineSpec.of(model, dtype=kind)) for kind in ("float32", "float16")}


def inspected(*arguments):
    found = CliRunner().invoke(application(), ["inspect", *map(str, arguments)])
    assert found.exit_code == 0, found.output
    return found.output


def test_the_precision_of_each_module_is_told(engines):
    ours, theirs = engines["float16"].directory, engines["float32"].directory
    changes = {(c["kind"], c["place"]): c for c in json.loads(inspected(ours, "--against", theirs, "--json"))}
    assert changes["setting", "dtype"]["before"] == "float32"
    assert changes["setting", "dtype"]["now"] == "float16"
    assert changes["input", "input"]["now"].startswith("float16 [")
    assert "float32" in changes["module", "0"]["before"]
    assert "float16" in changes["module", "0"]["now"]
    assert [place for kind, place in changes if kind == "module"] == ["0", "1", "2"]
    text = inspected(ours, "--against", theirs)
    assert text.startswith(f"{len(changes)} differences, 3 modules")


def test_an_engine_does_not_differ_from_itself(engines):
    ours = engines["float32"].directory
    assert inspected(ours, "--against", ours).startswith("0 differences")


def inside(*layers):
    return Inspection((EngineTensor("x", "float32", ("batch", 4)),), (), layers)


def test_fusions_are_told_in_each_module_and_kernels_are_not(engines):
    engine = engines["float32"]
    apart = inside(EngineLayer("a", "gemm", "k1", ("0",)), EngineLayer("b", "gelu", "k2", ("1",)))
    fused = inside(EngineLayer("ab", "gemm", "k3", ("0", "1")))
    found = differences(engine, fused, engine, apart)
    assert [(c.place, c.before, c.now) for c in found] == [
        ("0", "gemm", "gemm fused with 1"),
        ("1", "gelu", "gemm fused with 0"),
    ]
    again = inside(EngineLayer("a", "gemm", "other", ("0",)), EngineLayer("b", "gelu", "k2", ("1",)))
    assert differences(engine, again, engine, apart) == []


def test_operators_are_counted_and_those_of_no_module_have_a_place():
    layers = [EngineLayer(str(i), "Cast", dtypes=("float16",)) for i in range(3)]
    assert by_module(layers) == {"(no module)": {"Cast float16": 3}}
    [change] = changed_modules(by_module(layers[:1]), by_module(layers))
    assert (change.before, change.now) == ("", "2 x Cast float16")

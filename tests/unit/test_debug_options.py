"""The options of ``ditto debug`` as users of Polygraphy write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from typer.main import get_command

from ditto_core.cli.debug import app
from ditto_core.errors import UsageError

COMMANDS = get_command(app).commands


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(name, *words):
    command = COMMANDS[name]
    return command.make_context(name, [*words], resilient_parsing=False).params


@pytest.mark.parametrize(
    "words",
    [
        ("m.onnx", "--fail-regex", "A", "B", "--check", "true"),
        ("--fail-regex", "A", "B", "m.onnx", "--check", "true"),
        ("--fail-regex", "A", "--fail-regex", "B", "m.onnx", "--check", "true"),
        ("--fail-regex", "A", "B", "--output", "r.onnx", "m.onnx", "--check", "true", "--fail-regex", "C"),
    ],
)
def test_an_option_of_a_list_takes_several_words(words):
    found = parsed("reduce", *words)
    assert (found["fail_regex"], found["model"].name) == (["A", "B"], "m.onnx")


def test_other_lists_and_numbers():
    found = parsed("reduce", "m.onnx", "--artifacts", "a", "b", "c", "--fail-code", "1", "-6", "--check", "x y")
    assert ([p.name for p in found["artifacts"]], found["fail_code"]) == (["a", "b", "c"], [1, -6])


def test_a_command_behind_dashes_keeps_its_words():
    found = parsed(
        "repeat", "--until", "2", "--artifacts", "a", "b", "--", "python", "--fail-regex", "x", "y", "--mode"
    )
    assert [p.name for p in found["artifacts"]] == ["a", "b"]
    assert found["command"] == ["python", "--fail-regex", "x", "y", "--mode"]
    found = parsed("repeat", "--until", "2", "--artifacts", "a", "python", "x.py")
    assert found["command"] == ["python", "x.py"]


@pytest.mark.parametrize(
    ("command", "option", "instead"),
    [
        ("reduce", "--mode=bisect", "delta debugging"),
        ("reduce", "--min-good", "minimal"),
        ("reduce", "--model-input-shapes", "--inputs"),
        ("precision", "--dir", "ranked"),
        ("precision", "--precision", "--keep"),
    ],
)
def test_polygraphys_options_without_a_counterpart_say_what_to_do(command, option, instead):
    with pytest.raises(UsageError, match=instead) as error:
        parsed(command, "m.onnx", option, "x", "--check", "true")
    assert option.partition("=")[0] in str(error.value)


def test_inputs_have_polygraphys_name_too():
    assert parsed("reduce", "m.onnx", "--load-inputs", "in.json")["inputs"].name == "in.json"


def chain(path):
    """Write a model without inputs: constants added, divided by zero, and multiplied."""
    weights = [numpy_helper.from_array(np.full(3, x, np.float32), n) for n, x in (("one", 1), ("zero", 0), ("two", 2))]
    nodes = [
        helper.make_node("Add", ["one", "two"], ["sum"]),
        helper.make_node("Div", ["sum", "zero"], ["quotient"]),
        helper.make_node("Mul", ["quotient", "two"], ["out"]),
    ]
    end = helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, [3])
    graph = helper.make_graph(nodes, "chain", [], [end], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)


def test_a_model_without_inputs_is_reduced_by_a_check_and_its_own_file_is_an_artifact(inside):
    chain("bad.onnx")
    check = "sh -c '! grep -q Div polygraphy_debug.onnx'"
    words = ["bad.onnx", "-o", "small.onnx", "--artifacts", "polygraphy_debug.onnx", "--check", check]
    COMMANDS["reduce"].main(words, standalone_mode=False)
    small = onnx.load("small.onnx")
    assert [node.op_type for node in small.graph.node] == ["Div"]
    assert [value.name for value in small.graph.input] == ["sum"]
    kept = inside / "ditto_debug_artifacts"
    assert all(b"Div" in path.read_bytes() for path in (kept / "bad").iterdir())
    assert not any(b"Div" in path.read_bytes() for path in (kept / "good").iterdir())
    assert len([*(kept / "good").iterdir()]) >= 1


def test_a_model_without_inputs_is_compared_with_a_good_one():
    chain("bad.onnx")
    good = onnx.load("bad.onnx")
    [zero] = [w for w in good.graph.initializer if w.name == "zero"]
    zero.CopyFrom(numpy_helper.from_array(np.full(3, 4, np.float32), "zero"))
    onnx.save(good, "good.onnx")
    COMMANDS["reduce"].main(["bad.onnx", "-o", "small.onnx", "--reference", "good.onnx"], standalone_mode=False)
    assert [node.op_type for node in onnx.load("small.onnx").graph.node] == ["Div"]


class PersonWhoSeesDivisions:
    """Stands in for a person at the terminal: a model with a division is bad."""

    def readline(self):
        return "bad\n" if b"Div" in Path("polygraphy_debug.onnx").read_bytes() else "good\n"


def test_a_person_who_judges_each_part_reduces_a_model(monkeypatch, capsys):
    chain("bad.onnx")
    monkeypatch.setattr("sys.stdin", PersonWhoSeesDivisions())
    COMMANDS["reduce"].main(["bad.onnx", "-o", "small.onnx", "--interactive"], standalone_mode=False)
    assert [node.op_type for node in onnx.load("small.onnx").graph.node] == ["Div"]
    asked = capsys.readouterr().err
    assert "Is polygraphy_debug.onnx good? (the whole model, which must fail) [g]ood, [b]ad: " in asked
    assert "[s]kip" not in asked

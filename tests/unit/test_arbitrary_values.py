"""Arbitrary values into every public function and option: what comes out is a result or the project's own error."""

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ditto_core
from ditto_core.cli import COMMANDS as COMMANDS_OF_DITTO
from ditto_core.cli import GROUPS, application, main
from ditto_core.dumps import open_dump
from ditto_core.dumps.namemap import NameMap
from ditto_core.errors import DittoError
from ditto_core.gates import GateResult
from ditto_core.gates.baseline import Baseline
from ditto_core.gates.suite import load_suite
from ditto_core.stepping.prompts import encode
from tests.unit.hand_made import compared

TENSORS = st.sampled_from(
    [
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.full((2, 2), float("nan")),
        torch.ones(3, dtype=torch.int64),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.bool),
        torch.ones(4, 4).t()[::2],
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(1).expand(3),
        torch.empty(2, device="meta"),
        torch.sparse_coo_tensor([[0]], [1.0], (2,)),
        np.ones(3, np.float16),
        np.array(["a"], dtype=object),
        np.array("2020", dtype="datetime64"),
    ]
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_characters="/"), max_size=12),
    st.sampled_from(
        ["", ".", "-", "eager", "float32", "int4", "onnxruntime", "**", "model.layers.*", "nan", "1e-3", "cuda:9"]
    ),
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXTS,
    st.binary(max_size=8),
    TENSORS,
    st.sampled_from([object(), int, len, lambda: None, Path("missing"), {1, 2}, range(3), iter(()), torch.float16, 1j]),
)
KEYS = st.one_of(TEXTS, st.integers(-2, 5), st.none())
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=5,
)
PROPERTY = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)

FUNCTIONS = {
    "assert_close": ditto_core.assert_close,
    "compare_dumps": ditto_core.compare_dumps,
    "compare_engine": ditto_core.compare_engine,
    "build": ditto_core.build,
    "open_session": ditto_core.open_session,
    "Pair": ditto_core.Pair,
    "PairOptions": ditto_core.PairOptions,
    "Tolerance": ditto_core.Tolerance,
    "Tolerance.of": ditto_core.Tolerance.of,
    "EngineSpec.of": ditto_core.EngineSpec.of,
    "ModelSource.of": ditto_core.ModelSource.of,
    "ShapeProfile.of": ditto_core.ShapeProfile.of,
    "Trace.open": ditto_core.Trace.open,
    "Engine.load": ditto_core.Engine.load,
    "Comparison.load": ditto_core.Comparison.load,
    "Comparison.from_json": ditto_core.Comparison.from_json,
    "Comparison.filter": compared({(0, "lm_head"): 1e-3}).filter,
    "Comparison.judged": compared({(0, "lm_head"): 1e-3}).judged,
}
"""The public functions; of the classes those that people call."""
DOCUMENTED = {
    "open_dump": open_dump,
    "NameMap.of": NameMap.of,
    "GateResult.load": GateResult.load,
    "Baseline.load": Baseline.load,
    "load_suite": load_suite,
    "prompts of Pair.generate": encode,
}
"""Functions of other modules that documentation names, and what reads the prompts of a pair's methods."""
OTHERWISE = {"DittoError", "Workspace", "__version__", "tap", "EngineSpec", "ModelSource", "ShapeProfile"}
"""An error, a folder of caches, a text, a mark in a model's code, and plain data that ``of`` checks."""


def test_every_public_name_is_called():
    called = {name.partition(".")[0] for name in FUNCTIONS}
    assert called | OTHERWISE == {*ditto_core.__all__}


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """What is written goes to a folder of the test; nothing is looked for on the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DITTO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def parameters(function):
    """Return the parameters that are given: those without a default always, the others now and then."""
    return [
        p for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


@pytest.mark.parametrize("name", [*FUNCTIONS, *DOCUMENTED])
def test_a_function_takes_a_value_or_refuses_it_in_one_line(name):
    function = {**FUNCTIONS, **DOCUMENTED}[name]
    known = parameters(function)

    @PROPERTY
    @given(st.data())
    def refuse(data):
        given_ = {
            p.name: data.draw(VALUES, p.name)
            for p in known
            if p.default is p.empty or data.draw(st.integers(0, 3)) == 0
        }
        try:
            function(**given_)
        except DittoError as error:
            assert "\n" not in str(error)
        except AssertionError:
            assert name == "assert_close"

    refuse()


def commands(command, path=()):
    """Yield every command of the application with the words that call it."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))
    else:
        yield path, command


COMMANDS = dict(commands(typer.main.get_command(application())))
STARTS_PYTEST = {("cache", "needs"), ("cache", "fetch")}
"""Commands that collect tests in a process of its own, which takes four seconds."""


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_command_takes_a_value_or_refuses_it_in_one_line(path, monkeypatch, capsys):
    known = COMMANDS[path].params

    @settings(PROPERTY, max_examples=3 if path in STARTS_PYTEST else 25)
    @given(st.data())
    def refuse(data):
        words = [*path]
        for parameter in known:
            if parameter.name == "help" or not (parameter.required or data.draw(st.integers(0, 4)) == 0):
                continue
            option = [parameter.opts[-1]] if parameter.param_type_name == "option" else []
            flag = bool(option) and parameter.is_flag
            words += option if flag else [*option, data.draw(TEXTS, parameter.name)]
        monkeypatch.setattr(sys, "argv", ["ditto", *words])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr().err
        assert end.value.code in (0, 1, 2, None), words
        assert "Traceback" not in shown

    refuse()


def test_every_command_is_called():
    assert {path[0] for path in COMMANDS} == {*COMMANDS_OF_DITTO, *GROUPS}

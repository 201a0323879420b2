"""Sessions in a child process: the same tensors, and an engine that dies is an error of its own sequence alone."""

import pytest
import torch
from crashing_backend import AbortingBackend, CrashingBackend
from models import llama

from ditto_core.backends.child import open_backend, pack, unpack
from ditto_core.backends.onnxruntime import OnnxRuntimeBackend
from ditto_core.errors import BuildError, RunError, UsageError
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.session import ShowsCache
from ditto_core.spec import EngineSpec
from ditto_core.testing.stepping import held
from ditto_core.testing.subject import run, same, tokens


@pytest.fixture(scope="module")
def engine(workspace):
    return workspace.build(EngineSpec.of(llama, outputs=["model.layers.*", "lm_head"]))


@pytest.fixture(scope="module")
def crashing(engine):
    session = open_backend(CrashingBackend(), engine.spec, engine.directory, engine.taps, "process")
    yield session
    session.close()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool], ids=str
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (2, 4, 0, 16)], ids=str)
def test_tensors_of_every_dtype_and_shape_pass(dtype, shape):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    passed = unpack(pack(tensor))
    assert (passed.dtype, passed.shape) == (dtype, tensor.shape)
    assert torch.equal(passed, tensor)
    columns = torch.eye(3, dtype=dtype)[:, 1:]
    assert torch.equal(unpack(pack(columns)), columns)


def test_a_session_in_a_child_process_has_the_same_bits_taps_and_cache_and_leaves_nothing(engine):
    before = held()
    here, there = engine.open(), engine.open("process")
    try:
        assert same(run(here, tokens()), run(there, tokens()))
        assert there.taps == here.taps
        assert there.info.facts == {**here.info.facts, "isolation": "process"}
        assert isinstance(there, ShowsCache)
        assert here.past.keys() == there.past.keys()
        for name, cache in here.past.items():
            assert torch.equal(there.past[name], cache)
    finally:
        here.close()
        there.close()
    there.close()
    assert held() == before


@pytest.mark.parametrize(
    ("token", "reason"),
    [(10, "signal 6"), (11, "signal 11"), (12, "signal 9"), (13, "without an answer"), (14, r"0.5 s")],
    ids=["abort", "segfault", "kill", "leave", "hang"],
)
def test_an_engine_that_dies_is_an_error_with_reason_and_log_and_the_next_sequence_works(crashing, token, reason):
    prefill, step = tokens(steps=1)
    run(crashing, [prefill])
    crashing._worker._timeout = 0.5 if token == 14 else 120
    step["input_ids"][:] = token
    with pytest.raises(RunError) as caught:
        crashing.step(step, lambda site, tensor: None)
    headline, *log = str(caught.value).splitlines()
    assert "crashing engine" in headline
    assert reason in headline
    assert any("caches fails" in line or "crashing_backend.py" in line for line in log)
    with pytest.raises(RunError, match="start"):
        crashing.step(step, lambda site, tensor: None)


def test_an_exception_leaves_the_process_alive(crashing):
    prefill, step = tokens(steps=1)
    step["input_ids"][:] = 15
    first = run(crashing, [prefill])
    with pytest.raises(RunError, match="ZeroDivisionError") as caught:
        crashing.step(step, lambda site, tensor: None)
    assert "in step" in str(caught.value)  # the traceback
    worker = crashing._worker
    assert same(first, run(crashing, [prefill]))
    assert crashing._worker is worker


def test_a_sink_that_raises_ends_the_sequence_and_is_what_is_raised(crashing):
    def refuse(site, tensor):
        raise KeyError(site)

    crashing.start(2)
    with pytest.raises(KeyError, match="layers"):
        crashing.step(tokens()[0], refuse)
    assert not crashing._worker.alive


def test_an_engine_that_dies_while_it_loads_is_named(engine):
    with pytest.raises(RunError, match="signal 6"):
        open_backend(AbortingBackend(), engine.spec, engine.directory, engine.taps, "process")


def test_what_the_backend_refuses_is_raised_as_it_is(tmp_path, engine):
    (tmp_path / "engine.onnx").touch()
    with pytest.raises(BuildError) as caught:
        open_backend(OnnxRuntimeBackend(), engine.spec, tmp_path, (), "process")
    assert len(str(caught.value).splitlines()) == 1


def test_a_pair_compares_an_engine_in_a_child_process(workspace, engine):
    pair = Pair(workspace, engine.spec, PairOptions(isolation="process"))
    try:
        found = pair.generate([[3, 1, 4, 1, 5], [2, 7]], max_new_tokens=2)
        assert found, found
        for session in (pair.sessions.engine, pair.sessions.untapped):
            assert session.info.facts["isolation"] == "process"
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"isolation": "proces"}, "did you mean 'process'"),
        ({"isolation": True}, "process or none"),
        ({"step_timeout": 0}, "more than 0"),
        ({"step_timeout": "1m"}, "expected seconds"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(options, text):
    with pytest.raises(UsageError, match=text) as caught:
        PairOptions(**options)
    assert len(str(caught.value).splitlines()) == 1

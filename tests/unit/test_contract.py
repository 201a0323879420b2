"""What backends and sessions state about themselves; nothing is inferred from a name."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hand_made import ENGINE, REFERENCE, compared, measured

from ditto_core.backends import registry
from ditto_core.backends.base import BuildsFromSource, Diagnosed, RunsOperators, StoresGraph
from ditto_core.backends.registry import get_backend, libraries
from ditto_core.compare.judging import judge_logits
from ditto_core.compare.text import failure_message
from ditto_core.compare.tokens import measure_logits
from ditto_core.compare.tolerance import Tolerance, quantized_bounds
from ditto_core.compare.verdict import EXPLAINED
from ditto_core.session import SessionInfo

BAD = {(0, "model.layers.0"): 1.0}


@pytest.mark.parametrize("backend", ["trtllm", "trace", "npz"])
def test_a_live_engine_is_no_dump_whatever_its_backend_is_called(backend):
    live = replace(compared(BAD), engine=replace(ENGINE, backend=backend))
    assert "observer effect: not measured" in failure_message(live)
    assert "dump: none" in failure_message(live)
    recorded = replace(live, engine=replace(live.engine, recorded=True), reference=replace(REFERENCE, recorded=True))
    assert "dump: none" not in failure_message(recorded)


@pytest.mark.parametrize(
    ("info", "name"),
    [
        (SessionInfo("e", "mine", "w8a8"), "w8a8"),
        (SessionInfo("e", "mine", "w8a8", quantized=True), "w8a8"),
        (SessionInfo("e", "mine", "float16", quantized=True), "quantized float16"),
    ],
)
def test_an_unknown_quantization_is_judged_by_its_logits_as_strictly_as_int8(info, name):
    verdict = Tolerance().judge(("a",), 0, measured(0.5), info.judged_as)
    assert verdict.status == EXPLAINED
    assert name in verdict.rule
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    wrong = measure_logits(logits.flip(-1), logits, dtype="float32")
    limits = {v.metric: (v.bound, v.ok) for v in judge_logits(wrong, info.judged_as, Tolerance())}
    assert limits == {"kl_mean": (0.0014, False), "top1_disagreement": (0.05, False)}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_floats_are_not_quantized(dtype):
    assert quantized_bounds(SessionInfo("e", "mine", dtype).judged_as) is None


def test_what_a_session_states_survives_its_json_form():
    info = SessionInfo("e", "mine", "float16", recorded=True, quantized=True)
    assert SessionInfo.from_json(vars(info) | {"kernels": ()}) == info
    assert not SessionInfo.from_json({"label": "e", "backend": "mine", "dtype": "float16"}).recorded


def test_capabilities_are_asked_for_by_protocol():
    capabilities = (BuildsFromSource, StoresGraph, RunsOperators, Diagnosed)
    table = {name: [isinstance(get_backend(name), c) for c in capabilities] for name in ("onnxruntime", "trtllm")}
    assert table == {"onnxruntime": [False, True, True, False], "trtllm": [True, False, False, True]}


def test_a_backends_libraries_are_those_of_its_own_extras():
    assert set(libraries("onnxruntime")) == {"onnxruntime", "onnxruntime-gpu"}
    assert {"tensorrt", "tensorrt-rtx-cu13-bindings"} <= set(libraries("tensorrt"))
    assert libraries("trtllm") == ("tensorrt-llm",)
    assert libraries("unregistered") == ("unregistered",)


def test_an_onnxruntime_test_loads_no_other_backend(tmp_path, isolated_environment):
    """The whole way of the plugin: header, marker, build, run, receipt, report."""
    (tmp_path / "test_it.py").write_text(
        "import sys, pytest\n"
        "from ditto_core.model.loading import tiny_decoder\n\n\n"
        "def model():\n    return tiny_decoder('llama')\n\n\n"
        "@pytest.mark.ditto_engine(model=model, outputs=['model.layers.0'])\n"
        "def test_it(ditto):\n    ditto.generate([1, 2], max_new_tokens=2).assert_close()\n\n\n"
        "def test_others():\n"
        "    others = ('tensorrt', 'trtllm', 'openvino', 'executorch', 'inductor')\n"
        "    loaded = [n for n in sys.modules if n.startswith(tuple(f'ditto_core.backends.{o}' for o in others))]\n"
        "    assert not loaded, loaded\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_what_runs_a_cached_engine_loads_no_onnx():
    """It takes 0.2 s of every run whose exports and engines are there."""
    code = "import sys, ditto_core.pair.pair, ditto_core.backends.onnxruntime; assert 'onnx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_distributions_are_read_once_for_an_import_path(monkeypatch, tmp_path):
    """Reading them takes 20 ms, which 5,000 tests must not pay twice each."""
    seen, real = [], registry.entry_points
    monkeypatch.setattr(registry, "entry_points", lambda **group: (seen.append(group), real(**group))[1])
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(3):
        assert "onnxruntime" in registry.backend_names()
        registry.get_backend("onnxruntime")
        registry.libraries("onnxruntime")
    assert len(seen) == 1

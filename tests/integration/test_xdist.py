"""Under pytest-xdist: engines are built once, numbers and notes reach the controller, bad input still exits with 4."""

from __future__ import annotations

import re

import pytest

COUNT_BUILDS = """
import os
import pytest
from pathlib import Path
from ditto_core.backends.onnxruntime import OnnxRuntimeBackend

@pytest.fixture(autouse=True)
def counted(monkeypatch):
    build = OnnxRuntimeBackend.build

    def build_and_note(self, request):
        with Path(__file__).with_name("builds").open("a") as log:
            print(os.getpid(), request.spec.outputs, file=log)
        return build(self, request)

    monkeypatch.setattr(OnnxRuntimeBackend, "build", build_and_note)
"""

FOUR = """
import os
import pytest
from pathlib import Path
from tiny import tiny_mlp

@pytest.mark.ditto_engine(model=tiny_mlp)
@pytest.mark.parametrize("x", range(4))
def test_mlp(ditto, x):
    with Path(__file__).with_name("workers").open("a") as log:
        print(os.getpid(), file=log)
    ditto.run().assert_close()

@pytest.mark.ditto_engine(model=tiny_mlp, tolerance=1e-9)
def test_diverges(ditto):
    ditto.run().assert_close()

@pytest.mark.ditto_engine(model=tiny_mlp, bakend="x")
def test_bad_marker(ditto): pass

@pytest.mark.ditto_engine(model=tiny_mlp, outputs="nothing")
def test_bad_selector(ditto): pass
"""


def test_two_workers_build_once_and_report_once(cold_project):
    cold_project.makeconftest(COUNT_BUILDS)
    cold_project.makepyfile(test_it=FOUR)
    result = cold_project.runpytest_subprocess("-n", "2", "--junitxml=junit.xml", "--ditto-dump-dir=dump")
    result.assert_outcomes(passed=4, failed=1, errors=2)
    assert result.ret == pytest.ExitCode.USAGE_ERROR

    builds = (cold_project.path / "builds").read_text().splitlines()
    assert sorted(line.split(" ", 1)[1] for line in builds) == ["('**',)", "()"]  # the tapped engine and the plain one
    assert len(set((cold_project.path / "workers").read_text().split())) == 2

    text = result.stdout.str()
    assert len(re.findall(r"^ditto-engine: 5 comparisons, \d+ sites, worst margin", text, re.MULTILINE)) == 1
    assert len(re.findall(r"x bound  test_it.py::test_diverges  onnxruntime float32: first bad site", text)) == 1
    assert "\nmarker ditto_engine has no argument 'bakend'; did you mean 'backend'? (known: " in text
    assert "\nselector 'nothing' matches none of " in text
    assert text.count("\nbad input in 2 tests: exit code 4\n") == 1
    assert (cold_project.path / "junit.xml").read_text().count('<property name="ditto_worst_margin"') == 5
    assert len(list((cold_project.path / "dump").iterdir())) == 1


GPUS = """
import os
from pathlib import Path

def test_gpu(worker_id):
    with Path(__file__).with_name("gpus").open("a") as log:
        print(worker_id, os.environ["CUDA_VISIBLE_DEVICES"], file=log)
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((), {"gw0 4", "gw1 GPU-7"}), (("--ditto-no-pin-gpus",), {"gw0 4,GPU-7", "gw1 4,GPU-7"})],
)
def test_each_worker_gets_a_gpu_unless_told_otherwise(pytester, isolated_environment, monkeypatch, arguments, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    pytester.makepyfile(test_gpus=GPUS)
    result = pytester.runpytest_subprocess("-n", "2", "--dist=each", *arguments)
    assert result.ret == 0
    assert set((pytester.path / "gpus").read_text().splitlines()) == expected

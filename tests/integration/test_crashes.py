"""Native code that dies while it builds or steps: each end is the failure of its own test, with and without xdist."""

import os
import re

import pytest

DYING = '''
import ctypes
import os
import signal
import time

from ditto_core.backends.onnxruntime import OnnxRuntimeBackend, OnnxRuntimeSession


def use_all_memory():
    """What the kernel does to a process when memory runs out; a whole machine cannot be filled in a test."""
    os.kill(os.getpid(), signal.SIGKILL)


def loop():
    while True:
        time.sleep(0.01)


ENDS = {"abort": os.abort, "segfault": lambda: ctypes.string_at(0), "memory": use_all_memory,
        "exit": lambda: os._exit(0), "loop": loop}


class DyingBackend(OnnxRuntimeBackend):
    name = "dying"

    def build(self, request):
        report = super().build(request)
        self.die(request.spec, "build")
        return report

    def open(self, spec, directory, taps):
        session = DyingSession(spec, directory, taps)
        session.die = lambda: self.die(spec, "step")
        return session

    def die(self, spec, place):
        where, end = os.environ["DITTO_TEST_END_" + spec.model.label.upper()].split("-")
        if where == place:
            print(f"the {place} ends by {end}", flush=True)
            ENDS[end]()


class DyingSession(OnnxRuntimeSession):
    def step(self, inputs, sink):
        self.die()
        return super().step(inputs, sink)
'''
CONFTEST = """
import ditto_core.backends.child

ditto_core.backends.child.BUILD_TIMEOUT = 30.0
"""
ENTRY_POINTS = "[ditto_core.backends]\ndying = dying:DyingBackend\n"
ENDS = ("abort", "segfault", "memory", "exit", "loop")
CASES = [f"{place}-{end}" for place in ("build", "step") for end in ENDS]
REASONS = {
    "abort": r"killed by signal 6 \(abort\)",
    "segfault": r"killed by signal 11 \(segmentation fault\)",
    "memory": r"killed by signal 9 \(out of memory\?\)",
    "exit": "ended without an answer",
    "loop": r"no answer for 30 s \(hang\?\), killed",
}
TEST = """
def {name}():
    torch.manual_seed({seed})
    return torch.nn.Sequential(torch.nn.Linear(4, 4)), {{"input": torch.randn(2, 4)}}

@pytest.mark.ditto_engine(
    model={name}, backend="dying", isolation="process", observer=False, step_timeout=30
)
def test_{name}(ditto):
    ditto.run().assert_close()
"""


@pytest.fixture
def dying(cold_project, monkeypatch):
    """A project in which every end has a test, with a healthy one after it all."""
    cold_project.makepyfile(dying=DYING)
    cold_project.makeconftest(CONFTEST)
    info = cold_project.path / "dying-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dying\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    names = {f"model_{i}": case for i, case in enumerate(CASES)} | {"model_last": "never-abort"}
    for name, case in names.items():
        monkeypatch.setenv(f"DITTO_TEST_END_{name.upper()}", case)
    tests = [TEST.format(name=name, seed=seed) for seed, name in enumerate(names)]
    cold_project.makepyfile("import pytest\nimport torch\n" + "\n".join(tests))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(cold_project.path), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("TMPDIR", str(cold_project.mkdir("temporary")))
    return cold_project


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_every_end_fails_its_own_test_and_leaves_nothing(dying, cold_cache, arguments):
    result = dying.runpytest_subprocess("-p", "no:cacheprovider", "-q", *arguments)
    result.assert_outcomes(passed=1, failed=len(ENDS), errors=len(ENDS))
    sections = re.split(r"\n_+ (?:ERROR at setup of )?test_model_(\d+) _+\n", result.stdout.str())
    shown = dict(zip(map(int, sections[1::2]), sections[2::2], strict=True))
    for i, case in enumerate(CASES):
        place, end = case.split("-")
        what = "the build of the dying engine" if place == "build" else "the dying engine"
        assert re.search(rf"{what} in a child process: {REASONS[end]}", shown[i]), (case, shown[i])
        said = "dying.py" if end in ("abort", "segfault") else f"the {place} ends by {end}"  # the traceback, or a print
        assert re.search(rf"  \| .*{said}", shown[i])
    assert not [*cold_cache.glob("*/.*.tmp")]
    assert not [*(dying.path / "temporary").glob("ditto*")]

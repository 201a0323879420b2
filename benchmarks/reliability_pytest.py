"""Trials on whole runs of pytest: Ctrl-C while native code hangs, and how often eight workers build an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

Trial = Callable[[Path], dict[str, Any]]
PLACES = ("build", "step")
PATIENCE = 600
"""Seconds that a run may take to reach the native code."""

OF_OTHERS = ("torchinductor_", ".ses")
"""What torch and ONNX Runtime put into the folder for temporary files, in every run."""

BACKEND = """
import os
import time
from pathlib import Path

from ditto_core.backends.onnxruntime import OnnxRuntimeBackend, OnnxRuntimeSession


class HangingBackend(OnnxRuntimeBackend):
    name = "hanging"

    def build(self, request):
        with Path(os.environ["TRIAL_BUILDS"]).open("a") as file:
            file.write(f"{request.spec.outputs}\\n")
        report = super().build(request)
        hang("build")
        return report

    def open(self, spec, directory, taps):
        return HangingSession(spec, directory, taps)


class HangingSession(OnnxRuntimeSession):
    def step(self, inputs, sink):
        hang("step")
        return super().step(inputs, sink)


def hang(place):
    if os.environ["TRIAL_PLACE"] == place:
        Path(os.environ["TRIAL_REACHED"]).touch()
        while True:
            time.sleep(0.01)
"""
TESTS = """
import pytest
import torch

def linear():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4)), {{"input": torch.randn(2, 4)}}

@pytest.mark.ditto_engine(model=linear, backend="hanging", isolation="{isolation}", observer={observer})
@pytest.mark.parametrize("x", range({count}))
def test_linear(ditto, x):
    ditto.run().assert_close()
"""


def project(work: Path, place: str, **fields: Any) -> dict[str, str]:
    """Write a project whose backend hangs in a place, and return the environment of its runs."""
    (work / "hanging.py").write_text(BACKEND)
    (work / "test_it.py").write_text(TESTS.format(**fields))
    info = work / "hanging-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ditto_core.backends]\nhanging = hanging:HangingBackend\n")
    (work / "temporary").mkdir()
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(work), *filter(None, sys.path)]),
        "TMPDIR": str(work / "temporary"),
        "DITTO_CACHE_DIR": str(work / "cache"),
        "TRIAL": uuid.uuid4().hex,
        "TRIAL_PLACE": place,
        "TRIAL_REACHED": str(work / "reached"),
        "TRIAL_BUILDS": str(work / "builds"),
    }


def command(work: Path, workers: int) -> list[str]:
    """Return the command of a run; its temporary folders lie beside the one that has to be empty at the end.

    Without the plugin of hypothesis, which imports all of hypothesis when a run ends (1.5 s).
    """
    plugins = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    line = [sys.executable, "-m", "pytest", "-q", *plugins, f"--basetemp={work / 'base'}", "test_it.py"]
    return [*line, "-n", str(workers)] if workers else [*line, "-p", "no:xdist"]


def interrupt_pytest(place: str, workers: int) -> Trial:
    """Press Ctrl-C, which a terminal sends to the whole process group, while a build or a step hangs in a child."""

    def trial(work: Path) -> dict[str, Any]:
        environment = project(work, place, isolation="process", observer=False, count=1)
        with (work / "log").open("w") as log:
            run = subprocess.Popen(
                command(work, workers), cwd=work, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + PATIENCE
        while not (work / "reached").exists() and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        reached = (work / "reached").exists()
        there = [*alive(environment["TRIAL"])]
        used, start = sum(map(cpu_seconds, there)), time.perf_counter()
        os.killpg(run.pid, signal.SIGINT)
        _, status, usage = os.wait4(run.pid, 0)
        while any(alive(environment["TRIAL"])) and time.perf_counter() - start < 60:
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        left = [*left_behind(work, environment["TRIAL"])]
        code = os.waitstatus_to_exitcode(status)
        facts = {
            "processes": len(there),
            "gone_after_seconds": round(seconds, 2),
            "of_cpu": round(usage.ru_utime + usage.ru_stime - used, 2),
            "left": left,
            "code": code,
        }
        return {"ok": reached and not left and code == 2, **facts, "said": (work / "log").read_text()[-300:]}

    return trial


def build_once(workers: int) -> Trial:
    """Let workers of xdist start on one engine at once, with taps and without, and count how often it is built."""

    def trial(work: Path) -> dict[str, Any]:
        environment = project(work, "", isolation="none", observer=True, count=2 * workers)
        done = subprocess.run(
            command(work, workers), cwd=work, env=environment, capture_output=True, text=True, check=False
        )
        builds = sorted((work / "builds").read_text().splitlines())
        ok = done.returncode == 0 and builds == ["('**',)", "()"]
        return {"ok": ok, "builds": builds, "said": done.stdout[-300:]}

    return trial


def left_behind(work: Path, trial: str) -> Iterator[str]:
    """Yield what should be gone: processes, temporary files, unfinished builds, locks that are held."""
    yield from (f"process {pid}" for pid in alive(trial))
    yield from (path.name for path in (work / "temporary").iterdir() if not path.name.startswith(OF_OTHERS))
    yield from (str(path) for path in (work / "cache").glob("*/.*.tmp"))
    for path in (work / "cache").rglob("*.lock"):
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield f"locked {path.name}"
        else:
            lock.release()


def alive(trial: str) -> Iterator[int]:
    """Yield the processes of a trial, by the mark in their environment; a zombie has none."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TRIAL={trial}".encode() in path.read_bytes():
                yield int(path.parent.name)
        except OSError:
            continue


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process and its ended children have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

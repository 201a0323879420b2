"""A backend of another distribution is found, keeps promises and shows up; one that aborts fails its own test."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/backends.md"
METADATA = """Metadata-Version: 2.1
Name: ditto-mine
Version: 1.2.3
Provides-Extra: mine
Requires-Dist: openvino; extra == "mine"
"""
ENTRY_POINTS = "[ditto_core.backends]\nmine = my_package:MyBackend\nfragile = my_package:Fragile\n"
FRAGILE = """

class Fragile(MyBackend):
    name = "fragile"

    def open(self, spec, directory, taps):
        return FragileSession(spec, directory, taps)


class FragileSession(MySession):
    def step(self, inputs, sink):
        if inputs["input_ids"].shape[1] == 1:
            import os

            print("the decoding kernel fails", flush=True)
            os.abort()
        return super().step(inputs, sink)
"""
TESTS = """
import pytest
from ditto_core.testing import backend_checks
from tiny import tiny_llama

CHECKED = {"decoding", "missing_input"}


@pytest.mark.parametrize("check", [c for c in backend_checks("mine") if c.name in CHECKED], ids=str)
def test_kit(check):
    check()


@pytest.mark.ditto_engine(model=tiny_llama, backend="fragile", isolation="process", observer=False)
def test_fragile(ditto):
    ditto.generate([3, 1, 4, 1, 5], max_new_tokens=3).assert_close()


@pytest.mark.ditto_engine(model=tiny_llama, backend="mine")
def test_next(ditto):
    ditto.generate([3, 1, 4, 1, 5], max_new_tokens=3).assert_close()
"""


def wheel(folder: Path) -> Path:
    """Write the backend of docs/backends.md, and one that aborts, as a wheel."""
    code = re.search(r"<!-- example: my_package.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    info = "ditto_mine-1.2.3.dist-info"
    files = {
        "my_package.py": code[1] + FRAGILE,
        f"{info}/METADATA": METADATA,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": ENTRY_POINTS,
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    path = folder / "ditto_mine-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_backend_of_another_distribution(project, tmp_path):
    pytest.importorskip("openvino")
    pytest.importorskip("pip")
    site = tmp_path / "site"
    install = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site), str(wheel(tmp_path))]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    project.makepyfile(test_mine=TESTS)
    paths = [str(site), str(project.path), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(command, env=environment, cwd=project.path, capture_output=True, text=True, check=False)

    done = run("pytest", "-v", "-p", "no:cacheprovider", "--ditto-report=json:run.json")
    assert "1 failed, 3 passed" in done.stdout, done.stdout
    header = next(line for line in done.stdout.splitlines() if line.startswith("ditto-engine:"))
    assert "mine" in header
    assert "test_fragile FAILED" in done.stdout
    assert "signal 6 (abort)" in done.stdout
    assert "the decoding kernel fails" in done.stdout or "my_package.py" in done.stdout
    assert "test_next PASSED" in done.stdout
    (found,) = json.loads((project.path / "run.json").read_text()).values()
    assert found["engine"]["backend"] == "mine"

    doctor = run("ditto_core", "doctor").stdout
    assert "measured in float32" in doctor
    assert re.search(r"^backend mine +ok \(openvino ", doctor, re.MULTILINE)

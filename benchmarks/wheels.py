"""Build the wheel, install it in an empty environment of each Python that is given, and use it there.

python benchmarks/wheels.py ~/.pyenv/versions/3.1*/bin/python --work DIR [--results wheels.jsonl] [--pip-option=...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEST = """
import pytest
import torch
from ditto_core.model.loading import tiny_decoder


def mlp():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return layers, {"input": torch.randn(3, 8)}


@pytest.mark.ditto_engine(model=mlp)
def test_module(ditto):
    ditto.run().assert_close()


@pytest.mark.ditto_engine(model=lambda: tiny_decoder("llama"))
def test_decoder(ditto):
    ditto.generate([3, 1, 4], max_new_tokens=3).assert_close()


@pytest.mark.ditto_engine(model=mlp, tolerance=1e-12)
def test_that_has_to_fail(ditto):
    ditto.run().assert_close()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="+", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--pip-option", action="append", default=[])
    arguments = parser.parse_args()
    wheel = built(arguments.work)
    failed = 0
    for python in arguments.pythons:
        found = smoke(python, wheel, arguments.work, arguments.pip_option)
        failed += not found["passed"]
        line = json.dumps(found)
        print(line, flush=True)
        if arguments.results:
            with arguments.results.open("a") as file:
                file.write(line + "\n")
    sys.exit(bool(failed))


def built(work: Path) -> Path:
    """Build the wheel of this checkout."""
    work.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(work), str(ROOT)], check=True, cwd=work
    )
    return max(work.glob("pytest_ditto_engine-*.whl"), key=lambda path: path.stat().st_mtime)


def smoke(python: Path, wheel: Path, work: Path, options: list[str]) -> dict[str, Any]:
    """Install the wheel into a new environment and run its command and its plugin away from the sources."""
    version = said(python, "-c", "import platform; print(platform.python_version())")
    place = work / f"env-{version}"
    subprocess.run([python, "-m", "venv", "--clear", place], check=True)
    inside = place / "bin" / "python"
    start = time.perf_counter()
    subprocess.run([inside, "-m", "pip", "install", "-q", *options, f"{wheel}[onnxruntime]"], check=True)
    seconds = round(time.perf_counter() - start)
    project = work / f"project-{version}"
    project.mkdir(exist_ok=True)
    (project / "test_smoke.py").write_text(TEST)
    environment = {**os.environ, "DITTO_CACHE_DIR": str(project / "cache"), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)

    def ran(*command: str) -> tuple[int, str]:
        done = subprocess.run(
            [place / "bin" / command[0], *command[1:]],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    checks = {
        "ditto --version": ran("ditto", "--version")[0] == 0,
        "ditto cache ls": ran("ditto", "cache", "ls")[0] == 0,
        "pip check": ran("pip", "check")[0] == 0,
    }
    code, text = ran("pytest", "-q", "-p", "no:cacheprovider")
    checks["two tests pass and the wrong one fails"] = code == 1 and "2 passed" in text and "1 failed" in text
    facts = {"python": version, "install_seconds": seconds, "passed": all(checks.values()), "checks": checks}
    return facts if facts["passed"] else {**facts, "output": text[-3000:]}


def said(*command: Any) -> str:
    """Return what a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()

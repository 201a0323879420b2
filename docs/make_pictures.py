"""Make the pictures of the README: one real failing run, in the terminal and as HTML report.

A tiny Llama is built for ONNX Runtime with the weight of one projection scaled by 1.01. Needs Chromium and Playwright:
``python docs/make_pictures.py`` from the repository's root.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
ROOT = Path(__file__).parent.parent
WIDTH = 150

CONFTEST = """
import pytest
from ditto_core.backends.onnxruntime import ENGINE_FILE, OnnxRuntimeBackend
from ditto_core.model.tiny import tiny_decoder
from tests.faults import scale_weight

tiny_decoder("llama")  # what importing libraries has to say is said here, not in the picture

@pytest.fixture(autouse=True)
def faulty_engine(monkeypatch):
    build = OnnxRuntimeBackend.build

    def build_faulty(self, request):
        report = build(self, request)
        scale_weight(request.directory / ENGINE_FILE, "model.layers.1.mlp.down_proj", 1.01)
        return report

    monkeypatch.setattr(OnnxRuntimeBackend, "build", build_faulty)
"""

TEST = """
import pytest
from ditto_core.model.tiny import tiny_decoder

def tiny_llama():
    return tiny_decoder("llama")

@pytest.mark.ditto_engine(model=tiny_llama, backend="onnxruntime", outputs="**")
def test_engine_matches_eager(ditto):
    run = ditto.generate([[3, 1, 4, 1, 5], [2, 7, 1]], max_new_tokens=6)
    run.assert_close()
"""


def failing_run(folder: Path) -> str:
    """Run the test and return the terminal's output; the report is ``report.html``."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_engine.py").write_text(TEST)
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": str(WIDTH), "OMP_NUM_THREADS": "1"}
    options = ["--ditto-localize", "--ditto-cache-dir=cache", "--ditto-dump-dir=dump"]
    options += ["--ditto-report=html:report.html"]
    quiet = ["--color=yes", "--no-header", "-p", "no:cacheprovider", "-p", "no:logging"]
    command = [sys.executable, "-m", "pytest", "test_engine.py", *options, *quiet]
    for _ in range(2):  # the second finds the engine built, which is how a failure looks on most days
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 1:
        raise SystemExit(f"the test was to fail, pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.replace(f"{folder}/", "")


def terminal(output: str, path: Path, title: str) -> None:
    """Draw a terminal's output, the command in its first line."""
    console = Console(record=True, width=WIDTH, file=Path(os.devnull).open("w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.from_ansi(output))
    drawn = console.export_svg(title=title, unique_id=path.stem)
    path.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL))  # nothing from the network


def report(page: Path, path: Path, height: int = 1490) -> None:
    """Take a screenshot of the report's first screen."""
    from playwright.sync_api import sync_playwright

    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        tab = browser.new_page(viewport={"width": 1280, "height": height})
        tab.goto(page.as_uri())
        tab.wait_for_selector("body[data-state=drawn]", timeout=120_000)
        tab.screenshot(path=str(path))
        browser.close()


def main() -> None:
    """Make both pictures."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = "$ pytest test_engine.py --ditto-localize"
        terminal(f"{command}\n{failing_run(folder)}", IMAGES / "failure.svg", "pytest")
        page = folder / "report.html"
        page.write_text(page.read_text().replace(f"{folder}/", ""))
        report(page, IMAGES / "report.png")


if __name__ == "__main__":
    main()

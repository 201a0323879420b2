"""Size and opening time of the HTML report on real runs: ``python -m benchmarks.report`` from the repository's root."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from ditto_core.compare.comparison import Comparison
from ditto_core.engines.workspace import Workspace
from ditto_core.localize import EVERYTHING
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.report.html import write_html
from ditto_core.spec import EngineSpec
from tests.browser.runs import faulty
from tests.faults import FaultyWorkspace, weights

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
OPENED = 7
MARKS = "performance.getEntriesByType('mark').map((mark) => [mark.name, mark.startTime])"


def deep_model() -> Any:
    """A Llama of 16 layers."""
    return tiny_decoder("llama", layers=16)


def deep(workspace: Workspace, folder: Path) -> Comparison:
    """Every site of 16 layers at 64 steps, with a noise floor, a fault in layer 8 and a dump."""
    broken = FaultyWorkspace(workspace.cache, weights.scaled("model.layers.8.mlp.down_proj", 1.01), folder)
    options = PairOptions(observer=False, dump=folder / "dump")
    pair = Pair(broken, EngineSpec.of(deep_model, outputs=EVERYTHING), options)
    return pair.generate([[3, 1, 4, 1, 5], [2, 7, 1]], max_new_tokens=64)


def opening(path: Path) -> dict[str, float]:
    """Return the milliseconds from navigation to each mark of the page, in a browser that was just started."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-state=drawn]", timeout=120_000)
        marks: list[Any] = page.evaluate(MARKS)
        browser.close()
    return dict(marks)


def main() -> None:
    """Print a line for each report."""
    for make in (faulty, deep):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run, path = make(Workspace(), folder), folder / "report.html"
            begun = time.perf_counter()
            write_html(run, path)
            made = time.perf_counter() - begun
            times = [opening(path) for _ in range(OPENED)]
            size = path.stat().st_size / 1e6
        shown = {mark: [t[mark] for t in times] for mark in ("readable", "drawn")}
        spans = ", ".join(f"{m} {median(v):.0f} ms ({min(v):.0f} to {max(v):.0f})" for m, v in shown.items())
        print(f"{len(run.sites)} sites x {run.steps} steps: {size:.2f} MB, made in {made:.1f} s, {spans}")


if __name__ == "__main__":
    main()

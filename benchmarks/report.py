"""Size and opening time of the HTML report: ``python -m benchmarks.report`` from the repository's root."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from ditto_core.report.html import write_html
from tests.comparisons import faulty, large

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
OPENED = 7
MARKS = "performance.getEntriesByType('mark').map((mark) => [mark.name, mark.startTime])"


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
    for name, make in (("15 sites x 3 steps", faulty), ("300 sites x 64 steps", large)):
        with tempfile.TemporaryDirectory() as folder:
            path, run = Path(folder, "report.html"), make()
            begun = time.perf_counter()
            write_html(run, path)
            made = time.perf_counter() - begun
            times = [opening(path) for _ in range(OPENED)]
            size = path.stat().st_size / 1e6
        shown = {mark: [t[mark] for t in times] for mark in ("readable", "drawn")}
        spans = ", ".join(f"{m} {median(v):.0f} ms ({min(v):.0f} to {max(v):.0f})" for m, v in shown.items())
        print(f"{name}: {size:.2f} MB, made in {made:.1f} s, {spans}")


if __name__ == "__main__":
    main()

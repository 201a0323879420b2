"""A real headless Chromium (Debian's package), driven by Playwright. Where there is none, these tests are skipped."""

from __future__ import annotations

import os
import shutil

import pytest
from filelock import FileLock

from ditto_core.compare.comparison import Comparison
from ditto_core.report.html import write_html
from tests.browser.patience import PATIENCE
from tests.browser.runs import RUNS

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def playwright():
    """Playwright's driver. Its event loop runs in this thread as long as it lives, hence not beyond the file:
    no second one could start, and no other test could run a loop of its own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as driver:
        yield driver


@pytest.fixture(scope="session")
def chromium():
    """The path of the browser's program."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("Chromium is not installed: apt-get install -y chromium")
    return found


@pytest.fixture(scope="module")
def browser(playwright, chromium, tmp_path_factory):
    """A browser context with an empty profile of its own."""
    context = playwright.chromium.launch_persistent_context(
        str(tmp_path_factory.mktemp("profile")),
        executable_path=chromium,
        args=list(FLAGS),
        viewport={"width": 1300, "height": 900},
    )
    context.set_default_timeout(PATIENCE)
    yield context
    context.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the runs and their reports lie: one folder for all workers."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "reports"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def runs(folder, workspace):
    """A run by its name, made by the first who asks."""
    known = {}

    def get(name: str) -> Comparison:
        path = folder / f"{name}.json"
        with FileLock(folder / f"{name}.lock"):
            if not path.exists():
                RUNS[name](workspace, folder / name).save(path)
        if name not in known:
            known[name] = Comparison.load(path)
        return known[name]

    return get


@pytest.fixture(scope="session")
def files(folder, runs):
    """The report of a run."""

    def get(name: str):
        path = folder / f"{name}.html"
        run = runs(name)
        with FileLock(folder / f"{name}.html.lock"):
            if not path.exists():
                write_html(run, path)
        return path

    return get


class Opened:
    """A page, what it asked for over the network, and what it complained about."""

    def __init__(self, context, path) -> None:
        self.page = context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-state=drawn]")

    def find(self, selector: str):
        return self.page.locator(f"main:not([hidden]) {selector}")

    def text(self, selector: str) -> str:
        return self.find(selector).first.inner_text()

    def all(self, selector: str) -> list[str]:
        return self.find(selector).all_inner_texts()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def choose(self, site: str) -> None:
        """Search for a site and open it."""
        self.find(".search").fill(site)
        self.find(f'.list li[title^="{site}: "]').click()

    def chart(self, selector: str) -> dict[str, list]:
        """Return what a chart plots: its columns by name, the horizontal axis under ``x``."""
        return self.find(selector).first.evaluate(
            "node => Object.fromEntries(node.chart.series.map((s, i) => [i ? s.label : 'x', [...node.chart.data[i]]]))"
        )

    def plot(self, title: str) -> dict[str, list]:
        """Return what the chart of a site with this title plots."""
        return self.chart(f'.charts > div:has(h4:text("{title}")) .plot')

    def cell(self, step: int, site: int) -> dict[str, float]:
        """Return where a cell of the heat map lies on the screen, scrolled to its middle: no heading covers it."""
        return self.find(".chart-map").evaluate(
            """(node, [step, site]) => {
                const p = node.place;
                scrollBy(0, node.getBoundingClientRect().y + p.top(step) - innerHeight / 2);
                const box = node.getBoundingClientRect();
                return { x: box.x + p.left(site), y: box.y + p.top(step), width: p.step, height: p.row };
            }""",
            [step, site],
        )

    def restart(self) -> None:
        """Come to the front, which is faster; show the whole list, and the result that the page opens with."""
        self.page.bring_to_front()
        self.find(".search").fill("")
        self.find(".search").blur()
        self.press("f")

    def close(self) -> None:
        self.page.close()
        assert self.errors == []
        assert [url for url in self.requests if not url.startswith(("file:", "data:"))] == []


@pytest.fixture
def opened(browser, files):
    """Open a report; at the end it must have made no complaint and asked for no network."""
    pages = []

    def open_report(name):
        pages.append(Opened(browser, name if hasattr(name, "as_uri") else files(name)))
        return pages[-1]

    yield open_report
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def views(browser, files):
    """Reports that stay open, for tests that look and choose; each finds them as they open."""
    pages = {}

    def get(name):
        if name not in pages:
            pages[name] = Opened(browser, files(name))
        pages[name].restart()
        return pages[name]

    yield get
    for page in pages.values():
        page.close()

"""A real headless Chromium (Debian's package), driven by Playwright. Where there is none, these tests are skipped."""

from __future__ import annotations

import shutil

import pytest

from tests.comparisons import faulty, large, passing, with_nan

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
RUNS = {"passing": passing, "faulty": faulty, "with_nan": with_nan, "large": large}
PATIENCE = 120_000
"""Milliseconds: a busy machine is slow, and nothing here is timed."""


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A browser context with an empty profile of its own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install -y chromium")
    with sync_api.sync_playwright() as playwright:
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
def files(tmp_path_factory):
    """One report for each kind of run, made when it is asked for."""
    from ditto_core.report.html import write_html

    folder = tmp_path_factory.mktemp("reports")

    def make(name: str):
        path = folder / f"{name}.html"
        if not path.exists():
            write_html(RUNS[name](), path)
        return path

    return make


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

    def text(self, selector: str) -> str:
        return self.page.locator(f"main:not([hidden]) {selector}").first.inner_text()

    def all(self, selector: str) -> list[str]:
        return self.page.locator(f"main:not([hidden]) {selector}").all_inner_texts()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)


@pytest.fixture
def opened(browser, files):
    """Open a report; at the end it must have made no complaint and asked for no network."""
    pages = []

    def open_report(name):
        pages.append(Opened(browser, name if hasattr(name, "as_uri") else files(name)))
        return pages[-1]

    yield open_report
    for page in pages:
        page.page.close()
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith(("file:", "blob:", "data:"))] == []

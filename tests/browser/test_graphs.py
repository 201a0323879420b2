"""The errors on the engine's graph, as Model Explorer and Netron show them: the real programs, with our files."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time

import onnx
import pytest

from ditto_core.report.explorer import annotate_onnx, worst_by_value, write_overlay
from tests.browser.conftest import FLAGS
from tests.browser.patience import PATIENCE, until
from tests.browser.runs import DOWN

ALONE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
"""Both pages would call home."""


@pytest.fixture
def page(playwright, chromium):
    """A page that reaches this machine only; Model Explorer draws with WebGL."""
    flags = [flag for flag in FLAGS if flag != "--disable-gpu"]
    drawing = ["--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
    browser = playwright.chromium.launch(executable_path=chromium, args=[*flags, *drawing, ALONE])
    opened = browser.new_page(viewport={"width": 1500, "height": 1000})
    opened.set_default_timeout(PATIENCE)
    yield opened
    browser.close()


@pytest.fixture
def model(folder, runs):
    """The ONNX file of the engine with the fault."""
    assert not runs("faulty")
    return next((folder / "faulty").glob("engine*/engine.onnx"))


@pytest.fixture
def port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def until_it_answers(port):
    """Wait for a server that says its address before it listens."""
    ends = time.monotonic() + PATIENCE / 1000
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < ends, f"nothing listens on port {port}"
            time.sleep(0.1)
        else:
            return


@pytest.fixture
def explorer(runs, model, port, tmp_path):
    """Model Explorer's own server with the ONNX adapter, our overlay loaded; its address."""
    pytest.importorskip("model_explorer_onnx", reason="model-explorer-onnx is not installed")
    write_overlay(runs("faulty"), tmp_path / "errors.json", model)
    options = ["--host=127.0.0.1", f"--port={port}", "--no_open_in_browser", "--skip_health_check"]
    files = ["--extensions=model_explorer_onnx", f"--node_data_paths={tmp_path / 'errors.json'}"]
    command = [sys.executable, "-u", "-m", "model_explorer", str(model), *options, *files]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    for line in server.stdout:
        said.append(line)
        if line.startswith("http"):
            break
    try:
        assert said, "Model Explorer said nothing"
        assert said[-1].startswith("http"), "".join(said)
        until_it_answers(port)
        yield said[-1].strip()
    finally:
        server.send_signal(signal.SIGINT)
        server.kill()
        server.wait()


def test_model_explorer_shows_the_error_of_every_node(page, explorer, runs):
    run = runs("faulty")
    page.goto(explorer)
    stats = page.get_by_text("Aggregated stats")
    stats.wait_for()
    until(page, "/Sum\\s+[\\d.]+/.test(document.body.innerText)")
    body = page.inner_text("body")
    assert "onnxruntime float32 against eager float64: error / bound" in body
    worst = float(re.search(r"Max\s+([\d.]+)", body)[1])
    assert worst == pytest.approx(run.worst.verdict.margin)
    total = float(re.search(r"Sum\s+([\d.]+)", body)[1])
    assert total == pytest.approx(sum(result.verdict.margin for result in worst_by_value(run).values()))


def test_netron_shows_the_error_beside_the_node(page, runs, model, port, tmp_path):
    netron = pytest.importorskip("netron", reason="netron is not installed")
    annotate_onnx(runs("faulty"), model, tmp_path / "annotated.onnx")
    graph = onnx.load(str(tmp_path / "annotated.onnx"), load_external_data=False).graph
    node = next(node.name for node in graph.node if DOWN in node.output)
    netron.start(str(tmp_path / "annotated.onnx"), ("127.0.0.1", port), browse=False)
    try:
        page.goto(f"http://127.0.0.1:{port}")
        page.get_by_text("Accept").click()  # it asks about cookies where it cannot tell the country
        page.wait_for_selector("body.default")
        place = page.locator(f'[id="node-name-{node}"]').first
        place.scroll_into_view_if_needed()
        place.click(force=True)
        shown = page.locator("#sidebar")
        shown.get_by_text("METADATA").wait_for()
        said, names = shown.inner_text(), shown.locator("input")
        keys = [names.nth(i).input_value() for i in range(names.count())]
    finally:
        netron.stop(("127.0.0.1", port))
    bad = next(r for r in runs("faulty") if r.site == DOWN)
    assert {"ditto_site", "ditto_margin", "ditto_verdict", "ditto_max_abs"} <= set(keys)
    assert DOWN in said
    assert f"{bad.verdict.margin:.4g}" in said
    assert f"step {bad.step}: {bad.verdict}" in said

"""The HTML report in a real browser: every view, on runs that pass, fail, hold NaN, and are large."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from PIL import Image

from ditto_core.report.html import LIMIT, html_report, write_html
from ditto_core.trace import TraceWriter
from tests.comparisons import comparison, faulty, names, passing

BAD = "model.layers.1.mlp.down_proj"


def pixels(page, selector: str) -> Counter[tuple[int, int, int]]:
    """Take a screenshot of one element and count its colours."""
    shot = page.locator(f"main:not([hidden]) {selector}").first.screenshot()
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    return Counter(image.get_flattened_data() if hasattr(image, "get_flattened_data") else image.getdata())


def orange(color: tuple[int, int, int]) -> bool:
    """Tell whether a colour is one of those above the bound."""
    red, green, blue = color
    return red > 90 and red > 1.4 * green and green > blue


def blue(color: tuple[int, int, int]) -> bool:
    """Tell whether a colour is one of those below the bound."""
    red, green, blue = color
    return blue > 120 and blue > 1.3 * red and green > red


def share(counts: Counter[tuple[int, int, int]], of) -> float:
    """Return which share of the pixels has a colour."""
    return sum(n for color, n in counts.items() if of(color)) / counts.total()


def test_passing_run_says_so_and_has_no_orange_cell(opened):
    report = opened("passing")
    assert report.text(".badge") == "✓ agrees"
    assert report.text("h1").startswith("engine agrees: worst is")
    colors = pixels(report.page, ".chart-map")
    assert share(colors, blue) > 0.05
    # The colour bar is the only place with orange.
    assert share(colors, orange) < 0.01


def test_faulty_run_opens_at_the_first_bad_site(opened):
    report = opened("faulty")
    assert report.text(".badge") == "✗ does not agree"
    assert report.text("h1") == f"engine diverges at {BAD}, step 0: rel_l2 1.0e-02 > 4.0e-06 (4 x noise floor 1.0e-06)"
    assert report.text(".panel h3") == f"{BAD}, step 0"
    assert "models/tiny.py:" in report.text(".provenance")
    assert report.text(".list li[aria-selected=true]").split() == ["✗", BAD, "2500"]
    assert share(pixels(report.page, ".chart-map"), orange) > 0.015


def test_states_show_without_their_colours(opened):
    report = opened("faulty")
    brown = pixels(report.page, ".chart-map")
    plain, hatched = ((127, 59, 8), tuple(round(c * 0.58) for c in (127, 59, 8)))
    near = {
        name: sum(n for c, n in brown.items() if max(abs(a - b) for a, b in zip(c, want, strict=True)) < 8)
        for name, want in (("plain", plain), ("hatched", hatched))
    }
    assert 0.5 < near["plain"] / near["hatched"] < 2


def test_nan_run_names_where_it_begins(opened):
    report = opened("with_nan")
    assert report.text("h1").startswith("engine diverges at model.layers.0.mlp, step 1: rel_l2 inf")
    assert "not finite: engine 1 NaN and 0 Inf, reference 0 NaN" in report.text(".verdict")
    assert "! not finite" in report.text(".panel")
    assert "[0, 1, 2, actual]" in report.text(".numbers")
    assert report.text(".list li[aria-selected=true] .glyph") == "!"


def test_large_run_stays_below_the_limit_and_shows_every_site(opened, files):
    assert files("large").stat().st_size < LIMIT
    report = opened("large")
    assert report.page.locator(".list li").count() == 300
    assert report.text(".panel h3") == "model.layers.21.self_attn.o_proj, step 1"
    colors = pixels(report.page, ".chart-map")
    assert share(colors, blue) > 0.1
    assert share(colors, orange) > 0.1


def test_large_run_says_which_details_it_left_out(opened):
    report = opened("large")
    report.page.locator(".search").fill("model.layers.3.self_attn.q_proj")
    report.page.locator(".list li").first.click()
    assert "Details of this result were left out" in report.text(".panel")
    report.page.locator(".panel a").first.click()
    assert "All metrics" in report.text(".panel")


def test_keys_walk_through_sites_steps_and_failures(opened):
    report = opened("faulty")
    report.press("j")
    assert report.text(".panel h3") == "model.layers.1.mlp, step 0"
    report.press("l", "k")
    assert report.text(".panel h3") == f"{BAD}, step 1"
    report.press("p")
    assert report.text(".panel h3") == "model.layers.1, step 0"
    report.press("n")
    assert report.text(".panel h3") == f"{BAD}, step 1"
    report.press("f")
    assert report.text(".panel h3") == f"{BAD}, step 0"
    report.press("?")
    assert report.page.locator("#help").is_visible()


def test_search_finds_by_name_and_by_source_line(opened):
    report = opened("faulty")
    report.press("/")
    report.page.keyboard.type("layers.1 q_proj")
    assert [line.split()[1] for line in report.all(".list li")] == ["model.layers.1.self_attn.q_proj"]
    report.page.locator(".search").fill("tiny.py:10 ")
    report.press("Enter")
    assert report.text(".panel h3") == "model.embed_tokens, step 0"
    report.page.locator(".search").fill("")
    report.page.locator(".failing").check()
    assert len(report.all(".list li")) == 3


def test_a_click_on_the_heat_map_opens_the_cell(opened):
    report = opened("faulty")
    heat = report.page.evaluate(
        """() => {
            const node = document.querySelector('.chart-map'), l = node._fullLayout, r = node.getBoundingClientRect();
            return [r.x + l.xaxis._offset + l.xaxis.l2p(2), r.y + l.yaxis2._offset + l.yaxis2.l2p(1)];
        }"""
    )
    report.page.mouse.click(*heat)
    assert report.text(".panel h3") == f"{names(2)[2]}, step 1"


def test_the_address_keeps_the_place(opened):
    report = opened("faulty")
    report.press("l", "j")
    report.page.reload()
    report.page.wait_for_selector("body[data-state=drawn]")
    assert report.text(".panel h3") == "model.layers.1.mlp, step 1"


def test_tokens_mark_flips_and_near_ties(opened):
    report = opened("faulty")
    assert report.all(".ids li")[:3] == ["0", "✗ 99 1", "≈ 99 2"]
    assert report.page.locator(".ids li.flip").count() == 1
    assert "1 of 3 agree, 1 flips, 1 near ties" in report.text("section.tokens")
    assert "Hey <you>" in report.text("section.tokens")
    assert report.page.locator(".chart-kl .scatterlayer .trace").count() == 2


def test_charts_of_a_result(opened):
    report = opened("faulty")
    titles = report.all(".charts h4")
    assert titles[0] == "|difference| of 64 elements"
    assert titles[2:] == ["rel-L2 by position", "rel-L2 by row"]
    assert "No tensors were kept" in report.text(".charts")
    positions = report.page.locator(".charts > div").nth(2).locator(".bars path")
    assert positions.count() == 4


@pytest.fixture
def dumped(tmp_path):
    """A faulty comparison with a dump of the first bad site at step 0: 6,400 elements, one far off."""
    run = faulty()
    taps = [tap for tap in run.taps if tap.site == BAD]
    reference = torch.linspace(-1, 1, 6400).reshape(2, 4, 800)
    engine = reference.clone()
    engine[1, 2, 3] = 40.0
    for side, info, tensor in (("engine", run.engine, engine), ("reference", run.reference, reference)):
        with TraceWriter(tmp_path / "dump" / side, info, taps) as writer:
            writer.write_step({}, {}, {BAD: tensor})
    path = tmp_path / "dumped.html"
    write_html(replace(run, dump=str(tmp_path / "dump")), path)
    return path


def test_scatter_says_how_much_it_shows(opened, dumped):
    report = opened(dumped)
    assert "of 6400 elements, drawn at random, and the 1 worst" in report.text(".charts > div:nth-child(2) h4")
    assert report.page.locator(".charts > div:nth-child(2) .scatterlayer .trace").count() == 3
    assert report.all(".elements td")[:2] == ["[1, 2, 3]", "40"]
    assert report.text(".elements tr").startswith("index (batch, length, ·)")


def test_theme_follows_the_system_and_the_button(opened):
    report = opened("passing")

    def back() -> str:
        return report.page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = back()
    report.page.emulate_media(color_scheme="dark")
    report.page.wait_for_selector("html[data-theme=dark]")
    dark = back()
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(18, 22, 27)")
    report.page.locator("#theme").click()
    assert back() == light
    most = pixels(report.page, ".chart-map").most_common(1)[0][0]
    assert most == (255, 255, 255)


def test_print_is_light_and_leaves_the_controls_out(opened, tmp_path):
    report = opened("faulty")
    report.page.emulate_media(color_scheme="dark")
    report.page.wait_for_selector("html[data-theme=dark]")
    report.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    report.page.emulate_media(media="print", color_scheme="dark")
    assert report.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not report.page.locator("#theme").is_visible()
    assert not report.page.locator(".search").first.is_visible()
    assert report.page.locator("section.worst").is_visible()
    assert report.page.pdf(format="A4").startswith(b"%PDF")


@dataclass
class NamedCause:
    kind: str = "scaled_weight"
    site: str = BAD
    confidence: float = 0.97
    evidence: tuple[str, ...] = ("the engine's output is 1.01 x the reference's <exactly>",)
    next_step: str = "compare the weight with the checkpoint"


def test_causes_are_shown_with_their_evidence(opened, tmp_path):
    run = faulty()
    object.__setattr__(run, "causes", (NamedCause(),))
    path = tmp_path / "cause.html"
    path.write_text(html_report(run))
    shown = opened(path).text(".causes")
    assert "scaled_weight at" in shown
    assert "confidence 97 %" in shown
    assert "1.01 x the reference's <exactly>" in shown
    assert "next: compare the weight with the checkpoint" in shown


def test_several_comparisons_in_one_page(opened, tmp_path):
    path = tmp_path / "both.html"
    write_html({"t.py::test_a": passing(), "t.py::test_b": faulty()}, path)
    report = opened(path)
    assert report.text(".badge") == "✓ agrees"
    report.page.locator("#runs").select_option(label="✗ t.py::test_b")
    assert report.text(".badge") == "✗ does not agree"
    assert report.text(".panel h3") == f"{BAD}, step 0"
    assert "pytest 't.py::test_b'" in report.text(".notes")


def test_a_run_of_one_step_without_tokens(opened, tmp_path):
    path = tmp_path / "one.html"
    run = comparison(("conv", "linear"), 1, lambda step, i: 0.0, tokens=False)
    write_html(replace(run, missing={"pool": "the engine has no such output"}), path)
    report = opened(path)
    assert "This run generated no tokens." in report.text("section.tokens")
    assert "the engine has no such output" in report.text("section.worst")

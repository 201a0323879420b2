"""Working with the HTML report: keys, search, mouse, address; dark, light and printed; for eyes that lack a colour."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from PIL import Image

from ditto_core.report.html import write_html
from ditto_core.trace import TraceWriter
from tests.browser.patience import until
from tests.browser.pictures import black, blue, contrast, counted, orange, pixels, share
from tests.browser.runs import DOWN, RUNS
from tests.comparisons import comparison, faulty

AFTER = ("model.layers.1", "model.norm", "lm_head:in", "lm_head")
BEFORE = "model.layers.1.mlp.down_proj:in"


def test_keys_walk_through_sites_steps_and_failures(opened):
    report = opened("faulty")
    report.press("j")
    assert report.text(".panel h3") == f"{AFTER[0]}, step 0"
    report.press("l", "k")
    assert report.text(".panel h3") == f"{DOWN}, step 1"
    report.press("p")
    assert report.text(".panel h3") == f"{AFTER[-1]}, step 0"
    report.press("n")
    assert report.text(".panel h3") == f"{DOWN}, step 1"
    report.press("k")
    assert report.text(".panel h3") == f"{BEFORE}, step 1"
    report.press("f")
    assert report.text(".panel h3") == f"{DOWN}, step 0"
    report.press("?")
    assert report.page.locator("#help").is_visible()
    report.press("Escape")
    assert not report.page.locator("#help").is_visible()


def test_everything_can_be_reached_with_the_tabulator_alone(opened):
    report = opened("faulty")
    seen = set()
    for _ in range(60):
        report.press("Tab")
        seen.add(report.page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"theme", "help-button", "search", "failing", "list"} <= seen
    report.find(".list").focus()
    report.press("ArrowDown", "ArrowRight")
    assert report.text(".panel h3") == f"{AFTER[0]}, step 1"


@pytest.mark.parametrize("name", RUNS)
def test_search_finds_by_name_source_line_and_graph_name(opened, runs, name):
    report, run = opened(name), runs(name)
    report.press("/")
    report.page.keyboard.type("layers.1 q_proj")
    found = [line.split()[1] for line in report.all(".list li")]
    assert "model.layers.1.self_attn.q_proj" in found
    assert not [site for site in found if site.startswith("model.layers.0")]
    report.find(".search").fill(run.tap_of["model.embed_tokens"].fx_node)
    report.press("Enter")
    assert report.text(".panel h3").startswith("model.embed_tokens, step ")
    report.find(".search").fill("modeling_llama.py")
    assert report.find(".list li").count() == sum("modeling_llama.py" in tap.source for tap in run.tap_of.values())
    report.find(".search").fill("")
    report.find(".failing").check()
    assert report.find(".list li").count() == len({r.site for r in run.failures})


@pytest.mark.parametrize("name", RUNS)
def test_a_click_on_the_heat_map_opens_the_cell(opened, runs, name):
    report, run = opened(name), runs(name)
    site = len(run.sites) // 2
    cell = report.cell(run.steps - 1, site)
    report.page.mouse.click(cell["x"] + cell["width"] / 2, cell["y"] + cell["height"] / 2)
    assert report.text(".panel h3") == f"{run.sites[site]}, step {run.steps - 1}"
    box = report.find(".cursor").bounding_box()
    assert abs(box["x"] + box["width"] / 2 - cell["x"] - cell["width"] / 2) < 2


def test_a_drag_along_the_depth_zooms_both_charts_and_a_double_click_goes_back(opened, runs):
    report = opened("large")
    whole = report.cell(0, 0)["width"]
    report.find("section.map h2").evaluate("title => title.scrollIntoView()")
    box = report.find(".chart-depth .u-over").bounding_box()
    report.page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 40)
    report.page.mouse.down()
    report.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40, steps=4)
    report.page.mouse.up()
    assert report.cell(0, 0)["width"] == pytest.approx(4 * whole, rel=0.02)
    report.press("l")
    assert report.cell(0, 0)["width"] == pytest.approx(4 * whole, rel=0.02)
    report.find(".chart-depth .u-over").dblclick()
    assert report.cell(0, 0)["width"] == pytest.approx(whole)


def test_the_charts_follow_the_width_of_the_window(opened):
    report = opened("faulty")
    wide = report.cell(0, 0)["width"]
    report.page.set_viewport_size({"width": 760, "height": 900})
    until(report.page, f"document.querySelector('.chart-map').place.step < {wide * 0.7}")
    assert report.page.evaluate("document.documentElement.scrollWidth") <= 760


def test_the_address_keeps_the_place(opened):
    report = opened("faulty")
    report.press("l", "j")
    report.page.reload()
    report.page.wait_for_selector("body[data-state=drawn]")
    assert report.text(".panel h3") == f"{AFTER[0]}, step 1"


@pytest.mark.parametrize("name", RUNS)
def test_theme_follows_the_system_and_the_button(opened, name):
    report = opened(name)

    def back() -> str:
        return report.page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = back()
    report.page.emulate_media(color_scheme="dark")
    report.page.wait_for_selector("html[data-theme=dark]")
    assert (light, back()) == ("rgb(255, 255, 255)", "rgb(18, 22, 27)")
    dark = pixels(report.find(".chart-depth"))
    assert dark.most_common(1)[0][0] == (18, 22, 27)
    assert sum(n for color, n in dark.items() if min(color) > 180) > 300, "the error is drawn in a light colour"
    report.page.locator("#theme").click()
    assert back() == light
    assert pixels(report.find(".chart-depth")).most_common(1)[0][0] == (255, 255, 255)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(opened, scheme):
    report = opened("faulty")
    report.page.emulate_media(color_scheme=scheme)
    report.page.wait_for_selector(f"html[data-theme={scheme}]")
    colors = report.page.evaluate(
        """() => ['--back', '--soft', '--front', '--dim', '--good', '--bad', '--mark'].map((name) => {
            document.body.style.color = `var(${name})`;
            const found = getComputedStyle(document.body).color.match(/\\d+/g).map(Number);
            document.body.style.color = '';
            return found;
        })"""
    )
    back, soft, *texts = map(tuple, colors)
    assert min(contrast(ground, one) for ground in (back, soft) for one in texts) > 4.5


@pytest.mark.parametrize("lacking", ["protanopia", "deuteranopia", "tritanopia"])
def test_above_and_below_the_bound_differ_for_eyes_that_lack_a_colour(opened, runs, lacking):
    report, sites = opened("large"), runs("large").sites
    report.page.context.new_cdp_session(report.page).send("Emulation.setEmulatedVisionDeficiency", {"type": lacking})
    good, bad = (middle_color(report, 30, sites.index(site)) for site in ("model.embed_tokens", "onnx:linear_14"))
    assert max(abs(a - b) for a, b in zip(good, bad, strict=True)) > 60


def middle_color(report, step, site):
    """Return the mean colour of a cell."""
    image = cell_image(report, step, site)
    return image.resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))


def cell_image(report, step, site):
    """Return a picture of a cell."""
    cell = report.cell(step, site)
    return Image.open(io.BytesIO(report.page.screenshot(clip=cell))).convert("RGB")


def test_states_show_without_any_colour(opened, runs):
    report, sites = opened("faulty"), runs("faulty").sites
    session = report.page.context.new_cdp_session(report.page)
    session.send("Emulation.setEmulatedVisionDeficiency", {"type": "achromatopsia"})
    within = quarters(cell_image(report, 2, sites.index("model.layers.1") - 10))
    diverged = quarters(cell_image(report, 2, sites.index("model.layers.1")))
    assert max(within) - min(within) < 12
    dark, light = (diverged[0], diverged[3]), (diverged[1], diverged[2])
    assert max(dark) + 20 < min(light), "two opposite quarters of a cell that diverged are dark"


def quarters(image):
    """Return the lightness of the middles of a cell's four quarters."""
    grey = image.convert("L")
    return [grey.getpixel((int(grey.width * x), int(grey.height * y))) for y in (0.3, 0.7) for x in (0.3, 0.7)]


@pytest.mark.parametrize("name", RUNS)
def test_print_is_light_and_leaves_the_controls_out(opened, name):
    report = opened(name)
    report.page.emulate_media(color_scheme="dark")
    report.page.wait_for_selector("html[data-theme=dark]")
    report.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    report.page.emulate_media(media="print", color_scheme="dark")
    assert report.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for control in ("#theme", ".search", ".list", "nav"):
        assert not report.page.locator(control).first.is_visible()
    for part in ("section.verdict", ".chart-depth", ".chart-map", ".panel", "section.worst", "section.tokens"):
        assert report.find(part).is_visible()
    assert report.page.pdf(format="A4").startswith(b"%PDF")


def test_what_is_printed_fits_the_paper(opened):
    report = opened("faulty")
    report.page.set_viewport_size({"width": 720, "height": 1000})
    report.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    report.page.emulate_media(media="print")
    assert report.page.evaluate("document.documentElement.scrollWidth") <= 720
    assert share(counted(report.page.locator(".chart-map").screenshot()), orange) > 0.02
    report.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert report.find(".chart-map canvas").is_visible()


def test_several_comparisons_in_one_page(opened, runs, tmp_path):
    path = tmp_path / "both.html"
    write_html({"t.py::test_a": runs("passing"), "t.py::test_b": runs("with_nan")}, path)
    report = opened(path)
    assert report.text(".badge") == "✓ agrees"
    report.page.locator("#runs").select_option(label="✗ t.py::test_b")
    assert report.text(".badge") == "✗ does not agree"
    assert report.text(".panel h3") == f"{DOWN}, step 0"
    assert "pytest 't.py::test_b'" in report.text(".notes")
    assert share(pixels(report.find(".chart-map")), black) > 0.02
    assert share(pixels(report.find(".chart-map")), blue) > 0.2


@pytest.fixture
def dumped(tmp_path):
    """A hand-made comparison with a dump of its first bad site at step 0: 6,400 elements, one far off."""
    run = faulty()
    taps = [tap for tap in run.taps if tap.site == DOWN]
    reference = torch.linspace(-1, 1, 6400).reshape(2, 4, 800)
    engine = reference.clone()
    engine[1, 2, 3] = 40.0
    for side, info, tensor in (("engine", run.engine, engine), ("reference", run.reference, reference)):
        with TraceWriter(tmp_path / "dump" / side, info, taps) as writer:
            writer.write_step({}, {}, {DOWN: tensor})
    path = tmp_path / "dumped.html"
    write_html(replace(run, dump=str(tmp_path / "dump")), path)
    return path


def test_scatter_of_many_elements_says_how_much_it_shows(opened, dumped):
    report = opened(dumped)
    title = report.text(".charts > div:nth-child(2) h4")
    assert "of 6400 elements, drawn at random, and the 1 worst" in title
    points = report.plot("engine against reference")
    assert len([v for v in points["engine"] if v is not None]) == int(title.split(": ")[1].split()[0]) < 6400
    assert [v for v in points["worst"] if v is not None] == [40.0]
    assert report.all(".elements td")[:2] == ["[1, 2, 3]", "40"]
    assert report.text(".elements tr").startswith("index (batch, length, ·)")


def test_names_from_models_and_prompts_are_text_and_not_markup(opened, dumped):
    report = opened(dumped)
    assert "tiny <llama>" in report.text("section.facts")
    assert "Hey <you>" in report.text("section.tokens")


def test_a_run_of_one_step_without_tokens(opened, tmp_path):
    path = tmp_path / "one.html"
    run = comparison(("conv", "linear"), 1, lambda step, i: 0.0, tokens=False)
    write_html(replace(run, missing={"pool": "the engine has no such output"}), path)
    report = opened(path)
    assert "This run generated no tokens." in report.text("section.tokens")
    assert "the engine has no such output" in report.text("section.worst")

"""Every view of the HTML report in a real browser, on real runs: one that passes, a fault, NaN, and a large one."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from urllib.parse import unquote, urlparse

import numpy as np
import pytest
from safetensors.numpy import load_file

from ditto_core.compare import text
from ditto_core.compare.metrics import measure
from ditto_core.report.html import LIMIT
from tests.browser.pictures import black, blue, orange, pixels, share
from tests.browser.runs import DOWN, RUNS

ROPE = "model.layers.1.self_attn:q_rope"
LOCALIZED = ("faulty", "with_nan")
DUMPED = ("passing", "faulty")


@pytest.fixture(params=RUNS)
def name(request):
    return request.param


@pytest.fixture
def view(views, name):
    return views(name)


@pytest.fixture
def run(runs, name):
    return runs(name)


def start(run):
    return run.first_bad or run.worst


def at_step(run, step):
    return sorted((r for r in run.results if r.step == step), key=lambda r: r.order)


def facts(view, title: str) -> dict[str, str]:
    """Return one block of the overview, name by name."""
    block = view.find("section.facts dl").filter(has_text=title)
    names, lines = block.locator("dd > span:first-child").all_inner_texts(), block.locator("dd").all_inner_texts()
    return dict(zip(names, lines, strict=True))


def test_overview_has_verdict_sides_versions_tolerance_and_observer_check(view, run, name):
    assert view.text(".badge") == ("✓ agrees" if name == "passing" else "✗ does not agree")
    assert view.text("h1") == text.headline(run)
    engine, reference = facts(view, "Engine:"), facts(view, "Reference:")
    assert version("onnxruntime") in engine["onnxruntime"]
    assert run.engine.dtype in engine["dtype"]
    assert "CPUExecutionProvider" in engine["provider"]
    library = "onnxruntime" if name == "large" else "torch"
    assert version(library).split("+")[0] in reference[library]
    tolerance = facts(view, "Tolerance")
    assert "4 x noise floor" in tolerance["factor"]
    said = "none, the engine without taps gives the same outputs" if name in DUMPED else "not measured"
    assert said in tolerance["observer effect"]


def test_overview_counts_every_result(view, run):
    counted = facts(view, "Compared")
    assert f" {len(run.sites)}" in counted["sites"].replace("\n", " ")
    kinds = ("within", "explained", "recovered", "diverged", "not finite")
    assert sum(int(counted[kind].split()[-1]) for kind in kinds if kind in counted) == len(run.results)


def test_fault_says_where_it_is_and_how_large(views, runs):
    view, bad = views("faulty"), runs("faulty").first_bad
    assert (bad.site, bad.step) == (DOWN, 0)
    assert "modeling_llama.py:" in view.text(".verdict")
    assert "self.gate_proj" in view.text(".verdict")
    assert "scale 1.01000" in view.text(".verdict")
    assert "not finite: engine 8 NaN and 0 Inf, reference 0 NaN and 0 Inf of 512" in views("with_nan").text(".verdict")


COLORS = {
    "passing": (blue, orange, black),
    "faulty": (blue, orange),
    "with_nan": (blue, black),
    "large": (blue, orange),
}
"""What the cells are, and for a run that passes what they are not."""


def test_heat_map_has_the_colours_of_the_run(view, name):
    colors = pixels(view.find(".chart-map"))
    here, *others = COLORS[name]
    assert share(colors, here) > 0.2
    for color in others:
        assert share(colors, color) < 0.01 if name == "passing" else share(colors, color) > 0.02


def test_heat_map_has_a_cell_for_every_site_and_step(view, run):
    for result in (run.results[0], run.results[-1], start(run)):
        cell = view.cell(result.step, run.sites.index(result.site))
        view.page.mouse.move(cell["x"] + cell["width"] / 2, cell["y"] + cell["height"] / 2)
        assert view.text(".tip").startswith(f"{result.site}\nstep {result.step}: ")
    view.page.mouse.move(2, 2)
    assert view.find(".chart-map").evaluate("node => Math.round(node.place.inner / node.place.step)") == len(run.sites)


def test_error_along_the_depth_has_bound_and_noise_floor(view, run, name):
    shown = view.chart(".chart-depth")
    results = at_step(run, start(run).step)
    assert shown["x"] == list(range(len(results)))
    plain = [i for i, r in enumerate(results) if 1e-9 < r.metrics.rel_l2 < 1]
    assert len(plain) > len(results) / 4
    assert [shown["error"][i] for i in plain] == pytest.approx([results[i].metrics.rel_l2 for i in plain], rel=1e-5)
    assert [shown["bound"][i] for i in plain] == pytest.approx([results[i].verdict.bound for i in plain], rel=1e-5)
    floors = [None if r.floor is None else pytest.approx(max(r.floor, 1e-14), rel=1e-5) for r in results]
    assert name == "large" or [shown["noise floor"][i] for i in plain] == [floors[i] for i in plain]


def test_local_error_is_drawn_where_it_was_measured(view, run, name):
    shown = view.chart(".chart-depth")
    assert ("local error" in shown) == (name in LOCALIZED)
    if name == "faulty":
        assert shown["local error"][run.sites.index(DOWN)] == pytest.approx(0.01, rel=1e-3)
        after = shown["local error"][run.sites.index(DOWN) + 1 :]
        assert max(v for v in after if v is not None) < 1e-5


def test_site_opens_at_the_first_bad_one_with_its_names(view, run, name):
    shown = start(run)
    tap = run.tap_of[shown.site]
    view.choose(shown.site)
    assert view.text(".panel h3") == f"{shown.site}, step {shown.step}"
    said = view.text(".provenance")
    assert tap.source
    assert "modeling_llama.py:" in tap.source
    for fact in (tap.source, tap.value, tap.fx_node, tap.module_class, tap.dtype):
        assert fact in said
    assert view.text(".list li[aria-selected=true]").split()[1] == shown.site
    assert view.text(".list li[aria-selected=true] .glyph") == {"passing": "✓", "with_nan": "!"}.get(name, "✗")


def test_histogram_counts_every_element(view, run, name):
    shown = start(run)
    view.choose(shown.site)
    counts = view.plot("|difference|")["elements"]
    lost = shown.metrics.nan_actual if name == "with_nan" else 0
    assert sum(counts) == shown.metrics.count - lost
    assert view.text(".charts h4") == f"|difference| of {shown.metrics.count} elements"


def tensor_of(tensors, site: str) -> np.ndarray:
    """Return a tap of a dumped step."""
    (found,) = (value for key, value in tensors.items() if key.removeprefix("taps/") == site)
    return found.astype(np.float64)


@pytest.mark.parametrize("name", DUMPED)
def test_scatter_and_worst_elements_are_those_of_the_dump(views, runs, folder, name):
    view, shown = views(name), start(runs(name))
    view.choose(shown.site)
    files = (folder / name / "dump" / side / f"step{shown.step}.safetensors" for side in ("engine", "reference"))
    engine, reference = (tensor_of(load_file(file), shown.site) for file in files)
    difference = engine - reference
    worst = np.unravel_index(np.abs(difference).argmax(), difference.shape)
    index, left, right, off = view.all(".elements tr:nth-child(2) td")
    assert index == f"[{', '.join(map(str, worst))}]"
    assert (float(left), float(right)) == pytest.approx((engine[worst], reference[worst]), rel=1e-7)
    assert float(off) == pytest.approx(difference[worst], rel=1e-2)
    title = view.text(".charts > div:nth-child(2) h4")
    points = view.plot("engine against reference")
    assert title == f"engine against reference: all {shown.metrics.count} elements"
    assert len([v for v in points["engine"] if v is not None]) == shown.metrics.count
    assert len([v for v in points["worst"] if v is not None]) == 10


@pytest.mark.parametrize("name", ["with_nan", "large"])
def test_without_a_dump_the_metrics_name_the_worst_elements(views, runs, name):
    view, shown = views(name), start(runs(name))
    view.choose(shown.site)
    assert "No tensors were kept" in view.text(".charts")
    rows = view.all(".elements tr")
    if name == "with_nan":
        assert rows[1].split("\t")[:2] == ["[0, 0, 3]", "not finite"]
    assert any(f"[{', '.join(map(str, shown.metrics.max_abs_index))}]" in row for row in rows)


def test_error_by_position_row_and_head(view, run, name):
    result = next(r for r in run.results if r.site == ROPE and r.step == 0)
    view.choose(ROPE)
    view.press(*"h" * start(run).step)
    for kind in ("position", "row", "head"):
        values = getattr(result.metrics, f"by_{kind}")
        found = view.find(f'.charts > div:has(h4:text("rel-L2 by {kind}"))').count()
        assert found == (len(values) > 1)
        if found and min(values) > 1e-12:
            assert view.plot(f"rel-L2 by {kind}")["rel-L2"] == pytest.approx(values, rel=1e-4)
    assert len(result.metrics.by_head) == 4
    assert len(result.metrics.by_position) in (5, 8)


MARKS = {"passing": (3, 0, 1), "faulty": (7, 1, 0), "with_nan": (0, 8, 0), "large": (128, 0, 0)}
"""Tokens that agree, flips and near ties; the runs are deterministic."""


def test_tokens_mark_flips_and_near_ties(view, run, name):
    shown = Counter(mark[0] if mark[0] in "✗≈" else "=" for mark in view.all(".ids li"))
    assert (shown["="], shown["✗"], shown["≈"]) == MARKS[name]
    assert sum(len(row.flips) for row in run.tokens) == MARKS[name][1]
    if name == "passing":
        assert view.all(".ids li")[0].split() == ["≈", "7", str(run.tokens[0].reference[0])]
        assert view.find(".ids li.near-tie").first.get_attribute("title").endswith("(near tie)")


def test_kl_divergence_by_step(view, run, name):
    if name == "with_nan":
        assert "The logits of 4 of 4 steps are not finite" in view.text("section.tokens")
        assert view.find(".chart-kl").count() == 0
        return
    shown = view.chart(".chart-kl")
    assert shown["mean"] == pytest.approx([m.kl_mean for m in run.logits], rel=1e-4)
    assert shown["largest"] == pytest.approx([m.kl_max for m in run.logits], rel=1e-4)
    assert view.find(".tokens details tbody tr").count() == run.steps


def test_cause_is_shown_with_its_evidence(views):
    scaled = views("faulty").text(".causes")
    for part in (f"weight scaled at {DOWN}", "weight is multiplied by 1.01", "next: look for this number"):
        assert part in scaled
    lost = views("with_nan").text(".causes")
    assert f"weights not finite at {DOWN}" in lost
    assert "1 of 64 output channels are NaN or Inf for every token" in lost
    assert [views(name).find(".causes").count() for name in ("passing", "large")] == [0, 0]


def test_links_lead_to_the_dump_and_to_the_repro(view, run, name):
    def target(selector):
        return unquote(urlparse(view.find(selector).first.evaluate("a => a.href")).path)

    assert view.find("a.dump").count() == (name in DUMPED)
    assert view.find("a.repro").count() == (name == "faulty")
    if name in DUMPED:
        assert target("a.dump").rstrip("/") == run.dump
    if name == "faulty":
        assert target("a.repro").rstrip("/") == run.repros[DOWN]
        assert DOWN in view.text("section.facts")
    if name in ("with_nan", "large"):
        assert f'ditto.save_repro("{DOWN}", "repro")' in view.text(".notes")


def test_worst_sites_lead_to_their_results(view, run):
    rows = view.find(".worst table").first.locator("tbody tr")
    shown = [row.split("\t") for row in rows.all_inner_texts()]
    worst = list(dict.fromkeys(r.site for r in run))[:20]
    assert [row[4] for row in shown] == worst
    fails = Counter(r.site for r in run.failures)
    assert [row[2] for row in shown] == [f"{fails[site]} of {run.steps}" for site in worst]
    rows.nth(3).locator("a").click()
    assert view.text(".panel h3") == f"{worst[3]}, step {shown[3][3]}"


def test_file_stays_below_the_limit(files, name):
    assert files(name).stat().st_size < LIMIT / 10


def test_large_run_says_which_details_it_left_out(views, runs):
    view, run = views("large"), runs("large")
    assert (len(run.sites) >= 300, run.steps) == (True, 64)
    assert view.find(".list li").count() == len(run.sites)
    view.choose("model.embed_tokens")
    view.press("l", "l", "l")
    assert "Details of this result were left out" in view.text(".panel")
    view.find(".panel a").first.click()
    assert "All metrics" in view.text(".panel")


def test_metrics_of_a_site_are_all_there(views, runs):
    result = runs("faulty").first_bad
    views("faulty").choose(DOWN)
    shown = dict(row.split("\n") for row in views("faulty").all(".numbers > div"))
    named = set(measure.__globals__["Metrics"].__dataclass_fields__) - {"histogram", "by_row", "by_position", "by_head"}
    assert named <= set(shown)
    assert float(shown["cosine"]) == pytest.approx(result.metrics.cosine, rel=1e-3)

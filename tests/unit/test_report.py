"""The forms of a comparison, read back by other people's readers."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import fields, replace
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import pytest
import torch
from junitparser import Failure, JUnitXml, Skipped
from markdown_it import MarkdownIt
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from ditto_core.cli import application
from ditto_core.compare.blame import Blame, Cause, Localization
from ditto_core.compare.comparison import Comparison
from ditto_core.compare.metrics import Metrics
from ditto_core.errors import TraceError, UsageError
from ditto_core.report.explorer import annotate_onnx, overlay
from ditto_core.report.figure import figure
from ditto_core.report.github import annotation, append_summary
from ditto_core.report.html import html_report
from ditto_core.report.junit import junit
from ditto_core.report.markdown import markdown, summary
from ditto_core.report.page import Budget, run_data, thinned, ticks
from ditto_core.report.samples import sample, sample_dump
from ditto_core.report.schema import comparison_schema
from ditto_core.report.source import open_comparison
from ditto_core.report.write import write_report
from ditto_core.trace import TraceWriter
from tests.comparisons import comparison, faulty, names, passing, with_nan

RUNS = {"passing": passing, "faulty": faulty, "with_nan": with_nan}
BAD = "model.layers.1.mlp.down_proj"


@pytest.fixture(params=RUNS)
def run(request) -> Comparison:
    return RUNS[request.param]()


@pytest.fixture
def dumped(tmp_path) -> Comparison:
    """A faulty comparison whose dump holds two tensors [2, 4, 8] of step 0; row 0 is padded by two positions."""
    reference = torch.linspace(-1, 1, 64).reshape(2, 4, 8)
    engine = reference.clone()
    engine[1, 3, 5] += 0.5
    engine[1, 0, 0] -= 0.25
    engine[0, 0, 0] += 9.0  # padding
    run = faulty()
    inputs = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "attention_mask": torch.ones(2, 4, dtype=torch.int64)}
    inputs["attention_mask"][0, :2] = 0
    taps = [tap for tap in run.taps if tap.site == BAD]
    for side, info, tensor in (("engine", run.engine, engine), ("reference", run.reference, reference)):
        with TraceWriter(tmp_path / "dump" / side, info, taps) as writer:
            writer.write_step(inputs, {}, {BAD: tensor})
    return replace(run, dump=str(tmp_path / "dump"))


def check_schema(data: object) -> None:
    jsonschema.validate(data, comparison_schema(), cls=jsonschema.Draft202012Validator)


def test_json_fits_its_schema(run):
    check_schema(json.loads(json.dumps(run.to_json(), allow_nan=False)))


@pytest.mark.parametrize("where", [("results", 0, "metrics", "cosine"), ("engine", "label"), ("tolerance",)])
def test_json_without_a_field_does_not_fit_the_schema(where):
    data = json.loads(json.dumps(passing().to_json()))
    *path, last = where
    place = data
    for key in path:
        place = place[key]
    del place[last]
    with pytest.raises(jsonschema.ValidationError, match=last):
        check_schema(data)


def test_schema_names_every_metric():
    assert set(comparison_schema()["$defs"]["metrics"]["properties"]) == {f.name for f in fields(Metrics)}


def test_junit_is_read_by_a_junit_parser():
    run = replace(faulty(), missing={"lm_head": "shape [1] against [2]"})
    suite = next(iter(JUnitXml.fromstring(junit(run).encode())))
    cases = {case.name: case for case in suite}
    assert (suite.tests, suite.failures, suite.skipped) == (len(names(2)) + 1, 3, 1)
    (failure,) = cases[BAD].result
    assert isinstance(failure, Failure)
    assert failure.message == "step 0: rel_l2 1.0e-02 > 4.0e-06 (4 x noise floor 1.0e-06)"
    assert [type(result) for result in cases["lm_head"].result] == [Skipped]
    assert cases["model.embed_tokens"].result == []
    assert {p.name: p.value for p in suite.properties()}["ditto_ok"] == "false"


def test_a_site_that_is_missing_at_one_step_does_not_pass_in_junit():
    run = passing()
    site = run.sites[0]
    suite = next(
        iter(JUnitXml.fromstring(junit(replace(run, missing={site: "only in the reference, step 1"})).encode()))
    )
    (case,) = [case for case in suite if case.name == site]
    assert [type(result) for result in case.result] == [Skipped]
    assert (suite.tests, suite.skipped) == (len(run.sites), 1)


def test_junit_holds_no_character_that_xml_forbids():
    run = replace(passing(), missing={"a\x00b": "bell \x07 and <angle> & \ud800"})
    messages = [e.get("message") for e in ET.fromstring(junit(run)).iter("skipped")]
    assert messages == [r"bell \x07 and <angle> & \ud800"]


def markdown_table(text: str) -> list[list[str]]:
    """Read the first table with a Markdown parser."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    rows: list[list[str]] = []
    for before, token in itertools.pairwise(tokens):
        if token.type == "table_close":
            break
        if token.type == "tr_open":
            rows.append([])
        if before.type in ("td_open", "th_open"):
            rows[-1].append("".join(child.content for child in token.children))
    return rows


def test_markdown_table_is_read_by_a_markdown_parser():
    rows = markdown_table(markdown(faulty(), rows=4))
    assert rows[0][:3] == ["error / bound", "fails", "worst step"]
    numbers = ["rel_l2 1.0e-02", "4.0e-06", f"{3e-6:.1e}", "4 x noise floor 1.0e-06"]
    assert rows[1] == ["2.5e+03 !", "3 of 3", "0", BAD, *numbers]
    assert len(rows) == 5


def test_markdown_names_the_cause():
    blame = Blame(BAD, BAD, "Linear", "", 0, (0,), 1e-2, 1e-2, 1e-6)
    cause = Cause("constant factor", BAD, 0.95, ("all elements are 1.01 times the reference's",), "look for 1.01")
    run = replace(faulty(), localization=Localization("float32", 4.0, (), (blame,), (cause,)))
    assert any(line.startswith("- cause (95%)") and "look for 1.01" in line for line in markdown(run).splitlines())


def test_markdown_keeps_what_looks_like_markup():
    run = replace(passing(), engine=replace(passing().engine, label="a|b_c_*d*<e>"))
    rows = markdown_table(summary({"t.py::test[a|b]": run}))
    assert rows[1][1:3] == ["t.py::test[a|b]", "a|b_c_*d*<e>"]


def test_summary_is_appended_where_github_wants_it(tmp_path):
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    assert append_summary({"t": faulty()}, {"GITHUB_STEP_SUMMARY": str(path)})
    assert path.read_text().startswith("before\n## ditto-engine\n")
    assert "engine diverges at model.layers.1.mlp.down\\_proj, step 0" in path.read_text()
    assert not append_summary({"t": faulty()}, {})


def test_annotation_escapes_what_workflow_commands_use():
    assert annotation("100 %\nnext", "a,b:c.py", 3, "t::x") == (
        "::error file=a%2Cb%3Ac.py,line=3,title=t%3A%3Ax::100 %25%0Anext"
    )


def test_overlay_is_keyed_as_the_onnx_adapter_calls_graph_and_nodes(model):
    adapter = pytest.importorskip("model_explorer_onnx.main", reason="model-explorer-onnx is not installed")
    (graph,) = adapter.ONNXAdapter().convert(str(model), {})["graphs"]
    ((name, data),) = overlay(faulty(), model).items()
    assert name == graph.id == "mine"
    assert set(data["results"]) == {"first", "second"} <= {node.id for node in graph.nodes}
    assert data["results"]["first"]["value"] == pytest.approx(0.125)
    assert data["results"]["second"]["value"] == pytest.approx(2500)
    assert [t["value"] for t in data["thresholds"]] == sorted(t["value"] for t in data["thresholds"])


def test_overlay_is_strict_json_where_the_margin_is_infinite(model):
    json.dumps(overlay(with_nan(), model), allow_nan=False)


def test_overlay_is_read_by_model_explorer(model):
    builder = pytest.importorskip("model_explorer.node_data_builder", reason="ai-edge-model-explorer is not installed")
    ((graph, data),) = overlay(faulty(), model).items()
    read = builder.ModelNodeData(
        {
            graph: builder.GraphNodeData(
                results={name: builder.NodeDataResult(**value) for name, value in data["results"].items()},
                name=data["name"],
                thresholds=[builder.ThresholdItem(**item) for item in data["thresholds"]],
            )
        }
    )
    assert set(data) <= {f.name for f in fields(builder.GraphNodeData)}
    assert json.loads(read.to_json_string())[graph]["results"] == data["results"]


@pytest.fixture
def model(tmp_path):
    """An ONNX file that computes ``value_0``, :data:`BAD`'s tensor and ``other``; the first two nodes have names."""
    bad = next(tap.value for tap in faulty().taps if tap.site == BAD)
    chain = itertools.pairwise(("x", "value_0", bad, "other"))
    nodes = [helper.make_node("Relu", [source], [result]) for source, result in chain]
    nodes[0].name, nodes[1].name = "first", "second"
    nodes[0].metadata_props.add(key="pkg.torch.onnx.fx_node", value="long")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "other")]
    graph = helper.make_graph(nodes, "mine", values[:1], values[1:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), str(path))
    return path


def test_onnx_metadata_is_read_back_by_onnx(tmp_path, model):
    out = tmp_path / "annotated.onnx"
    assert annotate_onnx(faulty(), model, out) == 2
    assert annotate_onnx(faulty(), out, out) == 2, "what was there is replaced"
    read = onnx.load(str(out))
    onnx.checker.check_model(read)
    first, second, third = ({p.key: p.value for p in node.metadata_props} for node in read.graph.node)
    assert next(iter(first)) == "ditto_site"
    assert len(read.graph.node[0].metadata_props) == len(first)
    assert first["ditto_site"] == "model.embed_tokens"
    assert first["ditto_margin"] == "0.125"
    assert first["pkg.torch.onnx.fx_node"] == "long"
    assert second["ditto_site"] == BAD
    assert third == {}


def test_onnx_of_another_model_is_refused(tmp_path, model):
    run = comparison(("elsewhere",), 1, lambda step, i: 0.0)
    run = replace(run, taps=(replace(run.taps[0], value="nowhere"),))
    with pytest.raises(UsageError, match="computes none of the 1 tensors"):
        annotate_onnx(run, model, tmp_path / "out.onnx")
    with pytest.raises(UsageError, match="computes none of the 1 tensors"):
        overlay(run, model)


def test_the_weights_of_another_onnx_file_are_neither_kept_nor_lost(tmp_path, model):
    graph = onnx.load(str(model))
    graph.graph.initializer.append(numpy_helper.from_array(np.full(4, 2.0, np.float32), "w"))
    data = f"{model.name}.data"
    onnx.save_model(graph, str(model), save_as_external_data=True, location=data, size_threshold=0)
    out = tmp_path / "out" / "model.onnx"
    out.parent.mkdir()
    (out.parent / data).write_bytes(np.full(4, 99.0, np.float32).tobytes())
    with pytest.raises(UsageError, match=rf"{data} holds other weights than .*: remove it"):
        annotate_onnx(faulty(), model, out)
    assert not out.exists()
    (out.parent / data).unlink()
    for _ in range(2):
        annotate_onnx(faulty(), model, out)
        assert numpy_helper.to_array(onnx.load(str(out)).graph.initializer[0]).tolist() == [2.0] * 4


def test_figure_shows_error_and_heat_map(run):
    depth, heat, *_ = figure(run).axes
    error = depth.get_lines()[0]
    assert len(error.get_xdata()) == len(run.sites)
    assert heat.get_images()[0].get_array().shape == (run.steps, len(run.sites))


def test_figure_of_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"f\.docx"):
        write_report("figure", {"": passing()}, tmp_path / "f.docx")


def test_notebook_shows_the_verdict_and_escapes():
    shown = replace(faulty(), engine=replace(faulty().engine, label="<script>"))._repr_html_()
    ET.fromstring(shown)
    assert f"engine diverges at {BAD}" in shown
    assert "<script>" not in shown


def test_notebook_draws_each_site_and_a_cross_where_one_fails():
    page = ET.fromstring(faulty()._repr_html_())
    (svg,) = page.iter("svg")
    dashed, *marks = svg.iter("path")
    (line,) = svg.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    bound = float(dashed.get("d").split()[1].split("H")[0])
    sites = names(2)
    assert len(points) == len(marks) == len(sites)
    failing = [i for i, site in enumerate(marks) if "l6 6" in site.get("d")]
    assert failing == [i for i, (_, y) in enumerate(points) if y < bound]  # y grows downwards
    assert sites[failing[0]] == BAD
    assert marks[failing[0]].find("title").text == f"{BAD}: 2.5e+03"


def test_notebook_draws_what_is_not_finite_at_the_top():
    (svg,) = ET.fromstring(with_nan()._repr_html_()).iter("svg")
    heights = [float(point.split(",")[1]) for point in next(svg.iter("polyline")).get("points").split()]
    assert min(heights) == 6.0


def test_sample_points_at_the_worst_elements_and_leaves_padding_out(dumped):
    found = sample_dump(dumped, [dumped.first_bad], points=20)[0, BAD]
    assert found.count == 48
    assert len(found.engine) == len(found.reference) == 20
    assert [e.index for e in found.worst] == [(1, 3, 5), (1, 0, 0)]
    assert found.worst[0].engine - found.worst[0].reference == pytest.approx(0.5)


def test_sample_puts_nan_before_numbers_and_a_shared_infinity_nowhere():
    reference = torch.tensor([1.0, torch.inf, 3.0, 4.0])
    engine = torch.tensor([1.5, torch.inf, torch.nan, 4.0])
    found = sample(engine, reference, None, 10)
    assert [e.index for e in found.worst] == [(2,), (0,)]
    assert sorted(found.reference) == [1.0, 3.0, 4.0, torch.inf]


def test_details_of_each_sites_worst_result_come_first():
    run = faulty()
    kept = run_data(run, Budget(details=len(run.sites), points=100))["details"]
    assert {int(key.split(":")[1]) for key in kept} == set(range(len(run.sites)))


def test_thinned_axis_keeps_the_largest_error():
    values, size = thinned([0.0] * 1000 + [7.0])
    assert size == 4
    assert (len(values), max(values)) == (251, 7.0)


def test_ticks_of_many_sites_are_their_layers():
    found = {name: at for at, name in ticks(names(20))}
    assert found["model.layers.0"] == 1
    assert found["model.layers.19"] == 1 + 19 * 7


def test_page_is_cut_to_its_limit():
    whole = html_report(faulty())
    assert len(whole) < 6_000_000
    small = html_report(faulty(), limit=len(whole) - 1)
    assert len(small) < len(whole)


def test_report_needs_something_to_report():
    with pytest.raises(UsageError, match="no comparison"):
        html_report({})


def test_dump_folder_is_opened_where_it_lies(dumped, tmp_path):
    folder = tmp_path / "moved"
    (tmp_path / "dump").rename(folder)
    dumped.save(folder / "comparison.json")
    assert open_comparison(folder).dump == str(folder)
    assert open_comparison(folder / "comparison.json").dump == str(folder)


def test_traces_without_a_comparison_are_compared(dumped):
    folder = Path(dumped.dump)
    found = open_comparison(folder)
    assert found.first_bad.site == BAD
    assert found.dump == str(folder)
    assert found.tap_of[BAD].source == dumped.tap_of[BAD].source


def test_what_holds_no_comparison_is_refused(dumped, tmp_path):
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "other.json").write_text('{"schema_version": 1}')
    for name, message in (
        ("text.json", r"text\.json.* JSON"),
        ("other.json", r"other\.json.* comparison"),
        ("dump/engine", r"one side.*ditto compare"),
        (".", "holds no comparison"),
        ("gone.json", "cannot be read"),
    ):
        with pytest.raises(TraceError, match=message):
            open_comparison(tmp_path / name)


def test_command_writes_every_form(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faulty().save(tmp_path / "run.json")
    options = "--html a.html --markdown a.md --junit a.xml --figure a.svg --json a.json --overlay o.json --onnx o.onnx"
    result = CliRunner().invoke(application(), ["report", "run.json", *options.split(), "--model", "model.onnx"])
    assert result.exit_code == 0, result.output
    assert Comparison.load(tmp_path / "a.json") == Comparison.load(tmp_path / "run.json")
    for name in ("a.html", "a.md", "a.xml", "a.svg", "o.json", "o.onnx"):
        assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize("option", ["--overlay", "--onnx"])
def test_what_lies_on_the_graph_needs_the_graph(tmp_path, option):
    faulty().save(tmp_path / "run.json")
    result = CliRunner().invoke(application(), ["report", str(tmp_path / "run.json"), option, str(tmp_path / "out")])
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == f"{option} needs --model FILE: the ONNX file that the engine was built from"


def test_command_without_options_prints_the_table(tmp_path):
    faulty().save(tmp_path / "run.json")
    result = CliRunner().invoke(application(), ["report", str(tmp_path / "run.json")])
    assert f"engine diverges at {BAD}" in result.stdout


def test_example_of_the_page_reads_a_json_report(tmp_path, monkeypatch, capsys):
    page = Path(__file__).parents[2].joinpath("docs", "reports.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    write_report("json", {"t.py::test": faulty()}, tmp_path / "run.json")
    exec(compile(example, "docs/reports.md", "exec"), {})
    assert capsys.readouterr().out == f"t.py::test False {BAD} rel_l2 1.0e-02 > 4.0e-06 (4 x noise floor 1.0e-06)\n"

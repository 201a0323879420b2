"""Every block of code in the documentation is run by a test, or says above itself why it is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from ditto_core.backends.registry import get_backend
from ditto_core.compare.tolerance import Tolerance
from ditto_core.pair.pair_options import PairOptions
from ditto_core.system.files import parse_toml
from pytest_ditto import marker

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```(python|toml|yaml|bash)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
WHY = re.compile(r"<!-- not run: \S.* -->\n\Z")

LOCALIZING = "tests/engines/test_localizing_docs.py"
TRACES = "tests/unit/test_docs_traces.py::test_the_examples_run"
GATE = "tests/integration/test_gate_marker.py::test_the_example_of_the_page_runs"
DEBUG = "tests/engines/test_debug_docs.py::test_the_commands_of_the_page_run_in_their_order"
RULES = "tests/engines/test_docs.py::test_the_rules_of_the_tolerance_page_are_accepted"
WORKFLOW = (
    "tests/engines/test_gate_cli.py::test_the_workflow_of_the_page_runs_and_a_stale_foreign_or_edited_result_is_refused"
)
COMMENT = "tests/unit/test_report_against.py::test_the_steps_of_the_ci_page_make_a_comment_of_two_runs"
RUN = {
    "README.md": [None, GATE],
    "backends.md": [
        None,
        None,
        None,
        None,
        None,
        None,
        "tests/engines/test_conformance.py::test_the_whole_backend_of_the_documentation_keeps_every_promise",
    ],
    "ci.md": [COMMENT],
    "debugging.md": [DEBUG] * 4,
    "engine-files.md": [None, None],
    "gates.md": [GATE, WORKFLOW, WORKFLOW],
    "localizing.md": [f"{LOCALIZING}::{name}" for name in ("test_its_scripts_run",) * 2]
    + [f"{LOCALIZING}::{name}" for name in ("test_its_tests_pass", "test_its_scripts_run")]
    + [None, f"{LOCALIZING}::test_its_scripts_run"],
    "markers.md": [None],
    "quickstart.md": [
        "tests/engines/test_docs.py::test_the_first_test_of_the_quickstart_passes",
        "tests/engines/test_docs.py::test_the_script_of_the_quickstart_runs",
    ],
    "reports.md": ["tests/unit/test_report.py::test_example_of_the_page_reads_a_json_report", None],
    "served.md": [None] * 4,
    "tensorrt-llm.md": [None, None],
    "tolerances.md": [RULES] * 3,
    "traces.md": [TRACES] * 5,
}
"""What runs each block of a page, in their order; None: the page says why none does."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_block_is_run_by_a_test_or_says_why_not(page):
    text = page.read_text()
    blocks = [*BLOCK.finditer(text)]
    tests = RUN.get(page.name, [])
    assert len(blocks) == len(tests)
    for block, test in zip(blocks, tests, strict=True):
        said = WHY.search(text[: block.start()])
        assert (said is None) == (test is not None), block[0]
        if test is not None:
            path, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text(), test


def marks():
    """Yield the text of each call of the marker, with the page that has it."""
    for page in PAGES:
        for _, text in BLOCK.findall(page.read_text()):
            if "ditto_engine(" not in text:
                continue
            whole = text if re.search(r"^(def|class) ", text, re.MULTILINE) else f"{text}def test(): pass"
            for node in ast.walk(ast.parse(whole)):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr == "ditto_engine"
                ):
                    yield pytest.param(ast.unparse(node), id=f"{page.name}-{node.lineno}")


@pytest.mark.parametrize("call", marks())
def test_markers_of_the_pages_are_accepted(call):
    made = eval(call, {"pytest": pytest, "model": dict, "torch": torch, "edit_distance": print})
    arguments = marker.arguments_of(made.mark)
    spec = marker.read_spec(arguments)
    if spec.backend == "onnxruntime":
        get_backend(spec.backend).check(spec)
    names = marker.Arguments.known().pair
    Tolerance.of(PairOptions(**{name: value for name, value in arguments.items() if name in names}).tolerance)


def test_tables_of_the_pages_are_toml():
    tables = [text for page in PAGES for language, text in BLOCK.findall(page.read_text()) if language == "toml"]
    assert len(tables) == 5
    assert all(parse_toml(table) for table in tables)

"""The table of what backends do is what was measured: in the documentation, and in `ditto doctor`."""

from pathlib import Path

import pytest

from ditto_core.backends.matrix import COLUMNS, PROMISES, cells, markdown, measured, promises_kept, summary
from ditto_core.backends.registry import backend_names, get_backend
from ditto_core.cli.doctor import state
from ditto_core.testing.suite import PROMISES as ALL_PROMISES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "docs/backends.md")]
NAMES = [promise.__name__ for promise in ALL_PROMISES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_documentation_has_the_measured_table(page):
    assert f"<!-- measured: benchmarks/backends.py -->\n{markdown()}\n<!-- end -->" in page.read_text()


VARIANTS = {
    "onnxruntime": {},
    "openvino": {},
    "executorch portable": {"kernels": "portable"},
    "executorch xnnpack": {"kernels": "xnnpack"},
    "inductor": {"compiler": "inductor"},
    "inductor aot_eager": {"compiler": "aot_eager"},
    "inductor aot_inductor": {"compiler": "aot_inductor"},
}


def test_every_engine_of_the_cpu_was_measured_and_keeps_every_promise():
    assert VARIANTS.keys() <= measured().keys()
    for name, options in VARIANTS.items():
        record = measured()[name]
        assert record["options"] == options
        assert [promise for promise, failure in record["promises"].items() if failure] == []
        assert {*COLUMNS[5:]} <= record["abilities"].keys()


def test_every_record_is_of_a_registered_backend_and_of_every_promise():
    for name, variant in measured().items():
        assert name.partition(" ")[0] in backend_names()
        assert list(variant["promises"]) == NAMES
        assert variant["versions"]
    assert {name for names in PROMISES.values() for name in names} <= {*NAMES}


def test_a_cell_is_yes_only_when_each_of_its_promises_was_kept():
    record = {
        "dtypes": ["float32"],
        "promises": dict.fromkeys(NAMES, "") | {"padding": "padding: wrong", "tap_order": "tap_order: wrong"},
        "abilities": {"repro": True},
    }
    assert cells(record) == {
        "dtypes": "float32",
        "taps": "no",
        "decode": "yes",
        "padding": "no",
        "dynamic shapes": "yes",
        "int8": "no",
        "localize": "no",
        "repro": "yes",
        "observer": "no",
        "own file": "no",
    }
    assert promises_kept(record) == f"{len(NAMES) - 2} of {len(NAMES)}"
    del record["promises"]["decoding"]
    assert cells(record)["decode"] == "no"


def test_doctor_shows_what_a_backend_was_measured_to_do():
    line = summary("onnxruntime")
    assert line == f"measured in float32, float16: {', '.join(COLUMNS[1:])}"
    assert "int8" not in summary("openvino")
    assert summary("unregistered") == ""
    assert state(get_backend("onnxruntime")).endswith(f"; {line}")


def test_the_readme_has_a_row_for_each_backend():
    table = (ROOT / "README.md").read_text().split("## Engines")[1].split("\n\n")[1].splitlines()[2:]
    assert sorted(line.split("`")[1] for line in table) == backend_names()

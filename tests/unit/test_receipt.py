"""Receipts on comparisons: in the JSON, which has a schema, and in every report."""

import json
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace

import jsonschema
import pytest
import torch

from ditto_core.compare.comparison import Comparison
from ditto_core.report.html import html_report
from ditto_core.report.junit import junit
from ditto_core.report.markdown import markdown
from ditto_core.report.schema import comparison_schema
from ditto_core.system.receipt import Receipt, commit, make_receipt
from tests.comparisons import passing

RECEIPT = Receipt(
    created=1_000_000_000.0,
    commit="c0ffee" * 6 + "c0ff+",
    engine="e1" * 32,
    reference="",
    model="0d" * 32,
    versions={"torch": "2.13.0"},
    machine={"gpu": "NVIDIA H100 (9.0)", "driver": "580.1"},
    settings={"tf32_matmul": "false"},
    seeds={"torch": 7},
)


@pytest.fixture
def run():
    return replace(passing(), receipt=RECEIPT)


def test_a_comparison_with_a_receipt_survives_json_and_fits_the_schema(run):
    data = json.loads(json.dumps(run.to_json(), allow_nan=False))
    jsonschema.validate(data, comparison_schema(), cls=jsonschema.Draft202012Validator)
    assert Comparison.from_json(data).receipt == RECEIPT


def test_a_comparison_that_was_recorded_before_receipts_is_still_read():
    data = json.loads(json.dumps(passing().to_json()))
    del data["receipt"]
    jsonschema.validate(data, comparison_schema(), cls=jsonschema.Draft202012Validator)
    assert Comparison.from_json(data).receipt is None


def test_facts_are_text_and_leave_out_what_is_not_known():
    facts = RECEIPT.facts()
    assert facts["created"] == "2001-09-09 01:46:40+00:00"
    assert facts["driver"] == "580.1"
    assert facts["seed of torch"] == "7"
    assert "reference" not in facts


def test_every_report_shows_the_receipt(run):
    page = html_report(run)
    for value in ("c0ffee", "NVIDIA H100 (9.0)", "580.1", "tf32_matmul", "2.13.0"):
        assert value in page
    assert "commit c0ffeec0ffee, engine e1e1e1e1e1e1, gpu NVIDIA H100 (9.0), driver 580.1" in markdown(run)
    properties = {p.get("name"): p.get("value") for p in ET.fromstring(junit(run)).iter("property")}
    assert properties["ditto_receipt_commit"] == RECEIPT.commit
    assert properties["ditto_receipt_seed_of_torch"] == "7"


def test_a_receipt_is_of_this_process_and_machine():
    torch.manual_seed(11)
    receipt = make_receipt(engine="e")
    assert receipt.versions["torch"] == torch.__version__
    assert receipt.seeds == {"torch": 11}
    assert receipt.settings["tf32_matmul"] == str(torch.backends.cuda.matmul.allow_tf32).lower()
    assert receipt.settings["threads"] == str(torch.get_num_threads())
    assert receipt.machine.keys() == {"gpu", "driver", "cpu", "system"}


def test_the_commit_says_when_files_differ_from_it(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        line = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    head = git("rev-parse", "HEAD")
    assert commit(tmp_path) == head
    (tmp_path / "file").write_text("b")
    commit.cache_clear()
    assert commit(tmp_path) == head + "+"


def test_the_commit_is_that_of_ci_where_there_is_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_SHA", "f" * 40)
    assert commit(tmp_path) == "f" * 40

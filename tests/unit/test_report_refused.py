"""Reports that cannot be written, and summaries that are too large."""

import pytest

from ditto_core.errors import UsageError
from ditto_core.report import github
from ditto_core.report.github import append_summary
from ditto_core.report.write import write_report
from tests.comparisons import faulty, passing


def test_a_summary_that_is_too_large_is_cut_and_one_that_cannot_be_written_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(github, "LARGEST", 200)
    file = tmp_path / "summary.md"
    assert append_summary({"test_a": faulty()}, {"GITHUB_STEP_SUMMARY": str(file)})
    assert file.read_text().endswith("(cut)\n")
    assert len(file.read_text()) < 300
    assert not append_summary({"test_a": passing()}, {"GITHUB_STEP_SUMMARY": str(tmp_path)})
    assert not append_summary({}, {"GITHUB_STEP_SUMMARY": str(file)})


def test_a_report_that_cannot_be_is_one_line(tmp_path):
    two = {"a": passing(), "b": passing()}
    for kind, runs, path, told in [
        ("htm", two, tmp_path / "r", "no report of kind 'htm', expected .*did you mean 'html'"),
        ("junit", two, tmp_path / "r", "junit holds one comparison, there are 2"),
        ("json", two, tmp_path, f"cannot write {tmp_path}: Is a directory"),
    ]:
        with pytest.raises(UsageError, match=told):
            write_report(kind, runs, path)

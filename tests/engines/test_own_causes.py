"""Rules and changes of the model's code that another distribution adds by entry points."""

import sys

import pytest

from tests.engines.test_causes import run
from tests.faults import graph
from tests.faults.case import MLP, Case

POINTS = """\
[ditto_core.causes]
absent = no_such_module:rule
queue = house_causes:queue
broken = house_causes:broken

[ditto_core.mutants]
kernels = house_causes:kernels
"""

SOURCE = """\
import torch

from ditto_core.causes.mutants import Mutant
from ditto_core.causes.mutants.base import changed


def queue(evidence):
    if evidence.actual.abs().max() > 1e6:
        return evidence.cause("queue overrun", 0.9, ["numbers beyond 1e6"], "drain the queue")


def broken(evidence):
    raise KeyError("nothing")


def kernels(part, model):
    for i, node in enumerate(part.nodes):
        if node.name == "silu":
            scales = changed(lambda x: torch.where(x > 0, x, 0.37 * x))
            yield Mutant("the vendor's SiLU scales what is negative by 0.37", 1.2, "vendor kernel", {i: scales})
"""


@pytest.fixture
def house(tmp_path, monkeypatch):
    """An installed distribution with two rules that fail, one that does not, and a family of changes."""
    folder = tmp_path / "house-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: house\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(POINTS)
    (tmp_path / "house_causes.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("house_causes", None)


ACT = f"{MLP}.act_fn"


def weakened(edit):
    """What is negative is multiplied by 0.37."""
    edit.change_value(ACT, ("LeakyRelu", [], {"alpha": 0.37}))


def test_a_rule_of_another_distribution_names_a_cause_and_what_fails_is_a_note(workspace, tmp_path, house):
    found = run(workspace, tmp_path, Case("large", graph.scaled(ACT, 1e9), ACT, "", ""))
    assert (found.cause.kind, found.cause.site, found.cause.rule) == ("queue overrun", ACT, "house_causes.queue")
    notes = "\n".join(found.notes)
    assert "rule no_such_module.absent failed at" in notes
    assert "rule house_causes.broken failed at" not in notes  # it is asked after the one that fits


def test_a_change_of_another_distribution_is_tried(workspace, tmp_path, house):
    found = run(workspace, tmp_path, Case("kernel", weakened, ACT, "", ""))
    assert (found.cause.kind, found.cause.rule) == ("vendor kernel", "mutants.kernels")
    assert "the vendor's SiLU scales what is negative by 0.37" in found.cause.evidence[0]
    assert "rule house_causes.broken failed at" in "\n".join(found.notes)


def test_without_it_the_same_fault_has_another_name(workspace, tmp_path):
    found = run(workspace, tmp_path, Case("kernel", weakened, ACT, "", ""))
    assert found.cause is None or found.cause.kind != "vendor kernel"

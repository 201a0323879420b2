"""No wrong engine passes: every fault of the table, on every path to a verdict."""

import pytest

from tests.adversary.paths import PATHS
from tests.adversary.wrong import WRONG

LEAST = 35
"""Faults that apply to any path; a path that tries fewer is not the path that it was."""


@pytest.mark.parametrize("name", PATHS)
def test_every_wrong_engine_fails(name, workspace, tmp_path):
    way = PATHS[name]
    judge = way.open(workspace, tmp_path)
    if way.judged:
        assert judge(lambda right, before, names: right, ()) == (True, 0)
    passing, tried = way.passing(judge, WRONG)
    assert not passing
    assert tried >= LEAST * len(way.targets)

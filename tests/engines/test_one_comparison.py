"""A step whose taps are measured together gives what it gives when each is measured alone."""

from __future__ import annotations

import math

import pytest
from models import llama

from ditto_core.compare import packed
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec


def compared(workspace, dtype):
    pair = Pair(workspace, EngineSpec.of(llama, dtype=dtype), PairOptions())
    found = pair.generate([[5, 6, 7, 8, 9], [9, 8, 7]], max_new_tokens=3)
    pair.close()
    return found.to_json()


def differences(found, wanted, path=""):
    """Yield the paths of what differs by more than the order of summing."""
    if isinstance(wanted, dict | list):
        keys = sorted(wanted) if isinstance(wanted, dict) else range(len(wanted))
        if type(found) is not type(wanted) or len(found) != len(wanted):
            yield path
            return
        for key in keys:
            yield from differences(found[key], wanted[key], f"{path}.{key}")
    elif isinstance(wanted, float) and isinstance(found, float):
        if not math.isclose(found, wanted, rel_tol=1e-9, abs_tol=3e-8 if "scale" in path else 1e-12):
            yield path
    elif found != wanted:
        yield path


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_step_in_one_go_is_the_comparison_of_each_tap_alone(workspace, monkeypatch, dtype):
    gathered = []
    real = packed.on_cpu
    monkeypatch.setattr(packed, "on_cpu", lambda sides, *rest: (gathered.append(len(sides[0])), real(sides, *rest))[1])
    together = compared(workspace, dtype)
    assert max(gathered) >= 4
    count = len(gathered)
    monkeypatch.setattr(packed, "kind_of_types", lambda *rest: None)
    alone = compared(workspace, dtype)
    assert len(gathered) == count
    assert len(together["results"]) > 50
    aside = {"receipt", "provenance"}
    assert [*differences(*({k: v for k, v in each.items() if k not in aside} for each in (together, alone)))] == []

"""Two dumps side by side: opened ones, a trace beside another tool's file, and pairs that cannot be compared."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ditto_core.compare import dumps
from ditto_core.compare.dumps import compare_dumps, packing, problem
from ditto_core.dumps import Dump, open_dump
from ditto_core.dumps.namemap import NameMap, Rule
from ditto_core.errors import TraceError, UsageError
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.stepping.dumps import compare_offline
from ditto_core.trace import TraceWriter
from tests.unit.saved import X, safetensors


@pytest.mark.parametrize("swap", [False, True])
def test_the_order_is_that_of_the_side_that_knows_the_topology(tmp_path, swap):
    names = ("z.first", "a.second")
    with TraceWriter(tmp_path / "trace", SessionInfo("e", "e", "float32"), [Tap(n, n) for n in names]) as writer:
        writer.write_step({}, {}, dict.fromkeys(names, X))
    file = safetensors(tmp_path / "x.safetensors", **{name: X.clone() for name in sorted(names)})
    sides = (open_dump(tmp_path / "trace"), file)
    pairs = compare_dumps(*(reversed(sides) if swap else sides))
    assert [pair.name for pair in pairs.pairs()] == list(names)


@pytest.mark.parametrize("swap", [False, True])
def test_an_input_beside_an_output_of_its_name_is_said_to_have_no_partner(tmp_path, swap):
    with TraceWriter(tmp_path / "trace", SessionInfo("e", "e", "float32"), []) as writer:
        writer.write_step({"x": X + 1}, {"x": X}, {})
    sides = (open_dump(tmp_path / "trace"), safetensors(tmp_path / "x.safetensors", x=X.clone()))
    pairs = compare_dumps(*(reversed(sides) if swap else sides))
    assert [*pairs.only_actual(), *pairs.only_expected()] == [(0, "input:x")]
    found = compare_offline(pairs)
    assert found
    assert found.notes[0].startswith("input:x was recorded on one side")


def test_other_files_beside_arrays_are_not_read_and_said(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    safetensors(tmp_path / "rest.safetensors", y=X)
    assert open_dump(tmp_path).notes == (f"{tmp_path} holds other files, which are not read: rest.safetensors",)


@pytest.mark.parametrize(
    ("short", "long", "said"),
    [
        ((5, 8), (2, 3, 8), True),
        ((1, 5, 8), (2, 3, 8), True),
        ((7, 8), (2, 3, 8), False),
        ((5, 9), (2, 3, 8), False),
    ],
)
def test_packed_tokens_beside_padded_rows_are_called_that(short, long, said):
    assert ("padding" in packing(torch.zeros(short), torch.zeros(long))) is said


@pytest.mark.parametrize("swap", [False, True])
def test_a_dump_without_tensors_is_called_that(tmp_path, swap):
    sides = [safetensors(tmp_path / "none.safetensors"), safetensors(tmp_path / "x.safetensors", x=X)]
    with pytest.raises(TraceError, match=r"none\.safetensors holds no tensors: there is nothing to compare"):
        compare_dumps(*(reversed(sides) if swap else sides))
    everything = NameMap(ignore=(Rule("{name:**}", ("{name:**}",)),))
    with pytest.raises(TraceError, match=r"x\.safetensors holds no tensors but the 1 that the name map ignores"):
        compare_dumps(sides[1], sides[1], name_map=everything)


def test_two_traces_of_a_run_that_was_cut_short_do_not_agree(tmp_path):
    """Both sides of a lockstep run end at the step in which the engine crashed."""
    for side in ("engine", "reference"):
        writer = TraceWriter(tmp_path / side, SessionInfo("e", "e", "float32"), [])
        writer.write_step({}, {"y": X}, {})
    pairs = compare_dumps(tmp_path / "engine", tmp_path / "reference")
    found = compare_offline(pairs)
    assert (bool(found), found.first_bad) == (False, None)
    assert [*found.missing] == ["steps"]
    assert found.missing["steps"].startswith(f"the run of {tmp_path / 'engine'} ended before its last step; the run of")
    assert compare_offline(pairs, ignore_missing=True)


def numbered(*steps, first=0):
    return Dump(Path("d"), "trtllm", [partial(dict, step) for step in steps], first=first)


def test_a_step_without_tensors_is_lost_and_its_names_are_not():
    pairs = compare_dumps(numbered({}, {"x": X}, {"x": X}), numbered({"x": X}, {"x": X}, {}))
    assert pairs.lost_steps() == ([0], [2])
    assert (pairs.only_actual(), pairs.only_expected()) == ([], [])
    assert [pair.step for pair in pairs.pairs()] == [1]


def test_steps_of_one_tool_stand_beside_those_of_their_number_where_they_share_any():
    late, whole = numbered({"x": X + 1}, {"x": X + 2}, first=4), [{"x": X}, {"x": X + 1}, {"x": X + 2}]
    for swap in (False, True):
        sides = (late, numbered(*whole, first=3))
        pairs = compare_dumps(*(reversed(sides) if swap else sides))
        equal = {pair.step: torch.equal(pair.actual, pair.expected) for pair in pairs.pairs()}
        assert equal == {1: True, 2: True}
        assert pairs.notes == ("d numbers its steps from 3: here it is 0",) * 2
    assert [pair.step for pair in compare_dumps(late, numbered(*whole, first=6)).pairs()] == [0, 1]
    assert [pair.step for pair in compare_dumps(late, numbered(*whole)).pairs()] == [0, 1]


def test_tensors_without_numbers_of_their_own_cannot_be_compared():
    assert "complex numbers against real ones" in problem(torch.zeros(2, dtype=torch.complex64), torch.zeros(2))
    assert problem(torch.zeros(2, dtype=torch.bits8), torch.zeros(2))


def test_an_etdump_beside_its_record_is_opened_with_it(tmp_path, monkeypatch):
    """A stand-in for the reader, which needs ExecuTorch."""
    names = {"a": "etdump", "b": "etrecord"}
    monkeypatch.setattr(dumps, "format_of", lambda path: type("Form", (), {"name": names[path.name]}))
    opened = []
    monkeypatch.setattr(dumps, "open_pair", lambda *sides: opened.append(sides) or sides[:2])
    found = dumps.run_and_record((tmp_path / "a", tmp_path / "b"), {"debug_buffer": "buffer"})
    assert opened == [(tmp_path / "a", tmp_path / "b", "buffer")]
    assert found == (tmp_path / "a", tmp_path / "b")


def test_one_debug_buffer_is_not_given_to_two_etdumps(tmp_path):
    runs = [tmp_path / name for name in ("one.etdp", "two.etdp")]
    for path in runs:
        path.write_bytes((100).to_bytes(4, "little") + b"ED00" + bytes(200))
    with pytest.raises(UsageError, match="debug_buffer is given once for two ETDumps"):
        compare_dumps(*runs, debug_buffer=tmp_path / "one_debug.bin")

"""A pair of tensors gets one verdict: live, with a dump as the reference, and between the two dumps of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from ditto_core.backends.dumped import open_dumped
from ditto_core.compare.comparison import Comparison
from ditto_core.compare.dumps import compare_dumps
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.stepping.dumps import compare_offline
from ditto_core.stepping.floor import BESIDE_TRACES, write_floor
from ditto_core.stepping.lockstep import lockstep, single_step
from ditto_core.stepping.prompts import encode
from ditto_core.stepping.sides import Sides, recording
from ditto_core.trace import TraceWriter

HALF, FULL = torch.finfo(torch.float16).min, torch.finfo(torch.float32).min
IDS = {"input_ids": torch.tensor([[7, 8, 9], [0, 5, 6]])}
PADDED = IDS | {"attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}
ALL = IDS | {"attention_mask": torch.ones(2, 3, dtype=torch.int64)}


class StandInSession:
    """Stands in for an engine or a model: it delivers the tensors that it is given."""

    def __init__(self, taps: tuple[Tap, ...], tensors: Mapping[str, torch.Tensor], dtype: str) -> None:
        self.taps, self._tensors = taps, tensors
        self.info = SessionInfo("stand-in", "stand-in", dtype)

    def start(self, batch: int) -> None:
        pass

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        for site, tensor in self._tensors.items():
            sink(site, tensor)
        return {tap.value: self._tensors[tap.site] for tap in self.taps if tap.value == "logits"}

    def close(self) -> None:
        pass


def three_ways(
    folder: Path,
    tap: Tap,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    noisy: torch.Tensor | None = None,
    *,
    inputs: Mapping[str, torch.Tensor] = ALL,
    dtype: str = "float16",
) -> dict[str, Comparison]:
    """Compare one pair live, with the reference's dump as the reference, and between the dumps of the live run."""
    engine, reference = (StandInSession((tap,), {tap.site: side}, kind) for side, kind in ((ours, dtype), (theirs, "")))
    low = None if noisy is None else StandInSession((tap,), {tap.site: noisy}, dtype)
    sides = Sides(engine, reference, low)
    writers = tuple(
        TraceWriter(folder / name, side.info, (tap,)) for name, side in (("engine", engine), ("reference", reference))
    )
    with recording(sides, writers):
        live, floor = single_step(sides, inputs)
    write_floor(folder / BESIDE_TRACES, floor)
    dumped, _ = single_step(Sides(engine, open_dumped(folder / "reference", (tap,))), inputs, floor=floor)
    between = compare_offline(compare_dumps(folder / "engine", folder / "reference"))
    return {"live": live, "reference=DUMP": dumped, "ditto compare": between}


def verdicts(ways: Mapping[str, Comparison], site: str) -> list[tuple]:
    """Return of each way whether it passes, status, metric, value and bound at the site."""
    found = []
    for comparison in ways.values():
        (result,) = (r for r in comparison.results if r.site == site)
        v = result.verdict
        found.append((bool(comparison), v.status, v.metric, v.value, v.bound))
    return found


def one_verdict(ways: Mapping[str, Comparison], site: str) -> tuple:
    """Return the verdict that all three ways give."""
    found = verdicts(ways, site)
    assert len(found) == 3
    assert len(set(found)) == 1, dict(zip(ways, found, strict=True))
    return found[0]


@pytest.mark.parametrize("hidden", [(0, 0), (1, 2)])
def test_masks_with_other_fill_numbers_differ_where_they_hide_other_positions(tmp_path, hidden):
    ours, theirs = torch.zeros(2, 1, 3, 3), torch.zeros(2, 1, 3, 3)
    ours[..., hidden[0]], theirs[..., hidden[1]] = HALF, FULL
    ok, *_ = one_verdict(three_ways(tmp_path, Tap("mask", "mask", dtype="float32"), ours, theirs), "mask")
    assert ok is (hidden[0] == hidden[1])


@pytest.mark.parametrize("stored", [torch.int64, torch.float32])
@pytest.mark.parametrize("off", [0, 1])
def test_ids_are_equal_or_not_though_one_side_stores_floats(tmp_path, stored, off):
    theirs = torch.tensor([[50000, 50001, 50002]])
    ours = (theirs + torch.tensor([0, 0, off])).to(stored)
    ok, _, _, value, bound = one_verdict(three_ways(tmp_path, Tap("ids", "ids", dtype="int64"), ours, theirs), "ids")
    assert ok is (off == 0)
    assert (value > 0, bound) == (off == 1, 0)


@pytest.mark.parametrize(("second", "tie"), [(8.0078125, True), (9.0, False)])
def test_a_flip_of_logits_is_a_near_tie_by_the_dtype_of_the_engine(tmp_path, second, tie):
    """One float16 step at 8 is 2^-7 = 0.0078125."""
    theirs, ours = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    theirs[..., 0], theirs[..., 1] = 8.0, second
    ours[..., 0], ours[..., 1] = second, 8.0
    tap = Tap("lm_head", "logits", dtype="float32", axes=("batch", "length", ""))
    ways = three_ways(tmp_path, tap, ours, theirs)
    one_verdict(ways, "lm_head")
    for way in ways.values():
        (logits,) = way.logits
        assert logits.positions == 2  # the last token of two rows
        assert [flip.near_tie for flip in logits.flips] == [tie, tie]
    assert len({(m.kl_mean, m.kl_max, m.top1_agreement, m.dtype) for way in ways.values() for m in way.logits}) == 1


@pytest.mark.parametrize(("inputs", "ok"), [(PADDED, True), (ALL, False)])
def test_what_stands_on_padding_counts_nowhere(tmp_path, inputs, ok):
    theirs = torch.arange(1.0, 13.0).reshape(2, 3, 2)
    ours = theirs.clone()
    ours[1, 0] = 99.0
    tap = Tap("model.norm", "norm", dtype="float32", axes=("batch", "length", ""))
    found = one_verdict(three_ways(tmp_path, tap, ours, theirs, inputs=inputs), "model.norm")
    assert found[0] is ok
    assert (found[3] == 0) is ok


@pytest.mark.parametrize(("error", "ok"), [(0.002, True), (0.006, False)])
def test_the_floor_of_a_run_decides_between_its_dumps_too(tmp_path, error, ok):
    """Floor 0.001, so the bound is 4 x 0.001; the table for float16 (0.01) would pass both."""
    theirs = torch.full((2, 3, 16), 1.0)  # of fewer than 32 elements the factor is wider
    tap = Tap("model.norm", "norm", dtype="float32", axes=("batch", "length", ""))
    ways = three_ways(tmp_path, tap, theirs * (1 + error), theirs, theirs * 1.001)
    found = one_verdict(ways, "model.norm")
    assert found[0] is ok
    assert found[3:] == pytest.approx((error, 0.004), rel=1e-3)
    (tmp_path / BESIDE_TRACES).unlink()
    alone = compare_offline(compare_dumps(tmp_path / "engine", tmp_path / "reference"))
    assert alone.results[-1].verdict.bound == 0.01


@pytest.mark.parametrize("wrong", ["zeros", "scaled", "rolled", "nothing"])
def test_one_wrong_row_of_three_hundred_fails_though_the_tensor_is_within_its_floor(tmp_path, wrong):
    """Rounding to bfloat16 is the floor. Of the whole tensor a wrong row is less than a fifteenth."""
    generator = torch.Generator().manual_seed(1)
    theirs = torch.randn(1, 300, 64, generator=generator)
    noisy = (theirs * (1 + 0.03 * torch.randn(theirs.shape, generator=generator))).to(torch.bfloat16)
    ours = (theirs * (1 + 0.03 * torch.randn(theirs.shape, generator=generator))).to(torch.bfloat16)
    if wrong == "zeros":
        ours[0, 17] = 0
    elif wrong == "scaled":
        ours[0, 17] *= 1.4
    elif wrong == "rolled":
        ours[0, 17] = ours[0, 16]
    tap = Tap("model.norm", "norm", dtype="bfloat16", axes=("batch", "length", ""))
    inputs = {"input_ids": torch.zeros(1, 300, dtype=torch.int64), "attention_mask": torch.ones(1, 300)}
    ways = three_ways(tmp_path, tap, ours, theirs, noisy, inputs=inputs, dtype="bfloat16")
    ok, _, metric, value, bound = one_verdict(ways, "model.norm")
    assert ok is (wrong == "nothing")
    assert ways["live"].results[0].metrics.rel_l2 < 0.12  # within 4 x 0.03
    if not ok:
        assert value > bound
        assert metric == "row_rel_l2"
        assert ways["live"].results[0].row.index == (0, 17)


@pytest.mark.parametrize("off", [0.0, 1.5])
def test_one_wrong_element_of_sixteen_thousand_fails_though_its_row_is_within_its_floor(tmp_path, off):
    """Eight times the reference's own largest error are allowed: 8 x 0.03 x about 4 standard deviations."""
    generator = torch.Generator().manual_seed(2)
    theirs = torch.randn(1, 4, 4096, generator=generator)
    noisy, ours = (theirs + 0.03 * torch.randn(theirs.shape, generator=generator) for _ in range(2))
    ours[0, 2, 99] = theirs[0, 2, 99] + off
    tap = Tap("model.norm", "norm", dtype="bfloat16", axes=("batch", "length", ""))
    inputs = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "attention_mask": torch.ones(1, 4)}
    found = one_verdict(three_ways(tmp_path, tap, ours, theirs, noisy, inputs=inputs, dtype="bfloat16"), "model.norm")
    assert found[0] is (not off)
    assert found[2] == ("max_abs" if off else "rel_l2")


@pytest.mark.parametrize(("row", "ok"), [(0.05, True), (0.2, False)])
def test_without_a_floor_a_row_may_have_ten_times_the_error_of_the_table(tmp_path, row, ok):
    """The table allows a float16 tensor 0.01; the whole tensor's error is a thirtieth of the row's."""
    theirs = torch.full((1, 900, 4), 1.0)
    ours = theirs.clone()
    ours[0, 3] += row
    tap = Tap("model.norm", "norm", dtype="float16", axes=("batch", "length", ""))
    found = one_verdict(three_ways(tmp_path, tap, ours, theirs), "model.norm")
    assert found[0] is ok
    assert found[2] == ("rel_l2" if ok else "row_rel_l2")


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("gap", "tie"), [(0.03, True), (0.3, False)])
def test_the_logits_own_noise_decides_on_a_flip_whatever_else_is_tapped(raw, gap, tie):
    """The floor is 1e-3 and the logits' root mean square about 11.3: noise explains 4 x sqrt(2) x 0.0113 = 0.064.

    Two float16 steps at 16 are 0.031; a raw tap that is a hundred times as large comes last.
    """
    theirs = torch.full((1, 3, 64), 11.0)
    theirs[..., 5], theirs[..., 6] = 16 + gap, 16.0
    ours = theirs.clone()
    ours[..., 6] = 16 + 1.1 * gap
    axes = ("batch", "length", "")
    taps = [Tap("lm_head", "logits", axes=axes), *([Tap("fx:add_9", "add_9", axes=axes)] if raw else [])]
    size = {"lm_head": 1.0, "fx:add_9": 100.0}
    sessions = [
        StandInSession(tuple(taps), {tap.site: side * size[tap.site] for tap in taps}, dtype)
        for side, dtype in ((ours, "float16"), (theirs, ""), (theirs * 1.001, "float16"))
    ]
    run, _ = lockstep(Sides(*sessions), encode([1, 2, 3]), steps=1)
    (row,) = run.tokens
    assert row.differences == (0,)
    assert row.near_ties == ((0,) if tie else ())


@pytest.mark.parametrize(("stated", "ok"), [("float16", True), ("float32", False)])
def test_float32_logits_are_judged_by_the_dtype_that_the_dump_of_the_engine_states(tmp_path, stated, ok):
    """0.002 is within 0.01, the table for float16, and beyond 0.0001, that for float32."""
    theirs = torch.full((2, 3, 16), 1.0)
    tap = Tap("lm_head", "logits", dtype="float32", axes=("batch", "length", ""))
    found = one_verdict(three_ways(tmp_path, tap, theirs * 1.002, theirs, dtype=stated), "lm_head")
    assert found[0] is ok
    assert found[4] == {"float16": 1e-2, "float32": 1e-4}[stated]


def of_dumps(folder, name, ours, theirs):
    """Compare two files of torch that hold one tensor each."""
    for side, tensor in (("ours", ours), ("theirs", theirs)):
        torch.save({name: tensor}, folder / f"{side}.pt")
    return compare_offline(compare_dumps(folder / "ours.pt", folder / "theirs.pt"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("zeros", "ok"), [(0, True), (1, False)])
def test_one_row_of_zeros_of_six_hundred_fails_between_dumps_of_other_tools(tmp_path, dtype, zeros, ok):
    """Its tensor is off by sqrt(1 / 600) = 0.041, less than the tables' 0.08 and 0.0625."""
    theirs = torch.randn(1, 600, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = theirs.float()
    ours[0, 5 : 5 + zeros] = 0
    found = of_dumps(tmp_path, "hidden", ours.to(dtype), theirs)
    assert bool(found) is ok
    assert next(iter(found)).verdict.metric == ("rel_l2" if ok else "row_rel_l2")


@pytest.mark.parametrize("name", ["input_ids", "step.position_ids"])
@pytest.mark.parametrize(("off", "ok"), [(0, True), (1, False)])
def test_ids_that_both_dumps_hold_as_floats_are_equal_or_not(tmp_path, name, off, ok):
    """One of 128,000 is less than the table's 1e-4."""
    ids = torch.full((1, 16), 128_000.0)
    found = of_dumps(tmp_path, name, ids + off, ids)
    assert bool(found) is ok
    assert next(iter(found)).verdict.metric == "mismatched"


def test_numbers_that_are_only_called_ids_are_judged_as_floats(tmp_path):
    halves = torch.full((1, 16), 0.5)
    assert next(iter(of_dumps(tmp_path, "ids", halves, halves))).verdict.metric == "rel_l2"

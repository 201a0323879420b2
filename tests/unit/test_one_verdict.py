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
from ditto_core.stepping.lockstep import Sides, recording, single_step
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

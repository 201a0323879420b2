"""A noise floor of one sample may be small by chance: before a failure near it stands, more samples are taken."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ditto_core.backends.eager import EagerSession
from ditto_core.backends.rounding import OtherRounding
from ditto_core.pair.pair import Pair, PairOptions
from ditto_core.spec import EngineSpec
from tests.models import llama

WIDE = 2048


class OneNumber(nn.Module):
    """A layer with one output that is 1e4 times as large as the others: its error is the tensor's."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(WIDE, 64, bias=False)
        self.layer.weight.data[0] *= 1e4
        self.example = torch.randn(1, WIDE)

    def forward(self, x):
        return self.layer(x)


def error(model, sample=None):
    exact = model.example.double() @ model.layer.weight.double().T
    if sample is None:
        found = model(model.example)
    else:
        with OtherRounding(sample):
            found = model(model.example)
    return float((found - exact).norm() / exact.norm())


def by_luck():
    """Return a model whose own float32 product is exact by chance, beside another rounding of it."""
    for seed in range(1000):
        model = OneNumber(seed).eval().requires_grad_(False)
        if 6 < error(model, 3) / max(error(model), 2.0**-24) < 14:
            return model
    raise AssertionError("no such model in 1000")


@pytest.fixture
def opened(workspace):
    def make():
        model = by_luck()
        return model, {"x": model.example}

    spec = EngineSpec.of(make, backend="onnxruntime", outputs=["layer"])
    pair = Pair(workspace, spec, PairOptions(observer=False))
    yield pair
    pair.close()


def engine_is(pair, change=lambda tensor: tensor, dtype="float32"):
    """Put in the engine's place the model in its dtype with other rounding, which is as right as its own."""

    class Rounded(EagerSession):
        def step(self, inputs, sink):
            outputs = super().step(inputs, lambda site, tensor: sink(site, change(tensor)))
            return {name: change(tensor) for name, tensor in outputs.items()}

    taps = pair.engine.taps
    pair.sessions.__dict__["engine"] = Rounded(pair.sessions.model, taps, dtype=dtype, sample=3)


def test_a_healthy_engine_beyond_one_lucky_sample_is_judged_by_six(opened):
    engine_is(opened)
    found = opened.run()
    found.assert_close()
    assert any("of 6 runs" in note for note in found.notes)
    assert opened.run()  # the floor is kept
    assert {r.floor for r in opened.comparisons[0].results} == {r.floor for r in opened.comparisons[1].results}


@pytest.mark.parametrize("size", [8, 1000])
def test_an_error_beyond_every_sample_fails(opened, size):
    model = opened.sessions.model.module
    largest = max(error(model), *(error(model, sample) for sample in range(1, 6)))
    engine_is(opened, lambda tensor: tensor * (1 + size * largest))
    found = opened.run()
    assert found.first_bad.site == "layer"
    assert found.first_bad.verdict.margin > size / 8  # of four times the largest; the engine's own error is another


def test_a_fault_behind_a_lucky_sample_is_found_where_it_is(workspace):
    lucky = by_luck()

    def make():
        torch.manual_seed(0)
        return nn.Sequential(lucky.layer, nn.Linear(64, 8)), {"input": lucky.example}

    pair = Pair(workspace, EngineSpec.of(make, backend="onnxruntime", outputs=["?"]), PairOptions(observer=False))
    engine_is(pair, lambda tensor: tensor * 2 if tensor.shape[-1] == 8 else tensor)
    found = pair.run()
    pair.close()
    assert found.first_bad.site == "1"
    assert any("of 6 runs" in note for note in found.notes)


class Above(nn.Module):
    """Which outputs of a layer are above a threshold: half precision decides it by its rounding where one nearly is."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(64, 16, bias=False)
        self.layer.weight.data = self.layer.weight.data.half().float()
        self.example = torch.randn(16, 64).half().float()

    def forward(self, x):
        found = self.layer(x)
        return {"above": found > 0.5, "shrunk": torch.where(found > 0.5, found, found - 1)}


def crossed(model, sample):
    """Return how many outputs of the layer cross the threshold in float16; sample 0 is eager itself."""
    x, weight = model.example.half(), model.layer.weight.half()
    exact = nn.functional.linear(model.example, model.layer.weight) > 0.5
    with OtherRounding(sample) if sample else nullcontext():
        return int(((nn.functional.linear(x, weight) > 0.5) != exact).sum())


def deciding(wanted):
    """Return a model of which so many outputs cross the threshold, by sample."""
    for seed in range(1000):
        model = Above(seed).eval().requires_grad_(False)
        if all(crossed(model, sample) == count for sample, count in wanted.items()):
            return model
    raise AssertionError("no such model in 1000")


def other_first(tensor):
    """Return an output with another first element."""
    changed = tensor.clone()
    changed[0, 0] = ~changed[0, 0] if tensor.dtype == torch.bool else changed[0, 0] + 1
    return changed


@pytest.mark.parametrize(
    ("wanted", "change", "bad"),
    [
        ({0: 0, 3: 1}, lambda tensor: tensor, set()),
        (dict.fromkeys(range(6), 0), other_first, {"layer", "above", "shrunk"}),
    ],
)
def test_a_threshold_that_half_precision_crosses_is_no_failure_and_another_element_is_one(
    workspace, wanted, change, bad
):
    model = deciding(wanted)
    spec = EngineSpec.of(lambda: (model, {"x": model.example}), dtype="float16")
    pair = Pair(workspace, spec, PairOptions(observer=False))
    engine_is(pair, change, dtype="float16")
    found = pair.run()
    pair.close()
    assert {r.site for r in found.failures} == bad
    assert any("of 6 runs" in note for note in found.notes)


DEEP = 16_384


def in_a_row(x, weight):
    """Multiply as a kernel without blocks does: the terms are added one after the other, in float32."""
    total = torch.zeros(x.shape[0], weight.shape[0])
    for column, weights in zip(x.T, weight.T, strict=True):
        total += column[:, None] * weights
    return total


def test_a_healthy_engine_that_adds_up_in_a_row_passes(workspace):
    """It loses more than eager, which adds up in blocks."""

    def make():
        torch.manual_seed(0)
        return nn.Linear(DEEP, 64, bias=False), {"input": torch.randn(64, DEEP)}

    pair = Pair(workspace, EngineSpec.of(make, backend="onnxruntime"), PairOptions(observer=False))
    model, inputs = make()
    engine_is(pair, lambda tensor: in_a_row(inputs["input"], model.weight.detach()))
    found = pair.run()
    pair.close()
    found.assert_close()
    assert any("of 6 runs" in note for note in found.notes)


TERMS = 1536


def test_a_fault_of_three_times_what_a_sum_in_a_row_loses_fails(workspace):
    """Many numbers lose the same whichever way they are rounded: there is no luck to allow for."""

    def make():
        torch.manual_seed(0)
        return nn.Linear(TERMS, 64, bias=False), {"input": torch.randn(64, TERMS)}

    model, inputs = make()
    exact = inputs["input"].double() @ model.weight.detach().double().T
    lost = float((in_a_row(inputs["input"], model.weight.detach()) - exact).norm() / exact.norm())
    for times, healthy in ((1, True), (3, False)):
        pair = Pair(workspace, EngineSpec.of(make, backend="onnxruntime"), PairOptions(observer=False))
        engine_is(pair, lambda tensor, times=times: (exact * (1 + times * lost)).float())
        assert bool(pair.run()) == healthy
        assert len(pair.comparisons) == 1
        pair.close()


@pytest.mark.parametrize("terms", [64, 1000])
def test_a_sample_loses_what_a_sum_in_a_row_loses(terms):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, terms, generator=generator) for _ in range(2))
    exact = a.double() @ b.double().T
    with OtherRounding(1):
        sample = nn.functional.linear(a, b)
    lost, really = (float((found - exact).norm()) for found in (sample, in_a_row(a, b)))
    assert really <= lost * 1.3
    assert lost <= really * 1.6  # eager's own error is in it


def test_a_sample_of_numbers_whose_squares_overflow_has_no_nan():
    large = torch.full((2, 4), 1e30)
    with OtherRounding(1):
        assert nn.functional.linear(large, torch.ones(3, 4)).isfinite().all()


def test_whole_numbers_are_multiplied_as_they_are():
    whole = torch.arange(16).reshape(4, 4)
    with OtherRounding(1):
        assert torch.equal(torch.matmul(whole, whole), whole @ whole)


@pytest.mark.parametrize("function", ["linear", "matmul", "bmm", "addmm"])
def test_another_rounding_is_the_same_product_with_other_bits(function):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=generator) for size in ((8, WIDE), (WIDE, 8)))
    arguments = {
        "linear": (nn.functional.linear, a, b.T.contiguous()),
        "matmul": (torch.matmul, a, b),
        "bmm": (torch.bmm, a[None], b[None]),
        "addmm": (torch.addmm, torch.zeros(8), a, b),
    }
    call, *tensors = arguments[function]
    with OtherRounding(1):
        other = call(*tensors)
    assert not torch.equal(other, call(*tensors))
    exact = (a.double() @ b.double()).reshape(other.shape)
    assert float((other - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_up_as_often_as_the_number_is_near(dtype):
    unit = torch.finfo(dtype).eps
    # 1 is representable; 1 + unit / 4 lies a quarter of the way to the next number
    value = torch.tensor([[1.0], [unit]]).to(dtype)
    factors = torch.tensor([[1.0, 0.25]]).to(dtype).repeat(20_000, 1)
    with OtherRounding(1):
        rounded = torch.matmul(factors, value).float()
        exact = torch.matmul(factors[:, :1], value[:1]).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + unit}
    assert float((rounded > 1).float().mean()) == pytest.approx(0.25, abs=0.015)
    assert exact.unique().tolist() == [1.0]


class Rolled(EagerSession):
    """The model with its logits moved by one token from the second step on: it generates others."""

    def step(self, inputs, sink):
        outputs = super().step(inputs, sink)
        decoding = inputs["input_ids"].shape[1] == 1
        return {**outputs, "logits": outputs["logits"].roll(1, -1)} if decoding else outputs


def test_the_floor_of_a_run_that_ended_early_is_measured_again_where_a_run_goes_on(workspace):
    """Both sides follow their own tokens and part at once; what they kept has no floor of the later steps."""
    pair = Pair(workspace, EngineSpec.of(llama, outputs="model.layers.*"), PairOptions(observer=False))
    good = pair.sessions.engine
    pair.sessions.__dict__["engine"] = Rolled(pair.sessions.model, good.taps, dtype="float32")
    assert pair.generate([[5, 6, 7]], max_new_tokens=5, forced=False).steps == 2
    pair.sessions.__dict__["engine"] = good
    found = pair.generate([[5, 6, 7]], max_new_tokens=5)
    assert found
    assert found.steps == 5
    assert all(result.floor is not None for result in found.results)
    pair.close()


def test_a_floor_is_of_the_kernels_that_attention_may_use(workspace):
    """Without its fused kernel torch rounds otherwise; the floor of the one is not the other's."""
    spec = EngineSpec.of(llama, dtype="float16", attention="sdpa", outputs="model.layers.*.self_attn")

    def floors():
        pair = Pair(workspace, spec, PairOptions(observer=False))
        found = pair.generate([[5, 6, 7, 8]], max_new_tokens=1)
        pair.close()
        return [result.floor for result in found.results]

    fused = floors()
    with sdpa_kernel(SDPBackend.MATH):
        plain = floors()
    assert plain != fused
    assert floors() == fused

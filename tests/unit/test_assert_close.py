"""assert_close: what passes, what fails, and what the message says."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ditto_core.compare.assertion import assert_close
from ditto_core.compare.findings import find
from ditto_core.compare.metrics import measure
from ditto_core.errors import UsageError


@pytest.fixture
def base():
    return torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(4))


def message(*args, **kwargs):
    with pytest.raises(AssertionError) as caught:
        assert_close(*args, **kwargs)
    text = str(caught.value)
    assert len(text.splitlines()) <= 10
    return text


def test_equal_values_of_any_kind_pass(base):
    assert_close(base, base.clone())
    assert_close(base.numpy(), base)
    assert_close({"a": [base, 1.5], "b": (2, True)}, {"b": (2, True), "a": [base.numpy(), np.float64(1.5)]})
    assert_close(base.half(), base)
    assert_close(1 + 2j, 1 + 2j)


def test_arrays_that_torch_cannot_view_are_compared(base):
    array = base.numpy()
    assert_close(array[::-1], base.flip(0))
    assert_close(array.astype(">f4"), base)
    array.setflags(write=False)
    assert_close(array, base)


def test_an_object_with_dlpack_is_compared(base):
    class Foreign:
        def __dlpack__(self, **kwargs):
            return base.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return base.__dlpack_device__()

    assert_close(Foreign(), base)
    assert "outside rtol" in message(Foreign(), base + 1)


def test_the_message_leads_with_count_share_and_bounds(base):
    wrong = base.clone()
    wrong[1, 2, 3] += 0.5
    wrong[4, 0, 0] -= 0.25
    text = message(wrong, base, rtol=1e-3, atol=1e-2, name="logits")
    first, second, third = text.splitlines()
    assert first == "logits: 2 of 240 elements (0.00833 of all) outside rtol 0.001, atol 0.01"
    assert "shape [6, 8, 5], float32" in second
    a, b = wrong[1, 2, 3].item(), base[1, 2, 3].item()
    allowed = 1e-2 + 1e-3 * abs(b)
    assert (
        third
        == f"greatest absolute difference 0.5 at (1, 2, 3): actual {a:.9g}, expected {b:.9g}, allowed {allowed:.3g}"
    )


def test_the_first_mismatch_is_shown_when_it_is_not_the_greatest(base):
    wrong = base.clone()
    wrong[0, 0, 1] += 0.25
    wrong[4, 0, 0] -= 0.5
    assert "first mismatch at (0, 0, 1): actual" in message(wrong, base)


def test_a_share_of_elements_may_be_allowed(base):
    wrong = base.clone()
    wrong[0, 0, :2] += 1
    assert_close(wrong, base, max_mismatch_ratio=2 / 240)
    assert "0.42% allowed" in message(wrong, base, max_mismatch_ratio=1 / 240)


def test_rel_l2_alone_judges_the_norm_only(base):
    wrong = base + 1e-3
    assert_close(wrong, base, rel_l2=1e-2)
    assert re.match(r"rel_l2 \d\.\d\de-0[34] > 1\.00e-05", message(wrong, base, rel_l2=1e-5))
    assert "outside rtol" in message(wrong, base, rel_l2=1e-2, atol=1e-4)


def test_nan_and_inf_are_counted_and_placed(base):
    wrong = base.clone()
    wrong[2, 3, 4], wrong[5, 0, 0] = math.nan, math.inf
    text = message(wrong, base, max_mismatch_ratio=0.5)
    assert text.splitlines()[0] == "2 NaN or Inf on one side only"
    assert "NaN: actual 1, expected 0; Inf: actual 1, expected 0; first at (2, 3, 4) in actual" in text


def test_nan_equals_nan_only_on_request():
    both = torch.tensor([1.0, math.nan])
    assert_close(both, both, equal_nan=True)
    assert "1 of 2 elements" in message(both, both)


def test_nan_on_both_sides_is_not_waved_through_by_a_bound_on_the_norm():
    both = torch.tensor([1.0, math.nan])
    assert "rel_l2 inf" in message(both, both, rel_l2=1.0)


@pytest.mark.parametrize("nothing", [{}, [], (), {"a": []}, torch.empty(0), {"a": np.empty((0, 4)), "b": None}])
def test_comparing_nothing_is_a_failure(nothing):
    assert "nothing to compare" in message(nothing, nothing)


def test_different_keys_are_named(base):
    text = message({"layer.0": base, "x": base}, {"layer_0": base, "x": base})
    assert "missing 'layer_0'" in text
    assert "unexpected 'layer.0'" in text
    assert "did you mean 'layer.0'" in text


def test_different_structures_fail(base):
    assert "2 items, expected 1" in message([base, base], [base])
    assert "dict against Tensor" in message({"a": base}, base)
    assert "shapes differ: actual [6, 8, 5], expected [6, 8]" in message(base, base[..., 0])


def test_a_nested_failure_names_its_path_and_the_others(base):
    text = message({"a": base, "b": [base, base + 1], "c": base * 2}, {"a": base, "b": [base, base], "c": base})
    assert text.startswith("['b'][1]: 240 of 240 elements")
    assert text.splitlines()[-1] == "2 of 4 tensors differ"
    assert text.splitlines()[-2].startswith("also ['c']: 240 of 240 elements")


def test_of_many_failing_leaves_three_more_have_their_numbers_and_five_their_path(base):
    text = message([base + i for i in range(12)], [base] * 12).splitlines()
    assert text[0].startswith("[1]: 240 of 240 elements")
    assert [line.split(":")[0] for line in text if line.startswith("also ")] == ["also [2]", "also [3]", "also [4]"]
    assert text[-1] == "11 of 12 tensors differ; also [5], [6], [7], [8], [9] …"


def test_dtypes_and_strides_are_checked_on_demand(base):
    assert_close(base.double(), base)
    assert message(base.double(), base, check_dtype=True).startswith("dtype float64, expected float32")
    assert message({"a": base.numpy().astype(">f8")}, {"a": base}, check_dtype=True).startswith("['a']: dtype float64")
    assert_close(base.numpy().astype(">f4"), base, check_dtype=True)
    turned = base.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(turned, base)
    assert message(turned, base, check_stride=True).startswith("stride (5, 30, 1), expected (40, 5, 1)")
    assert_close(base.numpy(), base, check_stride=True, check_dtype=True)
    assert message(base.numpy()[::-1], base.flip(0), check_stride=True).startswith("stride (-40")
    quantized = torch.quantize_per_tensor(base, 0.01, 0, torch.qint8)
    assert "dtype qint8, expected float32" in message(quantized, quantized.dequantize(), check_dtype=True)


def test_dataclasses_are_compared_by_field(base):
    @dataclass
    class Pair:
        left: torch.Tensor
        right: list[float]

    assert_close(Pair(base, [1.0]), Pair(base.clone(), [1.0]))
    assert message(Pair(base, [1.0]), Pair(base, [2.0])).startswith("['right'][0]: 1 of 1 elements")
    assert "unexpected 'right'" in message(Pair(base, [1.0]), {"left": base})


def test_outputs_of_transformers_are_compared_with_their_caches(base):
    from transformers import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    def output(change=0.0):
        cache = DynamicCache()
        for layer in range(2):
            cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4) + change * layer, layer)
        return CausalLMOutputWithPast(logits=base, past_key_values=cache)

    assert_close(output(), output())
    text = message(output(1.0), output())
    assert re.match(
        r"\['(cache|past_key_values)'\]\[1\]\['values'\]: 24 of 24 elements", text
    )  # transformers renamed it
    assert text.splitlines()[-1] == "1 of 5 tensors differ"


def test_masked_arrays_are_compared_where_they_are_not_masked():
    mask = [False, True, False, False]
    expected = np.ma.masked_array([1.0, 2.0, 3.0, 4.0], mask)
    assert_close(np.ma.masked_array([1.0, 99.0, 3.0, 4.0], mask), expected)
    text = message(np.ma.masked_array([1.0, 99.0, 3.5, 4.0], mask), expected)
    assert text.startswith("1 of 3 elements")
    assert "1 of 4 elements are masked in actual alone" in message(
        np.ma.masked_array([1.0, 2.0, 3.0, 4.0], [True, False, False, False]), expected
    )
    assert_close(torch.tensor([1.0, 99.0, 3.0, 4.0]), expected)
    assert message(torch.tensor([1.0, 99.0, 3.5, 4.0]), expected).startswith("1 of 3 elements")
    assert "all 2 elements are masked" in message(*[np.ma.masked_array([1.0, 2.0], [True, True])] * 2)


def test_objects_that_hold_no_numbers_are_refused():
    with pytest.raises(UsageError, match="cannot compare str"):
        assert_close("a", "a")
    with pytest.raises(UsageError, match="array of"):
        assert_close(np.array(["a"]), np.array(["a"]))


def test_tensors_without_numbers_of_their_own_are_refused():
    for tensor, kind in (
        (torch.empty(2, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged), "nested"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2"),
    ):
        with pytest.raises(UsageError, match=rf"{kind} tensor"):
            assert_close(tensor, tensor)
    with pytest.raises(UsageError, match="array of"):
        assert_close(np.ones(2, np.longdouble), np.ones(2, np.longdouble))


@pytest.mark.parametrize("bound", ["rtol", "atol", "rel_l2", "max_mismatch_ratio"])
@pytest.mark.parametrize("value", [math.nan, -1e-3])
def test_a_bound_that_bounds_nothing_is_refused(bound, value):
    with pytest.raises(UsageError, match=f"{bound} is {value}, expected a"):
        assert_close(1.0, 2.0, **{bound: value})
    with pytest.raises(UsageError, match="max_mismatch_ratio is 5, expected a share from 0 to 1"):
        assert_close(1.0, 2.0, max_mismatch_ratio=5)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.uint16, torch.uint32, torch.int8, torch.bool],
)
def test_every_dtype_that_is_compared_fails_with_a_message(dtype):
    wrong, right = torch.tensor([1.0, 0.0, 1.0, 0.0]).to(dtype), torch.tensor([0.0, 1.0, 1.0, 0.0]).to(dtype)
    text = message(wrong, right)
    assert "2 of 4 elements" in text
    assert "slices 0 and 1 of dimension 0 are swapped" in text
    assert_close(right, right.clone())


def test_token_ids_that_differ_by_one_differ():
    assert "1 of 2 elements" in message(torch.tensor([1, 128001]), torch.tensor([1, 128000]))


def test_integers_are_shown_whole_and_given_no_scale_that_is_not_measured():
    text = message(torch.tensor([2**62 + 1]), torch.tensor([2**62]))
    assert "actual 4611686018427387905, expected 4611686018427387904" in text
    assert "hint" not in text


def test_a_nan_is_not_explained_by_a_scale(base):
    wrong = base.clone()
    wrong[0, 0, 0] = math.nan
    assert "x expected" not in message(wrong, base)


def test_an_error_of_one_ulp_is_reported_as_such(base):
    wrong = base.clone()
    wrong[1, 1, 1] = torch.nextafter(base[1, 1, 1], base[1, 1, 1] * 2)
    assert "max 1 ULP" in message(wrong, base, rtol=0, atol=0)


def test_a_constant_scale_is_reported_as_such(base):
    text = message(base * 1.01, base)
    assert "hint: actual is 1.01 x expected" in text
    assert "hint: actual is (1 +1e-06) x expected" in message(base.double() * (1 + 1e-6), base.double())


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_swapped_pair_of_slices_is_reported_as_such(base, dim):
    order = list(range(base.shape[dim]))
    order[1], order[3] = 3, 1
    swapped = base.index_select(dim, torch.tensor(order))
    assert f"hint: slices 1 and 3 of dimension {dim} are swapped" in message(swapped, base)


@pytest.mark.parametrize(("step", "sign"), [(1, "-"), (-1, "+")])
def test_a_shift_by_one_is_reported_as_such(base, step, sign):
    assert f"actual[i] is expected[i {sign} 1] along dimension 1" in message(base.roll(step, 1), base)


def test_transposed_dimensions_are_reported_as_such():
    square = torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(8))
    assert "dimensions 1 and 2 are transposed" in message(square.transpose(1, 2), square)
    wide = torch.randn(4, 9, generator=torch.Generator().manual_seed(8))
    assert "dimensions 0 and 1 are transposed" in message(wide.t().reshape(4, 9), wide)


def test_a_float16_overflow_that_became_zeros_fails_and_says_so():
    hidden = torch.full((2, 64), 300.0)
    norm = torch.rsqrt(hidden.half().square().mean(-1, keepdim=True)) * hidden.half()
    expected = torch.rsqrt(hidden.square().mean(-1, keepdim=True)) * hidden
    assert not norm.isnan().any()
    text = message(norm, expected)
    assert "hint: actual is all zeros, expected reaches 1: overflow in float16?" in text
    assert "300 squared is 9e+04" in message(torch.zeros(4, dtype=torch.float16), torch.full((4,), 300.0))


def test_noise_is_given_no_false_reason(base):
    noisy = base + 0.05 * torch.randn(base.shape, generator=torch.Generator().manual_seed(9))
    assert find(noisy, base, measure(noisy, base)) == []


def test_equal_tensors_have_no_findings(base):
    assert find(base, base, measure(base, base)) == []


def test_a_finding_carries_the_error_before_and_after(base):
    (finding,) = find(base * 1.01, base, measure(base * 1.01, base))
    assert finding.name == "scale"
    assert finding.before == pytest.approx(0.01, rel=1e-3)
    assert finding.after < 1e-6


def test_none_on_both_sides_is_passed_over_and_on_one_side_differs():
    assert_close({"cache": None, "x": 1.0}, {"cache": None, "x": 1.0})
    with pytest.raises(AssertionError, match=r"^\['cache'\]: NoneType against float$"):
        assert_close({"cache": None}, {"cache": 1.0})
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_close([None], [None])


def test_arrays_of_odd_layout_are_compared():
    records = np.zeros(3, dtype=[("tag", "i1"), ("x", "f4")])
    records["x"] = [1, 2, 3]
    packed = np.frombuffer(b"?" + np.array([1, 2, 3], np.float32).tobytes(), np.float32, offset=1)
    small = np.arange(1, 4, dtype=np.int8)[::-1][::-1]
    for array in (records["x"], packed, small, np.array([1, 2, 3], np.ulonglong), np.array([1, 2, 3], ">u8")):
        assert_close(array, np.array([1, 2, 3], np.float32))
        assert message(array, np.array([1, 2, 4], np.float32)).startswith("1 of 3 elements")
    assert_close(np.broadcast_to(np.float32(2), (3, 2)), np.full((3, 2), 2, np.float32))


def test_a_complex_tensor_is_not_one_of_its_parts():
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    assert "actual [2], expected [2, 2]" in message(numbers, torch.view_as_real(numbers))
    assert_close(numbers.conj(), numbers.numpy().conj())
    assert message(numbers.conj(), numbers).startswith("2 of 2 elements")


def test_what_the_reference_masks_does_not_count():
    expected = np.ma.masked_array([1.0, 2.0, 3.0], mask=[False, True, False])
    assert_close(np.array([1.0, 99.0, 3.0]), expected)
    assert_close(expected.copy(), expected)
    assert message(np.array([1.0, 99.0, 4.0]), expected).startswith("1 of 2 elements")
    assert "1 of 3 elements are masked in actual alone" in message(expected, np.array([1.0, 2.0, 3.0]))
    assert "nothing to compare" in message({"x": np.ma.masked_all(3)}, {"x": np.ma.masked_all(3)})


def test_the_sign_of_zero_counts_where_it_is_asked_for():
    positive, negative = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert_close(negative, positive)
    assert_close(negative, negative.half(), signed_zero=True)
    assert message(negative, positive, signed_zero=True).startswith("1 of 2 elements are zeros of the other sign")
    assert "1 of 1 elements are zeros" in message(complex(1, -0.0), complex(1, 0.0), signed_zero=True)
    masked = np.ma.masked_array([0.0, 1.0], mask=[True, False])
    assert_close(negative, masked, signed_zero=True)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_floats_of_numpy_are_those_of_torch(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([[1.0, -2.0], [0.5, 4.0]]).astype(getattr(ml_dtypes, name))
    assert_close(array[::-1], torch.tensor([[0.5, 4.0], [1.0, -2.0]]))
    with pytest.raises(AssertionError, match=f"{name} against float32"):
        assert_close(array, torch.tensor([[1.0, -2.0], [0.5, 8.0]]))


def test_scales_of_microscaling_are_those_of_torch():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.0, 0.5, 4.0]).astype(ml_dtypes.float8_e8m0fnu)
    assert_close(array, torch.tensor([1.0, 0.5, 4.0]).to(torch.float8_e8m0fnu))
    assert message(array, torch.tensor([1.0, 0.5, 8.0])).startswith("1 of 3 elements")


def test_each_leaf_may_have_its_own_tolerance():
    good = {"logits": torch.ones(4), "past": [torch.ones(4), torch.ones(4)]}
    off = {"logits": torch.ones(4) * 1.01, "past": [torch.ones(4) * 1.1, torch.ones(4)]}
    assert_close(off, good, rtol={"logits": 0.02, "past.*": 0.2}, atol=0)
    assert_close(off, good, rel_l2={"**": 0.02, "past.0": 0.2})
    with pytest.raises(AssertionError, match=r"\['past'\]\[0\].*rtol 0.05"):
        assert_close(off, good, rtol={"**": 0.02, "past.*": 0.05}, atol=0)
    with pytest.raises(AssertionError, match=r"\['logits'\]"):  # one without an entry has the defaults
        assert_close(off, good, rtol={"past.*": 0.2}, atol={"past.*": 0})
    with pytest.raises(UsageError, match=r"rtol: selector 'logit' matches none of 3 .*logits"):
        assert_close(off, good, rtol={"logit": 1})
    with pytest.raises(UsageError, match="rtol is -1"):
        assert_close(off, good, rtol={"logits": -1})


def test_the_only_leaf_of_a_named_pair_is_selected_by_two_stars():
    assert_close(torch.ones(3) * 1.01, torch.ones(3), rtol={"**": 0.02}, atol=0, name="y")

"""`ditto compare`: how what a dump holds is judged: ids, logits, odd dtypes, several bounds, calibration."""

import warnings

import numpy as np
import pytest
import torch

from ditto_core.compare.comparison import Comparison
from tests.unit.saved import X, safetensors


@pytest.mark.parametrize("loosened", [(), ("--rtol", "0.01", "--atol", "2")])
def test_ids_that_one_tool_wrote_as_floats_are_still_ids(compare, tmp_path, loosened):
    """TensorRT-LLM's Python runtime writes every tensor as float32: one id beside another is 8e-6 of its size."""
    ids = torch.tensor([[128000, 5, 7]])
    ours = safetensors(tmp_path / "ours.safetensors", ids=ids + torch.tensor([[1, 0, 0]]), x=X)
    floats = safetensors(tmp_path / "floats.safetensors", ids=ids.float(), x=X)
    whole = safetensors(tmp_path / "whole.safetensors", ids=ids, x=X)
    assert compare(whole, floats, *loosened)[0] == 0
    for other in (floats, whole):
        code, output = compare(ours, other, *loosened)
        assert code == 1
        assert "engine diverges at ids, step 0: mismatched 1.0e+00 > 0.0e+00 (integers are equal or not)" in output
    assert compare(ours, whole, "--tolerance", "max_abs:ids=1")[0] == 0


def test_rtol_and_atol_judge_every_element_as_numpy_does(compare, tmp_path):
    wrong = X.clone().flatten()
    wrong[3] *= 1.02
    sides = {"good": X, "scaled": X * 1.01, "one": wrong.reshape(X.shape)}
    good, scaled, one = (safetensors(tmp_path / f"{name}.safetensors", x=x) for name, x in sides.items())
    for side, rtol in ((scaled, 0.02), (scaled, 0.005), (one, 0.03), (one, 0.01)):
        ours = sides["scaled" if side is scaled else "one"].numpy()
        expected = np.allclose(ours, X.numpy(), rtol=rtol, atol=1e-6)
        code, output = compare(side, good, "--rtol", str(rtol), "--atol", "1e-6")
        assert code == (0 if expected else 1)
        assert f"every element within rtol {rtol:g} and atol 1e-06" in output
    assert compare(scaled, good)[0] == 1  # by the table


def test_bounds_on_two_metrics_of_one_selector_hold_together(compare, tmp_path):
    good, bad = (safetensors(tmp_path / f"{name}.safetensors", x=x) for name, x in (("a", X), ("b", X * 1.01)))
    code, output = compare(bad, good, "--tolerance", "x=1e-3", "--tolerance", "max_abs:x=1")
    assert code == 1
    assert "engine diverges at x, step 0: rel_l2 1.0e-02 > 1.0e-03 (rule 'x')" in output
    assert compare(bad, good, "--tolerance", "x=1e-3", "--tolerance", "max_abs:x=1", "--tolerance", "x=0.1")[0] == 0


def steps_of(folder, *steps):
    folder.mkdir()
    for i, tensors in enumerate(steps):
        torch.save(tensors, folder / f"step{i}.pt")
    return folder


@pytest.mark.parametrize("name", ["logits", "lm_head", "output:logits"])
def test_logits_are_judged_at_their_own_step_and_by_the_name_that_the_dump_gives_them(compare, tmp_path, name):
    """The prefill was dumped without logits."""
    logits = torch.linspace(-3, 3, 50).repeat(2, 1, 1)
    ours = steps_of(tmp_path / "ours", {"x": X}, {"x": X, name: logits.flip(-1)})
    theirs = steps_of(tmp_path / "theirs", {"x": X}, {"x": X, name: logits})
    file = tmp_path / "found.json"
    code, output = compare(ours, theirs, "--dtype", "int8", "--json", file)
    assert code == 1
    assert "engine diverges at the logits, step 1: kl_mean" in output
    found = Comparison.load(file)
    assert [step for step, _ in found.logits_verdicts] == [1, 1]
    assert found.filter(step=0)
    assert not found.filter(name, step=1)
    loose = ("--tolerance", f"kl_mean:{name}=100", "--tolerance", f"top1_disagreement:{name}=1")
    assert compare(ours, theirs, "--dtype", "int8", *loose)[0] == 0


def test_logits_under_two_names_are_both_judged(compare, tmp_path):
    logits = torch.linspace(-3, 3, 50).repeat(2, 1, 1)
    ours = safetensors(tmp_path / "a.safetensors", lm_head=logits, logits=logits.flip(-1).clone())
    theirs = safetensors(tmp_path / "b.safetensors", lm_head=logits, logits=logits.clone())
    code, output = compare(ours, theirs, "--dtype", "int8")
    assert (code, "engine diverges at the logits, step 0: kl_mean" in output) == (1, True)
    assert compare(theirs, theirs, "--dtype", "int8")[0] == 0


def test_a_near_tie_goes_by_the_dtype_that_the_engine_computes_in(compare, tmp_path):
    """TensorRT-LLM stores float32; a unit in the last place of float16 at 5 is 2^-8."""
    expected = torch.tensor([[[5.0, 5.0 - 2**-8, 0.0]]])
    ours = safetensors(tmp_path / "a.safetensors", logits=expected[..., [1, 0, 2]].clone())
    theirs = safetensors(tmp_path / "b.safetensors", logits=expected)
    for dtype, near in (("float16", True), ("float32", False)):
        compare(ours, theirs, "--dtype", dtype, "--json", tmp_path / "found.json")
        (logits,) = Comparison.load(tmp_path / "found.json").logits
        assert (logits.dtype, [flip.near_tie for flip in logits.flips]) == (dtype, [near])


def test_numbers_that_are_no_plain_floats_are_compared(compare, tmp_path):
    angles = torch.polar(torch.ones(2, 3), torch.arange(6.0).reshape(2, 3))
    ids = torch.tensor([3, 2**40]).numpy().astype("uint64")
    torch.save({"freqs": angles, "ids": torch.from_numpy(ids), "x": X}, tmp_path / "a.pt")
    torch.save({"freqs": angles.conj(), "ids": torch.from_numpy(ids + 1), "x": X}, tmp_path / "b.pt")
    assert compare(tmp_path / "a.pt", tmp_path / "a.pt")[0] == 0
    code, output = compare(tmp_path / "b.pt", tmp_path / "a.pt")
    assert code == 1
    assert "engine diverges at freqs, step 0" in output
    assert "bad: 2 of 3 sites" in output


def test_complex_numbers_against_their_parts_are_not_compared(compare, tmp_path):
    angles = torch.polar(torch.ones(2, 3), torch.arange(6.0).reshape(2, 3))
    torch.save({"freqs": angles, "x": X}, tmp_path / "a.pt")
    for name, other in (("parts", torch.view_as_real(angles)), ("real", angles.real)):
        torch.save({"freqs": other, "x": X}, tmp_path / f"{name}.pt")
        code, output = compare(tmp_path / "a.pt", tmp_path / f"{name}.pt")
        assert code == 2
        assert "freqs" in output


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_quantized_tensor_of_torch_is_compared_by_its_numbers(compare, tmp_path):
    for name, scale in (("a", 0.1), ("b", 0.2)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save({"w": torch.quantize_per_tensor(torch.ones(4), scale, 0, torch.qint8)}, tmp_path / f"{name}.pt")
    torch.save({"w": torch.ones(4)}, tmp_path / "plain.pt")
    assert compare(tmp_path / "a.pt", tmp_path / "plain.pt")[0] == 0
    assert compare(tmp_path / "b.pt", tmp_path / "a.pt")[0] == 0


def test_one_tensor_that_cannot_be_compared_is_named_and_the_others_are_judged(compare, tmp_path):
    large = torch.from_numpy(np.array([2**63 + 1], np.uint64))
    torch.save({"big": large, "x": X}, tmp_path / "a.pt")
    torch.save({"big": large, "x": X * 1.01}, tmp_path / "b.pt")
    code, output = compare(tmp_path / "a.pt", tmp_path / "a.pt")
    assert code == 2
    assert "sites could not be compared: big: uint64 numbers of 2^63 and more are not compared, step 0" in output
    assert "engine diverges at x" in compare(tmp_path / "b.pt", tmp_path / "a.pt")[1]


def test_a_tensor_without_numbers_is_2_and_named(compare, tmp_path):
    torch.save({"w": torch.ones(4, device="meta")}, tmp_path / "a.pt")
    code, output = compare(tmp_path / "a.pt", tmp_path / "a.pt")
    assert code == 2
    assert "entry 'w' is on the meta device, expected a tensor with its numbers" in output


def test_files_beside_the_steps_of_a_folder_are_noted(compare, tmp_path):
    folder = steps_of(tmp_path / "dump", {"x": X})
    np.save(folder / "other.npy", X.numpy())
    code, output = compare(folder, folder)
    assert code == 0
    assert "dump holds other files, which are not read: other.npy" in output


def test_the_shape_that_differs_is_named_with_its_step(compare, tmp_path):
    ours = steps_of(tmp_path / "ours", {"x": X}, {"x": X[:2]})
    theirs = steps_of(tmp_path / "theirs", {"x": X}, {"x": X})
    assert "x: shape [2, 4] against [3, 4], step 1" in compare(ours, theirs)[1]


def test_calibrated_rules_find_names_with_brackets_again(compare, tmp_path):
    one, two = X.clone(), X.clone()
    ours = safetensors(tmp_path / "a.safetensors", **{"past[0].key": one, "layers.0.past[1]": two})
    rules = tmp_path / "rules.toml"
    assert compare(ours, ours, "--calibrate", rules)[0] == 0
    code, output = compare(ours, ours, "--tolerances", rules)
    assert code == 0
    assert output.count("(rule '") == 1 and "rule 'layers.*.past?1]'" in output
    assert compare(ours, ours, "--tolerance", "past[0].key=1")[0] == 0
    code, output = compare(ours, ours, "--tolerance", "past[z-a]=1")
    assert code == 2
    assert output.startswith("ditto: selector 'past[z-a]' is malformed")


def test_calibration_takes_no_bound_from_nan_and_shows_what_failed(compare, tmp_path):
    broken = X.clone()
    broken[0, 0] = float("nan")
    ours = safetensors(tmp_path / "a.safetensors", mask=broken, x=X * 1.00001)
    theirs = safetensors(tmp_path / "b.safetensors", mask=broken, x=X)
    rules = tmp_path / "rules.toml"
    code, output = compare(ours, theirs, "--calibrate", rules)
    assert code == 2
    assert "engine diverges at mask, step 0: rel_l2 inf" in output
    assert "not calibrated: mask, step 0 diverges" in output
    assert compare(ours, theirs, "--tolerance", "mask=inf", "--calibrate", rules)[0] == 0
    assert [line.split(" = ")[0] for line in rules.read_text().splitlines() if " = " in line] == ['"x"']


def test_a_bound_of_infinity_goes_through_json(compare, tmp_path):
    ours = safetensors(tmp_path / "a.safetensors", x=X)
    assert compare(ours, ours, "--tolerance", "x=inf", "--json", tmp_path / "found.json")[0] == 0
    found = Comparison.load(tmp_path / "found.json")
    assert [rule.bound for rule in found.tolerance.rules] == [float("inf")]


def test_tensors_that_are_all_empty_are_no_agreement(compare, tmp_path):
    empty = safetensors(tmp_path / "a.safetensors", past=torch.zeros(0, 4))
    code, output = compare(empty, empty)
    assert code == 2
    assert "nothing was compared: the tensors of all 1 sites are empty" in output
    beside = safetensors(tmp_path / "b.safetensors", past=torch.zeros(0, 4), x=X)
    assert compare(beside, beside)[0] == 0


def test_an_output_without_elements_is_not_compared_unless_a_rule_allows_that(compare, tmp_path):
    """No box on either side says nothing of boxes; the exit code is not that of a difference."""
    ours = safetensors(tmp_path / "a.safetensors", x=X, **{"output:boxes": torch.zeros(0, 4)})
    code, output = compare(ours, ours)
    assert code == 2
    assert "the output output:boxes, step 0, could not be judged" in output
    assert "a tolerance of infinity for 'output:boxes'" in output
    assert compare(ours, ours, "--tolerance", "output:boxes=inf")[0] == 0


def test_a_bound_that_is_missed_by_a_hair_shows_by_how_much(compare, tmp_path):
    ours = safetensors(tmp_path / "a.safetensors", x=X.double() * 1.001000001)
    theirs = safetensors(tmp_path / "b.safetensors", x=X.double())
    output = compare(ours, theirs, "--tolerance", "x=1e-3")[1]
    assert "rel_l2 0.001000001 > 0.001 (rule 'x')" in output


@pytest.mark.parametrize("other", [8.0, 0.5])
def test_scales_of_a_dump_are_equal_or_not(compare, tmp_path, other):
    """float8_e8m0fnu holds powers of two: its next number is twice as large."""
    for name, last in (("a", other), ("b", 4.0)):
        torch.save({"scale": torch.tensor([1.0, 2.0, last]).to(torch.float8_e8m0fnu), "x": X}, tmp_path / f"{name}.pt")
    assert compare(tmp_path / "b.pt", tmp_path / "b.pt")[0] == 0
    code, output = compare(tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 1
    assert "engine diverges at scale, step 0: mismatched 1.0e+00 > 0.0e+00" in output


@pytest.mark.parametrize("kind", ["float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_zeros_in_the_place_of_8_bit_floats_fail(compare, tmp_path, kind):
    for name, factor in (("a", 0.0), ("b", 1.0)):
        torch.save({"w": (factor * torch.ones(4, 8)).to(getattr(torch, kind)), "x": X}, tmp_path / f"{name}.pt")
    assert compare(tmp_path / "a.pt", tmp_path / "b.pt")[0] == 1

"""`ditto compare`: exit codes 0, 1 and 2, and the options that a dump's format takes. On files made here."""

import json
import pickle
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ditto_core.backends.base import SessionInfo
from ditto_core.cli import main
from ditto_core.compare.comparison import Comparison
from ditto_core.dumps.polygraphy import save_outputs
from ditto_core.sites import Tap
from ditto_core.trace import TraceWriter

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Run the command as the entry point does; return exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["ditto", "compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        printed = capsys.readouterr()
        return int(done.value.code or 0), printed.out + printed.err

    return run


def safetensors(path, **tensors):
    save_file(tensors, path)
    return path


def test_same_is_0_and_different_is_1(compare, tmp_path):
    good, same = (safetensors(tmp_path / name, x=X) for name in ("a.safetensors", "b.safetensors"))
    bad = safetensors(tmp_path / "c.safetensors", x=X * 1.01)
    assert compare(good, same)[0] == 0
    code, output = compare(bad, good)
    assert code == 1
    assert "rel_l2 1.0e-02 > 1.0e-04" in output
    assert compare(bad, good, "--tolerance", "x=0.02")[0] == 0


def test_the_dtype_that_is_said_decides_the_bound(compare, tmp_path):
    """tllm_debug holds float32 whatever the engine computes in."""
    actual, expected = (
        safetensors(tmp_path / "a.safetensors", x=X * 1.005),
        safetensors(tmp_path / "b.safetensors", x=X),
    )
    assert compare(actual, expected)[0] == 1
    assert compare(actual, expected, "--dtype", "fp16")[0] == 0


def tllm_debug(root, values):
    for rank, value in enumerate(values):
        folder = root / "tllm_debug" / "PP_0" / f"TP_{rank}"
        folder.mkdir(parents=True)
        np.save(folder / "x-step0.npy", (X * value).numpy())
    return root


@pytest.mark.parametrize(("rank", "code"), [("0", 1), ("1", 0), ("PP_0/TP_1", 0)])
def test_a_rank_of_a_tllm_debug_folder_is_chosen(compare, tmp_path, rank, code):
    ranks = tllm_debug(tmp_path / "ranks", (2, 1))
    assert compare(ranks, safetensors(tmp_path / "b.safetensors", x=X), "--rank", rank)[0] == code


def test_a_runner_of_polygraphys_file_is_chosen(compare, tmp_path):
    one, two, both = (tmp_path / f"{name}.json" for name in ("one", "two", "both"))
    save_outputs(one, [{"x": X}], runner="trt-runner")
    save_outputs(two, [{"x": X * 2}], runner="onnxrt-runner")
    data = [json.loads(path.read_text()) for path in (one, two)]
    both.write_text(json.dumps({**data[0], "lst": [*data[0]["lst"], *data[1]["lst"]]}))
    good = safetensors(tmp_path / "b.safetensors", x=X)
    code, output = compare(both, good)
    assert code == 2
    assert "holds 2 runners, choose one with runner=: trt-runner, onnxrt-runner" in output
    assert compare(both, good, "--runner", "trt")[0] == 0
    assert compare(both, good, "--runner", "onnxrt")[0] == 1


def test_an_option_that_neither_format_has_is_2(compare, tmp_path):
    one = safetensors(tmp_path / "a.safetensors", x=X)
    for option in ("rank", "runner", "etrecord", "debug_buffer"):
        code, output = compare(one, one, "--" + option.replace("_", "-"), "0")
        assert (code, output.strip()) == (2, f"ditto: a dump of format file has no option {option!r} (options: none)")


def test_a_rule_that_is_about_no_tensor_is_2_unless_it_is_the_whole_projects(compare, tmp_path):
    one = safetensors(tmp_path / "a.safetensors", **{"layers.0.mlp": X})
    code, output = compare(one, one, "--tolerance", "layer.*.mlp=1e-3")
    assert code == 2
    assert "tolerance: selector 'layer.*.mlp' matches none of 1 sites; closest: layers.0.mlp" in output
    (tmp_path / "pyproject.toml").write_text('[tool.ditto_core.tolerances]\n"of.another.model" = 1e-3\n')
    assert compare(one, one)[0] == 0


def test_token_ids_that_differ_by_one_differ(compare, tmp_path):
    """Their rel-L2 is 8e-6, within any bound for numbers."""
    ours, theirs = (safetensors(tmp_path / f"{i}.safetensors", x=X, ids=torch.tensor([7, 128000 + i])) for i in (0, 1))
    code, output = compare(theirs, ours)
    assert code == 1
    assert "engine diverges at ids, step 0: mismatched 1.0e+00 > 0.0e+00 (integers are equal or not)" in output
    assert "(engine 128001, reference 128000)" in output
    assert compare(theirs, ours, "--tolerance", "ids=1e-4")[0] == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_dumps_of_8_bit_floats_are_judged_by_one_step(compare, tmp_path, dtype):
    good = safetensors(tmp_path / "a.safetensors", x=X.to(dtype))
    far = safetensors(tmp_path / "c.safetensors", x=(X * 1.5).to(dtype))
    assert compare(good, good)[0] == 0
    code, output = compare(far, good)
    assert code == 1
    assert f"(table for {str(dtype)[6:]}, no floor measured)" in output
    mixed = safetensors(tmp_path / "m.safetensors", x=X.to(dtype), y=X.half())
    assert "(table for float16, no floor" in compare(mixed, mixed)[1]


def test_the_coarser_side_decides_the_bound(compare, tmp_path):
    wide, narrow = (safetensors(tmp_path / f"{t}.safetensors", x=X.to(t)) for t in (torch.float32, torch.bfloat16))
    for sides in ((wide, narrow), (narrow, wide)):
        code, output = compare(*sides)
        assert code == 0
        assert "table for bfloat16" in output


@pytest.mark.parametrize("more", [{}, {"y": X + 1}])
def test_shapes_that_differ_are_2_even_where_missing_names_are_ignored(compare, tmp_path, more):
    ours, theirs = (
        safetensors(tmp_path / f"{rows}.safetensors", x=X[:rows].clone(), **{k: v.clone() for k, v in more.items()})
        for rows in (2, 3)
    )
    code, output = compare(ours, theirs, "--ignore-missing")
    assert code == 2
    assert "shape [2, 4] against [3, 4]" in output
    assert "next: a name map aligns names and layouts" in output
    assert not any(words in output for words in ("outputs=", "--ditto-dump-dir", "observer effect"))


def test_a_different_number_of_steps_is_2_unless_it_is_ignored(compare, tmp_path):
    for name, steps in (("a", 2), ("b", 1)):
        (tmp_path / name).mkdir()
        for step in range(steps):
            torch.save({"x": X}, tmp_path / name / f"step{step}.pt")
    code, output = compare("a", "b")
    assert code == 2
    assert "step count: 2 in a, 1 in b" in output
    assert compare("a", "b", "--ignore-missing")[0] == 0


def test_what_the_reader_of_a_dump_has_to_say_is_shown(compare, tmp_path):
    ranks = tllm_debug(tmp_path / "ranks", (1, 2))
    code, output = compare(ranks, safetensors(tmp_path / "b.safetensors", x=X))
    assert code == 0
    assert "holds 2 ranks (PP_0/TP_0, PP_0/TP_1); compared is PP_0/TP_0" in output


def test_a_tensor_that_turned_to_zeros_is_said_to_be_zeros(compare, tmp_path):
    actual, expected = (
        safetensors(tmp_path / "a.safetensors", x=torch.zeros(3, 4).half()),
        safetensors(tmp_path / "b.safetensors", x=(X * 300).half()),
    )
    code, output = compare(actual, expected)
    assert code == 1
    assert "the engine's tensor is all zeros, the reference's reaches 300: overflow?" in output


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (X * 1.01, "actual is 1.01 x expected"),
        (X[[1, 0, 2]], "slices 0 and 1 of dimension 0 are swapped"),
        (torch.zeros(3, 4), "actual is all zeros, expected reaches 1"),
    ],
)
def test_what_explains_the_first_failure_is_said(compare, tmp_path, wrong, reason):
    for name, value in (("actual", wrong), ("expected", X)):
        (tmp_path / name).mkdir()
        for step, tensor in enumerate((X, value)):
            torch.save({"a": X, "x": tensor.clone()}, tmp_path / name / f"step{step}.pt")
    code, output = compare("actual", "expected")
    assert code == 1
    assert f"note: x, step 1: {reason}" in output


def test_nan_on_both_sides_is_counted_in_the_message(compare, tmp_path):
    both = safetensors(tmp_path / "a.safetensors", x=torch.where(X > 0.9, torch.nan, X))
    code, output = compare(both, both)
    assert code == 1
    assert "not finite: engine 1 NaN and 0 Inf, reference 1 NaN and 0 Inf of 12, first at [2, 3] (both)" in output
    assert compare(both, both, "--equal-nan")[0] == 0


def test_a_quantized_engine_is_judged_by_the_logits_in_its_dump(compare, tmp_path):
    logits = torch.linspace(-3, 3, 40).reshape(1, 2, 20) ** 3
    reference = safetensors(tmp_path / "r.safetensors", x=X, logits=logits)
    good = safetensors(tmp_path / "g.safetensors", x=X * 1.2, logits=logits + 1e-3)
    bad = safetensors(tmp_path / "b.safetensors", x=X * 1.2, logits=logits.flip(-1))
    none = safetensors(tmp_path / "n.safetensors", x=X * 1.2)
    assert compare(good, reference, "--dtype", "int8")[0] == 0
    code, output = compare(bad, reference, "--dtype", "int8")
    assert code == 1
    assert "engine diverges at the logits, step 0: kl_mean" in output
    allowed = ("--tolerance", "kl_mean:logits=99", "--tolerance", "top1_disagreement:logits=1")
    assert compare(bad, reference, "--dtype", "int8", *allowed)[0] == 0
    assert compare(bad, reference, "--tolerance", "logits=99", "--tolerance", "kl_mean:logits=1e-9")[0] == 1
    code, output = compare(none, none, "--dtype", "int8")
    assert code == 2
    assert "an int8 engine is judged by its logits, which these dumps do not hold" in output


def test_the_dtype_that_is_said_counts_more_than_that_of_the_trace(compare, tmp_path):
    for name, factor in (("engine", 1.005), ("reference", 1.0)):
        with TraceWriter(
            tmp_path / name, SessionInfo(name, "mine", "float32"), [Tap("m", "m")], prompts=["p"]
        ) as writer:
            writer.write_step({}, {}, {"m": X * factor})
    assert compare(tmp_path / "engine", tmp_path / "reference")[0] == 1
    assert compare(tmp_path / "engine", tmp_path / "reference", "--dtype", "fp16")[0] == 0


def test_a_name_that_only_one_side_has_is_2_unless_it_is_ignored(compare, tmp_path):
    more, less = safetensors(tmp_path / "a.safetensors", x=X, y=X + 1), safetensors(tmp_path / "b.safetensors", x=X)
    assert compare(more, less)[0] == 2
    code, output = compare(more, less, "--ignore-missing")
    assert code == 0
    assert "note: left out y: only in" in output
    assert "could not be compared" not in output


@pytest.mark.parametrize("name", ["x.pt", "x.npy", "x.npz", "x.safetensors", "plain.pt"])
def test_pickled_code_is_2_and_does_not_run(compare, tmp_path, name):
    good, target, path = safetensors(tmp_path / "good.safetensors", x=X), tmp_path / "ran", tmp_path / name
    payload = Payload(target)
    if name == "x.pt":
        torch.save({"x": payload}, path)
    elif name == "x.npy":
        np.save(path, np.array([payload], dtype=object), allow_pickle=True)
    elif name == "x.npz":
        np.savez(path, x=np.array([payload], dtype=object))
    else:
        path.write_bytes(pickle.dumps({"x": payload}))
    for sides in ((path, good), (good, path)):
        code, output = compare(*sides)
        assert code == 2, output
        assert len(output.splitlines()) == 1
        assert name in output
    assert not target.exists()


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[::-1]])
@pytest.mark.parametrize("name", ["x.pt", "x.npy", "x.npz", "x.safetensors", "x.json"])
def test_a_damaged_file_is_2_in_one_line(compare, tmp_path, name, damage):
    good, path = safetensors(tmp_path / "good.safetensors", x=X), tmp_path / name
    if name.endswith("pt"):
        torch.save({"x": X}, path)
    elif name.endswith("npy"):
        np.save(path, X.numpy())
    elif name.endswith("npz"):
        np.savez(path, x=X.numpy())
    elif name.endswith("json"):
        save_outputs(path, [{"x": X}])
    else:
        safetensors(path, x=X)
    path.write_bytes(damage(path.read_bytes()))
    code, output = compare(path, good)
    assert code == 2, output
    assert len(output.splitlines()) == 1
    assert "Traceback" not in output


def test_help_shows_what_stands_in_brackets(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ditto", "gate", "run", "--help"])
    with pytest.raises(SystemExit):
        main()
    shown = " ".join(capsys.readouterr().out.split())
    assert "[tool.ditto_core.gates.NAME]" in shown
    assert "[default: onnxruntime]" in shown


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
    assert code == 1
    assert "nothing was compared: the tensors of all 1 sites are empty" in output
    beside = safetensors(tmp_path / "b.safetensors", past=torch.zeros(0, 4), x=X)
    assert compare(beside, beside)[0] == 0


def test_a_bound_that_is_missed_by_a_hair_shows_by_how_much(compare, tmp_path):
    ours = safetensors(tmp_path / "a.safetensors", x=X.double() * 1.001000001)
    theirs = safetensors(tmp_path / "b.safetensors", x=X.double())
    output = compare(ours, theirs, "--tolerance", "x=1e-3")[1]
    assert "rel_l2 0.001000001 > 0.001 (rule 'x')" in output

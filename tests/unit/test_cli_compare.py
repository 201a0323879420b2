"""`ditto compare`: exit codes 0, 1 and 2, and the options that a dump's format takes. On files made here."""

import json
import pickle

import numpy as np
import pytest
import torch

from ditto_core.cli import main
from ditto_core.dumps.polygraphy import save_outputs
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.trace import TraceWriter
from tests.unit.saved import X, safetensors


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


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
    off = safetensors(tmp_path / "o.safetensors", x=X.to(dtype), y=(X * 1.02).half())
    code, output = compare(off, mixed)
    assert code == 1  # 2 % is within a step of 8 bits
    assert "(table for float16, no floor" in output


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
    assert "not all steps could be compared: 2 in a, 1 in b" in output
    assert "sites could not be compared" not in output
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


def test_a_nan_is_not_explained_by_whatever_leaves_it_out(compare, tmp_path):
    turned = X.clone()
    turned[0, 0] = torch.nan
    engine, reference = (
        safetensors(tmp_path / name, x=x) for name, x in (("a.safetensors", turned), ("b.safetensors", X))
    )
    code, output = compare(engine, reference)
    assert code == 1
    assert "note:" not in output


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
    assert "an int8 engine is judged by its logits, which there are none of: give a tolerance by site" in output
    assert compare(none, none, "--dtype", "int8", "--tolerance", "x=0.1")[0] == 0


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

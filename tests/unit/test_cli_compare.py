"""`ditto compare`: exit codes 0, 1 and 2, and the options that a dump's format takes. On files made here."""

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ditto_core.cli import main
from ditto_core.dumps.polygraphy import save_outputs

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
    code, output = compare(one, one, "--rank", "0")
    assert (code, output.strip()) == (2, "ditto: a dump of format file has no option 'rank' (options: none)")


def test_a_rule_that_is_about_no_tensor_is_2_unless_it_is_the_whole_projects(compare, tmp_path):
    one = safetensors(tmp_path / "a.safetensors", **{"layers.0.mlp": X})
    code, output = compare(one, one, "--tolerance", "layer.*.mlp=1e-3")
    assert code == 2
    assert "tolerance: selector 'layer.*.mlp' matches none of 1 sites; closest: layers.0.mlp" in output
    (tmp_path / "pyproject.toml").write_text('[tool.ditto_core.tolerances]\n"of.another.model" = 1e-3\n')
    assert compare(one, one)[0] == 0


def test_a_name_that_only_one_side_has_is_2_unless_it_is_ignored(compare, tmp_path):
    more, less = safetensors(tmp_path / "a.safetensors", x=X, y=X + 1), safetensors(tmp_path / "b.safetensors", x=X)
    assert compare(more, less)[0] == 2
    assert compare(more, less, "--ignore-missing")[0] == 0


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

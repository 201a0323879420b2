"""Polygraphy's JSON: what the real tool wrote is read, what we write the real tool takes."""

import base64
import io
import json

import numpy as np
import pytest
import torch

from ditto_core.compare.dumps import compare_dumps
from ditto_core.dumps import open_dump
from ditto_core.dumps.polygraphy import save_inputs, save_outputs
from ditto_core.errors import TraceError, UsageError


@pytest.mark.parametrize("suffix", [".json", ""])
def test_saved_outputs_hold_what_numpy_computes_from_the_saved_inputs(polygraphy_dumps, weight, suffix):
    outputs, inputs = (open_dump(polygraphy_dumps / f"{n}{suffix}") for n in ("outputs", "inputs"))
    assert (outputs.format, outputs.steps, inputs.steps) == ("polygraphy", 2, 2)
    assert outputs.info["runner"].startswith("onnxrt-runner")
    assert inputs.info == {"content": "inputs"}
    for step in range(2):
        assert outputs.names(step) == ["layers.0.up", "layers.0.act", "token"]
        up = inputs.load(step, "x").numpy() @ weight
        np.testing.assert_allclose(outputs.load(step, "layers.0.up").numpy(), up, rtol=1e-5)
        np.testing.assert_array_equal(outputs.load(step, "token").numpy()[:, 0], np.maximum(up, 0).argmax(1))


def test_a_file_and_a_folder_of_the_same_run_are_equal(polygraphy_dumps):
    pairs = list(compare_dumps(polygraphy_dumps / "outputs.json", polygraphy_dumps / "outputs").pairs())
    assert len(pairs) == 6
    assert all(torch.equal(p.actual, p.expected) for p in pairs)


def steps_of(path):
    dump = open_dump(path)
    return [{name: dump.load(i, name) for name in dump.names(i)} for i in range(dump.steps)]


def test_what_we_write_passes_the_real_comparison_and_a_fault_in_it_fails(
    polygraphy, polygraphy_dumps, onnx_model, tmp_path
):
    steps = steps_of(polygraphy_dumps / "outputs.json")
    save_inputs(tmp_path / "inputs.json", steps_of(polygraphy_dumps / "inputs.json"))
    save_outputs(tmp_path / "good.json", steps)
    steps[1]["layers.0.up"] = steps[1]["layers.0.up"] * 1.01
    save_outputs(tmp_path / "bad.json", steps)
    for name, code in (("good", 0), ("bad", 1)):
        loads = ["--load-inputs", tmp_path / "inputs.json", "--load-outputs", tmp_path / f"{name}.json"]
        done = polygraphy("run", "--onnxrt", onnx_model, *loads, "--compare", "simple")
        assert done.returncode == code, done.stdout + done.stderr


def test_every_dtype_survives_the_real_loader(tmp_path):
    results = pytest.importorskip("polygraphy.comparator", reason="polygraphy is not installed")
    wanted = {
        name: torch.arange(6).reshape(2, 3).to(getattr(torch, name))
        for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
    }
    wanted |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "strided": torch.arange(6.0).reshape(2, 3).t()}
    save_outputs(tmp_path / "o.json", [wanted, wanted], runner="mine")
    loaded = results.RunResults.load(str(tmp_path / "o.json"))
    assert list(loaded.keys()) == ["mine"]
    back = steps_of(tmp_path / "o.json")
    for step in range(2):
        for name, tensor in wanted.items():
            for got in (torch.as_tensor(loaded["mine"][step][name]), back[step][name]):
                assert got.dtype == tensor.dtype
                assert torch.equal(got, tensor)


def result_file(path, runs):
    path.write_text(json.dumps({"lst": runs, "polygraphy_class": "RunResults"}))
    return path


def test_one_of_several_runners_has_to_be_chosen(polygraphy_dumps, tmp_path):
    runs = json.loads((polygraphy_dumps / "outputs.json").read_text())["lst"]
    path = result_file(tmp_path / "two.json", [["trt-N0", runs[0][1][:1]], ["onnxrt-N1", runs[0][1]]])
    assert open_dump(path, runner="trt-N0").steps == 1
    assert open_dump(path, runner="onnxrt").steps == 2
    for wrong in (None, "torch"):
        with pytest.raises(UsageError, match=r"holds 2 runners, .*: trt-N0, onnxrt-N1"):
            open_dump(path, runner=wrong)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"a": 1}',
        '{"lst": 3, "polygraphy_class": "RunResults"}',
        '{"polygraphy_class": "RunResults"}',
        '{"lst": [["r", [{"outputs": 3}]]], "polygraphy_class": "RunResults"}',
        "[" * 100_000,
    ],
)
def test_other_json_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(TraceError, match=r"x.json (is JSON but neither|cannot be read)") as caught:
        open_dump(tmp_path / "x.json")
    assert "\n" not in str(caught.value)


def test_results_of_no_runner_are_refused(tmp_path):
    with pytest.raises(TraceError, match="holds the results of no runner"):
        open_dump(result_file(tmp_path / "x.json", []))


def npy(array, **options):
    data = io.BytesIO()
    np.save(data, array, **options)
    return data.getvalue()


@pytest.mark.parametrize(
    "array",
    [
        {"array": "no base64!"},
        {"array": base64.b64encode(npy(np.zeros(4))[:-3]).decode()},
        {"array": base64.b64encode(npy(np.array([{}], dtype=object), allow_pickle=True)).decode()},
        {"tensor": base64.b64encode(b"no tensor").decode()},
        {"neither": ""},
    ],
)
def test_a_damaged_array_is_named(tmp_path, array):
    outputs = {"outputs": {"y": {"values": array}}}
    dump = open_dump(result_file(tmp_path / "x.json", [["r", [outputs]]]))
    with pytest.raises(TraceError, match=r"x.json: y cannot be read") as caught:
        dump.load(0, "y")
    assert "\n" not in str(caught.value)


def test_a_writer_that_fails_leaves_the_older_file(tmp_path):
    save_outputs(tmp_path / "o.json", [{"y": torch.ones(2)}])
    before = (tmp_path / "o.json").read_bytes()

    def steps():
        yield {"y": torch.zeros(2)}
        raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        save_outputs(tmp_path / "o.json", steps())
    assert (tmp_path / "o.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["o.json"]


def test_files_of_iterations_are_in_the_order_of_their_numbers(tmp_path):
    for i in range(11):
        save_outputs(tmp_path / f"{i}.json", [{"x": torch.full((1,), float(i))}])
    dump = open_dump(tmp_path)
    assert [float(dump.load(step, "x")) for step in range(dump.steps)] == [*range(11)]


@pytest.mark.parametrize("count", [0, 2])
def test_a_file_of_a_folder_that_holds_no_single_iteration_is_refused(tmp_path, count):
    save_outputs(tmp_path / "0.json", [{"x": torch.zeros(1)}] * count)
    with pytest.raises(TraceError, match=f"holds {count} iterations, expected one in each file of a folder"):
        open_dump(tmp_path)


def test_a_name_that_is_there_twice_is_refused_since_either_may_be_meant(tmp_path):
    """The last one was compared, the other never."""
    path = tmp_path / "outputs.json"
    steps = [{"x": torch.zeros(2), "y": torch.ones(2)}]
    save_outputs(path, steps)
    path.write_text(path.read_text().replace('"y"', '"x"'))
    with pytest.raises(TraceError, match=r"outputs\.json cannot be read: the key 'x' is there twice"):
        open_dump(path)
    save_outputs(path, steps)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "lst": data["lst"] * 2}))
    with pytest.raises(TraceError, match=r"outputs\.json holds two runners that are named 'ditto'"):
        open_dump(path)


@pytest.mark.parametrize("numbers", [(0, 2), (0, 1, "01")])
def test_a_folder_that_lacks_an_iteration_or_has_it_twice_is_refused(tmp_path, numbers):
    for number in numbers:
        save_outputs(tmp_path / f"{number}.json", [{"x": torch.zeros(2)}])
    with pytest.raises(TraceError, match=r"holds steps \[.*\], expected 0 to \d, each once"):
        open_dump(tmp_path)


def test_other_json_beside_iterations_is_not_read_and_said(tmp_path):
    for name in ("0", "first"):
        save_outputs(tmp_path / f"{name}.json", [{"x": torch.zeros(2)}])
    assert open_dump(tmp_path).notes == (f"{tmp_path} holds other files, which are not read: first.json",)

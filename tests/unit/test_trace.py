"""A trace: what goes in comes out, a killed or refused writer leaves no half step, a damaged file is named."""

import json
import signal
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from safetensors.torch import load_file

from ditto_core.errors import TraceError
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.trace import Trace, TraceWriter
from ditto_core.trace.streamfile import CODES
from ditto_core.trace.summary import describe

INFO = SessionInfo(label="eager float32", backend="eager", dtype="float32", model="tiny", facts={"torch": "2.13.0"})
TAPS = (
    Tap("model.layers.0.mlp", value="mlp_out", axes=("batch", "length", ""), aliases=("model.layers.0:mlp",)),
    Tap("lm_head:in", value="norm_out"),
)

ONE_STEP = ["manifest.json", "step0.safetensors", "step0.txt"]


def files(directory):
    return sorted(p.name for p in directory.iterdir())


def step(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = {"input_ids": torch.arange(length)[None], "attention_mask": torch.ones(1, length, dtype=torch.int64)}
    outputs = {"logits": torch.randn(1, length, 11, generator=generator)}
    taps = {tap.site: torch.randn(1, length, 4, generator=generator).half() for tap in TAPS}
    return inputs, outputs, taps


def write(directory, steps=2, **options):
    with TraceWriter(directory, INFO, TAPS, **options) as writer:
        for i in range(steps):
            writer.write_step(*step(3 if i == 0 else 1, seed=i), tokens=[100 + i])
    return directory


def test_what_was_written_is_read_back(tmp_path):
    trace = Trace.open(write(tmp_path / "t", prompts=["Hey"]))
    assert (trace.info, trace.taps, trace.steps, trace.tokens) == (INFO, TAPS, 2, [[100, 101]])
    assert trace.manifest.prompts == ("Hey",)
    assert trace.manifest.complete
    for i, length in enumerate((3, 1)):
        data = trace.step(i)
        for got, expected in zip((data.inputs, data.outputs, data.taps), step(length, seed=i), strict=True):
            assert list(got) == list(expected)
            for name in expected:
                torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0)


def test_the_files_are_plain_safetensors_and_json_that_other_tools_read(tmp_path):
    write(tmp_path / "t", steps=1)
    names = {"input:input_ids", "input:attention_mask", "model.layers.0.mlp", "lm_head:in", "output:logits"}
    assert set(load_file(tmp_path / "t/step0.safetensors")) == names
    manifest = json.loads((tmp_path / "t/manifest.json").read_text())
    assert manifest["format"] == "ditto-trace"
    assert manifest["schema_version"] == 1
    assert manifest["steps"][0]["taps"]["lm_head:in"] == ["float16", [1, 3, 4]]
    assert files(tmp_path / "t") == ONE_STEP


def test_every_dtype_any_strides_and_odd_sizes_survive(tmp_path):
    tensors = {"flag": torch.tensor([True, False, True])}
    for dtype in CODES:
        tensors[str(dtype)] = torch.arange(15).reshape(3, 5).to(dtype).t()[1:]
        tensors[f"{dtype} 0-d"] = torch.tensor(1).to(dtype)
        tensors[f"{dtype} empty"] = torch.empty(0, 3, dtype=dtype)
    with TraceWriter(tmp_path, INFO, ()) as writer:
        writer.write_step({}, tensors, {})
    back = Trace.open(tmp_path).step(0).outputs
    assert list(back) == list(tensors)
    for name, expected in tensors.items():
        got = back[name]
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.data_ptr() % got.element_size() == 0
        assert got.contiguous().view(-1).view(torch.uint8).tolist() == (
            expected.contiguous().view(-1).view(torch.uint8).tolist()
        )


def test_two_taps_that_share_memory_are_both_written(tmp_path):
    base = torch.arange(6.0)
    with TraceWriter(tmp_path, INFO, TAPS) as writer:
        writer.write_step({}, {}, {TAPS[0].site: base, TAPS[1].site: base[2:]})
    taps = Trace.open(tmp_path).step(0).taps
    assert taps["lm_head:in"].tolist() == [2, 3, 4, 5]


def test_a_tap_named_like_an_input_does_not_hide_it(tmp_path):
    with TraceWriter(tmp_path, INFO, (Tap("input:in", value="x"),)) as writer:
        writer.write_step({"in": torch.zeros(2)}, {}, {"input:in": torch.ones(2)})
    data = Trace.open(tmp_path).step(0)
    assert (data.inputs["in"].tolist(), data.taps["input:in"].tolist()) == ([0, 0], [1, 1])


def test_taps_stream_to_disk_through_the_sink(tmp_path):
    inputs, outputs, taps = step(3)
    with TraceWriter(tmp_path, INFO, TAPS) as writer, writer.step(inputs) as sink:
        reused = torch.empty(1, 3, 4, dtype=torch.float16)
        for site, tensor in taps.items():
            reused.copy_(tensor)
            sink.tap(site, reused)
        sink.finish(outputs)
    for site, tensor in taps.items():
        assert torch.equal(Trace.open(tmp_path).step(0).taps[site], tensor)


def test_a_step_that_failed_half_way_leaves_nothing(tmp_path):
    writer = TraceWriter(tmp_path, INFO, TAPS)
    writer.write_step(*step(3))
    with pytest.raises(RuntimeError, match="engine died"), writer.step({}) as sink:
        sink.tap(TAPS[0].site, torch.zeros(3))
        raise RuntimeError("engine died")
    assert files(tmp_path) == ONE_STEP
    assert Trace.open(tmp_path).steps == 1
    assert not Trace.open(tmp_path).manifest.complete


def test_an_undeclared_tap_is_refused_with_the_nearest_one(tmp_path):
    with (
        pytest.raises(TraceError, match=r"'model.layers.0.mpl' is not among the 2 .* 'model.layers.0.mlp'"),
        TraceWriter(tmp_path, INFO, TAPS) as writer,
    ):
        writer.write_step({}, {}, {"model.layers.0.mpl": torch.zeros(1)})


def test_the_summary_has_one_line_a_tensor_with_the_numbers(tmp_path):
    values = torch.tensor([3.0, -4.0, float("nan"), float("inf")])
    with TraceWriter(tmp_path, INFO, TAPS) as writer:
        writer.write_step({"input_ids": torch.arange(9)}, {"logits": values}, {})
    title, head, ids, logits = (tmp_path / "step0.txt").read_text().splitlines()
    assert title == "# step 0 (prefill)"
    assert head.split()[:4] == ["#", "name", "dtype", "shape"]
    # mean of 0..8 is 4, rms sqrt(204 / 9)
    assert ids.split() == str.split("input:input_ids int64 [9] 0 8 4 4.76095 0 0 0 1 2 3 4 5 ...")
    # over the finite values 3 and -4: mean -0.5, rms sqrt(12.5)
    assert logits.split() == str.split("output:logits float32 [4] -4 3 -0.5 3.53553 1 1 3 -4 nan inf")


def test_a_tensor_without_finite_values_has_dashes_for_numbers():
    assert describe(torch.tensor([float("nan")])).split() == ["float32", "[1]", "-", "-", "-", "-", "1", "0", "nan"]
    assert describe(torch.empty(0)).split() == ["float32", "[0]", "-", "-", "-", "-", "0", "0"]


def test_a_directory_with_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(TraceError, match=r"not empty and not a trace \(it holds 'thesis.tex'\)"):
        TraceWriter(tmp_path, INFO, TAPS)
    assert files(tmp_path) == ["thesis.tex"]


def test_steps_without_a_manifest_are_somebody_elses(tmp_path):
    (tmp_path / "step0.safetensors").write_bytes(b"theirs")
    with pytest.raises(TraceError, match="not a trace"):
        TraceWriter(tmp_path, INFO, TAPS)


def test_an_older_trace_is_replaced_with_all_its_steps(tmp_path):
    write(tmp_path, steps=3)
    write(tmp_path, steps=1)
    assert files(tmp_path) == ONE_STEP
    assert Trace.open(tmp_path).steps == 1


def test_a_path_that_cannot_be_a_directory_gives_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match=r"cannot write .*file/t: Not a directory"):
        TraceWriter(tmp_path / "file/t", INFO, TAPS)


def child(code, *args):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)], check=False, capture_output=True, text=True
    )


PRELUDE = """
import os, resource, signal, sys, torch
from ditto_core.session import SessionInfo
from ditto_core.errors import TraceError
from ditto_core.sites import Tap
from ditto_core.trace import TraceWriter
writer = TraceWriter(sys.argv[1], SessionInfo("x", "x", "float32"), [Tap("a", value="a"), Tap("b", value="b")])
writer.write_step({}, {}, {"a": torch.ones(4), "b": torch.ones(4)})
"""


def test_a_killed_writer_leaves_the_complete_steps_readable_and_its_directory_usable(tmp_path):
    code = """
    with writer.step({}) as step:
        step.tap("a", torch.ones(100_000))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert child(PRELUDE + textwrap.dedent(code), tmp_path).returncode == -signal.SIGKILL
    assert any(name.endswith(".tmp") for name in files(tmp_path))
    trace = Trace.open(tmp_path)
    assert (trace.steps, trace.manifest.complete) == (1, False)
    assert trace.step(0).taps["b"].tolist() == [1, 1, 1, 1]
    write(tmp_path, steps=1)
    assert files(tmp_path) == ONE_STEP


def test_a_file_too_large_for_the_disk_gives_one_error_and_no_half_step(tmp_path):
    code = """
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
    try:
        writer.write_step({}, {}, {"a": torch.ones(1 << 17), "b": torch.ones(4)})
    except TraceError as error:
        sys.exit(f"TraceError: {error}")
    """
    done = child(PRELUDE + textwrap.dedent(code), tmp_path)
    assert done.stderr.strip() == f"TraceError: cannot write {tmp_path}/step1.safetensors: File too large"
    assert files(tmp_path) == ONE_STEP
    assert Trace.open(tmp_path).steps == 1


def test_a_manifest_that_no_longer_fits_takes_its_step_back(tmp_path):
    code = """
    size = os.stat(writer.directory / "manifest.json").st_size
    import ditto_core.trace.writer as module
    publish = module.replace_text
    def limited(path, text):
        if path.name == "manifest.json":
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        publish(path, text)
    module.replace_text = limited
    try:
        writer.write_step({}, {}, {"a": torch.ones(4), "b": torch.ones(4)})
    except TraceError as error:
        sys.exit(f"TraceError: {error}")
    """
    done = child(PRELUDE + textwrap.dedent(code), tmp_path)
    assert "File too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert files(tmp_path) == ONE_STEP
    assert Trace.open(tmp_path).step(0).taps["a"].tolist() == [1, 1, 1, 1]


def test_a_flipped_bit_is_found_by_the_checksum(tmp_path):
    write(tmp_path)
    file = tmp_path / "step1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    Trace.open(tmp_path).step(0)
    with pytest.raises(TraceError, match=r"step1.safetensors is damaged: SHA-256"):
        Trace.open(tmp_path).step(1)
    assert Trace.open(tmp_path, verify=False).step(1).outputs["logits"].shape == (1, 1, 11)


@pytest.mark.parametrize("keep", [0, 4, 8, 5000, 0.99])
def test_a_truncated_step_is_named(tmp_path, keep):
    write(tmp_path)
    file = tmp_path / "step0.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(TraceError, match=r"step0.safetensors is damaged: it has \d+ bytes, the manifest says \d+"):
        Trace.open(tmp_path, verify=False).step(0)


def test_a_missing_step_and_a_step_out_of_range_are_named(tmp_path):
    write(tmp_path)
    (tmp_path / "step0.safetensors").unlink()
    with pytest.raises(TraceError, match=r"step0.safetensors is missing"):
        Trace.open(tmp_path).step(0)
    with pytest.raises(TraceError, match=r"has no step 2: it holds 2 steps"):
        Trace.open(tmp_path).step(2)


def test_a_step_that_is_not_what_the_manifest_says_is_named(tmp_path):
    write(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"lm_head:in": ["float16", [1, 3, 4]]', '"lm_head:in": ["float16", [1, 4, 3]]')
    )
    with pytest.raises(
        TraceError, match=r"step0.safetensors holds 'lm_head:in' as .*\[1, 3, 4\].*, the manifest says .*\[1, 4, 3\]"
    ):
        Trace.open(tmp_path).step(0)


def edit(data, **changes):
    return {**data, **changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: json.dumps(d)[:-20], "damaged"),
        (lambda d: "\x00\xff", "damaged"),
        (lambda d: "[]", "damaged"),
        (lambda d: json.dumps({"a": 1}), "damaged.*manifest"),
        (lambda d: json.dumps(edit(d, schema_version=2)), "schema version 2, this version reads 1"),
        (lambda d: json.dumps(edit(d, session={"label": 1})), "damaged"),
        (lambda d: json.dumps(edit(d, steps=[1])), "damaged"),
        (lambda d: json.dumps(edit(d, steps=d["steps"][1:])), r"steps are numbered \[1\]"),
        (lambda d: json.dumps(edit(d, steps=[edit(d["steps"][0], file="../x")])), "not in the trace's directory"),
        (lambda d: json.dumps(edit(d, taps=[{"name": "x"}])), "damaged"),
        (lambda d: json.dumps(edit(d, steps=[edit(d["steps"][0], tokens=[1, 2]), d["steps"][1]])), "numbers of rows"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, change, message):
    write(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(change(json.loads(manifest.read_text())))
    with pytest.raises(TraceError, match=rf"manifest.json .*{message}") as caught:
        Trace.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_manifest_is_no_trace(tmp_path):
    with pytest.raises(TraceError, match=r"is not a trace: it has no manifest.json"):
        Trace.open(tmp_path)


def test_a_tap_that_went_to_disk_is_not_kept_in_memory(tmp_path):
    with TraceWriter(tmp_path, INFO, TAPS) as writer, writer.step({}) as sink:
        tensor = torch.zeros(1 << 16)
        alive = weakref.ref(tensor)
        sink.tap(TAPS[0].site, tensor)
        del tensor
        assert alive() is None
        sink.finish({})

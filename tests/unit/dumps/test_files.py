"""Plain files: what torch and numpy wrote is read; a damaged file, or one with code in it, is one error."""

import base64
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from ditto_core.compare.dumps import compare_dumps
from ditto_core.dumps import FORMATS, open_dump
from ditto_core.dumps.files import flatten
from ditto_core.dumps.polygraphy import save_outputs
from ditto_core.errors import DittoError, TraceError, UsageError
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.trace import TraceWriter
from ditto_core.trace.mapped import filled, load_outline, read_only

X = torch.arange(6.0).reshape(2, 3)
IDS = torch.tensor([[1, 2, 3]])


def write_pt(path):
    torch.save({"x": X, "deep": {"ids": IDS, "list": [X, None, 7]}}, path)


def write_safetensors(path):
    save_file({"x": X, "ids": IDS}, path)


def write_npz(path):
    np.savez(path, x=X.numpy(), ids=IDS.numpy())


def write_npy(path):
    np.save(path, X.numpy())


def write_json(path):
    save_outputs(path, [{"x": X, "half": X.bfloat16()}])


WRITERS = {
    "x.pt": write_pt,
    "x.safetensors": write_safetensors,
    "x.npz": write_npz,
    "x.npy": write_npy,
    "x.json": write_json,
}


def read_all(path):
    dump = open_dump(path)
    return [{name: dump.load(i, name).clone() for name in dump.names(i)} for i in range(dump.steps)]


@pytest.mark.parametrize("name", WRITERS)
def test_a_single_file_is_a_dump_of_one_step(tmp_path, name):
    WRITERS[name](tmp_path / name)
    (step,) = read_all(tmp_path / name)
    assert torch.equal(step["x"], X)


def test_nested_dictionaries_and_lists_have_dotted_names(tmp_path):
    write_pt(tmp_path / "x.pt")
    (step,) = read_all(tmp_path / "x.pt")
    assert list(step) == ["x", "deep.ids", "deep.list.0", "deep.list.2"]
    assert (step["deep.ids"].tolist(), step["deep.list.2"].item()) == (IDS.tolist(), 7)


def test_two_tensors_whose_joined_names_are_one_are_refused(tmp_path):
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, tmp_path / "x.pt")
    with pytest.raises(TraceError, match=r"holds two tensors that are named 'a\.b'"):
        open_dump(tmp_path / "x.pt").names(0)


def test_two_arrays_of_an_archive_that_have_one_name_are_refused(tmp_path):
    write_npz(tmp_path / "x.npz")
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        archive.writestr("x", archive.read("x.npy"))
    with pytest.raises(TraceError, match=r"x\.npz holds two tensors that are named 'x'"):
        open_dump(tmp_path / "x.npz").names(0)


def test_a_sparse_tensor_is_read_as_a_dense_one(tmp_path):
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "x.pt")
    assert torch.equal(open_dump(tmp_path / "x.pt").load(0, "a"), torch.eye(3))


def larger_than_memory(path):
    """A file with a hole: float32 zeros, four times this machine's memory, and a 7 at the end. Return how many."""
    size = 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with path.open("wb") as file:
        if path.suffix == ".npy":
            header = {"descr": "<f4", "fortran_order": False, "shape": (size // 4,)}
            np.lib.format.write_array_header_1_0(file, header)
        else:
            header = json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
            header += b" " * (-len(header) % 8)  # as the library aligns the data
            file.write(len(header).to_bytes(8, "little") + header)
        file.seek(size - 4, os.SEEK_CUR)
        file.write(np.float32(7).tobytes())
    return size // 4


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
def test_a_file_larger_than_memory_is_mapped(tmp_path, name):
    count = larger_than_memory(tmp_path / name)
    dump = open_dump(tmp_path / name)
    assert dump.names(0) == ["x"]
    tensor = dump.load(0, "x")
    (tmp_path / name).unlink()
    assert (tensor.shape, tensor[0], tensor[-1]) == ((count,), 0.0, 7.0)


def test_a_file_of_torch_larger_than_memory_is_mapped(tmp_path):
    count = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # elements of four bytes
    with FakeTensorMode():
        fakes = {"x": torch.empty(count), "list": [torch.empty(2, 3).t()]}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(fakes, tmp_path / "x.pt")
    begin = load_outline(tmp_path / "x.pt")["x"].untyped_storage()._checkpoint_offset
    with (tmp_path / "x.pt").open("r+b") as file:
        file.seek(begin + 4 * (count - 1))
        file.write(np.float32(7).tobytes())
    dump = open_dump(tmp_path / "x.pt")
    assert dump.names(0) == ["x", "list.0"]
    assert (dump.load(0, "x").shape, dump.load(0, "x")[-2:].tolist()) == ((count,), [0.0, 7.0])
    assert dump.load(0, "list.0").shape == (3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_a_tensor_of_torch_that_is_mapped_for_reading_only_is_the_same(tmp_path, dtype):
    x = torch.arange(12).reshape(3, 4).to(dtype)
    tensors = {"whole": x, "view": x[1:], "turned": x.t(), "one": x[2, 3], "none": x[:0], "weight": X, "number": 3}
    torch.save(tensors, tmp_path / "x.pt")
    outline = load_outline(tmp_path / "x.pt")
    for name, tensor in flatten(tensors, ""):
        found = filled(tmp_path / "x.pt", dict(flatten(outline, ""))[name])
        assert (name, found.dtype, found.tolist()) == (name, tensor.dtype, tensor.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_a_tensor_that_is_mapped_for_reading_only_is_the_same(tmp_path, dtype):
    tensors = {"odd": torch.ones(3, dtype=torch.uint8), "x": torch.arange(6).reshape(2, 3).to(dtype)}
    save_file(tensors | {"none": torch.zeros(0, 4)}, tmp_path / "x.safetensors")
    found = read_only(tmp_path / "x.safetensors", "x")
    assert (found.dtype, found.tolist()) == (dtype, tensors["x"].tolist())
    assert read_only(tmp_path / "x.safetensors", "none").shape == (0, 4)


def test_files_of_torch_before_its_zip_format_are_read(tmp_path):
    torch.save({"x": X}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(read_all(tmp_path / "x.pt")[0]["x"], X)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x.npz", "x.npy"])
def test_a_file_without_a_known_suffix_is_told_by_its_content(tmp_path, name):
    WRITERS[name](tmp_path / name)
    (tmp_path / name).rename(tmp_path / "layer0")
    tensors = read_all(tmp_path / "layer0")[0]
    assert torch.equal(tensors["layer0" if name == "x.npy" else "x"], X)


@pytest.mark.parametrize("suffix", ["pt", "safetensors", "npz"])
def test_a_folder_of_numbered_steps(tmp_path, suffix):
    for i in (0, 1, 2, 10, 9, 8, 7, 6, 5, 4, 3):
        tensors = {"x": X * i}
        path = tmp_path / f"step{i}.{suffix}"
        {"pt": torch.save, "safetensors": save_file, "npz": lambda t, p: np.savez(p, **t)}[suffix](tensors, path)
    dump = open_dump(tmp_path)
    assert (dump.format, dump.steps) == ("steps", 11)
    assert all(torch.equal(dump.load(i, "x"), X * i) for i in range(11))


@pytest.mark.parametrize("names", [["step0.pt", "step2.pt"], ["step0.pt", "step0.npz"], ["step1.pt"]])
def test_a_gap_or_a_double_in_the_steps_is_an_error(tmp_path, names):
    for name in names:
        write_pt(tmp_path / name) if name.endswith("pt") else write_npz(tmp_path / name)
    with pytest.raises(TraceError, match=r"holds steps \[.*\], expected 0 to"):
        open_dump(tmp_path)


def test_a_folder_of_arrays_with_subfolders_in_natural_order(tmp_path):
    (tmp_path / "layers").mkdir()
    for i in (2, 10):
        np.save(tmp_path / f"layers/{i}.npy", X.numpy() * i)
    dump = open_dump(tmp_path)
    assert (dump.format, dump.steps, dump.names(0)) == ("arrays", 1, ["layers/2", "layers/10"])
    assert torch.equal(dump.load(0, "layers/10"), X * 10)


@pytest.mark.parametrize("dtype", [">f4", "<f2", ">i8", "u2", "u4", "?", "f8", "c8"])
def test_numpy_dtypes_of_either_byte_order(tmp_path, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    np.save(tmp_path / "x.npy", np.asfortranarray(array))
    tensor = read_all(tmp_path / "x.npy")[0]["x"]
    assert tensor.tolist() == array.tolist()
    assert tensor.numpy().dtype == array.dtype.newbyteorder("=")


@pytest.mark.parametrize("array", [np.float32(2), np.zeros((0, 3), np.float32)])
def test_arrays_without_dimensions_or_elements(tmp_path, array):
    np.save(tmp_path / "x.npy", array)
    assert read_all(tmp_path / "x.npy")[0]["x"].shape == array.shape


@pytest.mark.parametrize(
    ("dtype", "message"), [("V2", "no bfloat16"), ("U3", "cannot be read"), ("M8[s]", "cannot be read")]
)
def test_arrays_that_are_no_numbers_are_refused(tmp_path, dtype, message):
    np.save(tmp_path / "x.npy", np.zeros(2, dtype))
    with pytest.raises(TraceError, match=rf"x.npy.*{message}"):
        read_all(tmp_path / "x.npy")


def test_formats_of_the_two_sides_may_differ(tmp_path):
    for name in ("x.pt", "x.npz"):
        WRITERS[name](tmp_path / name)
    (pair,) = compare_dumps(tmp_path / "x.pt", tmp_path / "x.npz").pairs()
    assert torch.equal(pair.actual, pair.expected)


def test_a_trace_is_a_dump_with_taps_in_topological_order(tmp_path):
    with TraceWriter(tmp_path, SessionInfo("s", "b", "float32"), [Tap("b", "b"), Tap("a", "a")]) as writer:
        writer.write_step({"ids": IDS}, {"logits": X}, {"a": X, "b": X * 2})
    dump = open_dump(tmp_path)
    assert (dump.format, dump.notes) == ("trace", ())
    assert dump.names(0) == ["input:ids", "b", "a", "output:logits"]
    assert torch.equal(dump.load(0, "b"), X * 2)


def test_an_incomplete_trace_says_so(tmp_path):
    TraceWriter(tmp_path, SessionInfo("s", "b", "float32"), []).write_step({"ids": IDS}, {}, {})
    assert "is incomplete: its run ended after 1 whole steps" in open_dump(tmp_path).notes[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.npz", "x.json"])
def test_a_pipe_is_refused_without_reading_it(tmp_path, name):
    os.mkfifo(tmp_path / name)
    for path in (tmp_path / name, Path("/dev/zero")):
        with pytest.raises(TraceError, match="is a pipe or a device, expected a file or a folder"):
            open_dump(path)


def test_unknown_and_missing_paths_tensors_steps_and_options_are_named(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    known = ", ".join(form.name for form in FORMATS)
    with pytest.raises(TraceError, match=rf"notes.txt is not a dump of a known format \(known: {known}\)"):
        open_dump(tmp_path / "notes.txt")
    with pytest.raises(TraceError, match=r"nowhere does not exist"):
        open_dump(tmp_path / "nowhere")
    write_npz(tmp_path / "x.npz")
    dump = open_dump(tmp_path / "x.npz")
    with pytest.raises(TraceError, match=r"no tensor 'idss' in step 0; did you mean 'ids'"):
        dump.load(0, "idss")
    with pytest.raises(TraceError, match=r"no step 1: it holds 1 steps"):
        dump.names(1)
    with pytest.raises(UsageError, match=r"a dump of format file has no option 'rank' \(options: none\)"):
        open_dump(tmp_path / "x.npz", rank=1)


class Payload:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (str(self.target),))


def poison_zip_of_torch(path, payload):
    torch.save({"x": X, "code": payload}, path)


def poison_old_torch(path, payload):
    torch.save({"x": X, "code": payload}, path, _use_new_zipfile_serialization=False)


def poison_plain(path, payload):
    path.write_bytes(pickle.dumps({"x": payload}, protocol=2))


def poison_npy(path, payload):
    np.save(path, np.array([payload], dtype=object), allow_pickle=True)


def poison_npz(path, payload):
    np.savez(path, x=np.array([payload], dtype=object))


def poison_json(path, payload):
    plain = path.with_suffix(".pt")
    poison_zip_of_torch(plain, payload)
    save_outputs(path, [{"x": torch.zeros(3, dtype=torch.bfloat16)}])
    data = json.loads(path.read_text())
    data["lst"][0][1][0]["outputs"]["x"]["values"]["tensor"] = base64.b64encode(plain.read_bytes()).decode()
    path.write_text(json.dumps(data))


def poison_array_in_json(path, payload):
    plain = path.with_suffix(".npy")
    poison_npy(plain, payload)
    save_outputs(path, [{"x": X}])
    data = json.loads(path.read_text())
    data["lst"][0][1][0]["outputs"]["x"]["values"]["array"] = base64.b64encode(plain.read_bytes()).decode()
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("name", "poison"),
    [
        ("x.pt", poison_zip_of_torch),
        ("x.pt", poison_old_torch),
        ("x.pt", poison_plain),
        ("x.npy", poison_npy),
        ("x.npy", poison_plain),
        ("x.npz", poison_npz),
        ("x.npz", poison_plain),
        ("x.safetensors", poison_plain),
        ("x.json", poison_json),
        ("x.json", poison_array_in_json),
        ("step0.pt", poison_zip_of_torch),
    ],
)
def test_code_pickled_into_a_file_is_not_run(tmp_path, name, poison):
    target = tmp_path / "code was run"
    (tmp_path / "dump").mkdir()
    path = tmp_path / "dump" / name
    poison(path, Payload(target))
    with pytest.raises(TraceError) as caught:
        read_all(path.parent if name.startswith("step") else path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not target.exists()


def test_the_payload_of_these_tests_works_where_code_is_run(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "proof")))
    assert (tmp_path / "proof").exists()


def test_the_pickled_object_is_named(tmp_path):
    poison_zip_of_torch(tmp_path / "x.pt", Payload(tmp_path / "t"))
    with pytest.raises(
        TraceError, match=r"it holds the pickled object posix.mkdir; only tensors are loaded, nothing was"
    ):
        open_dump(tmp_path / "x.pt").names(0)


@pytest.mark.parametrize("name", WRITERS)
def test_every_truncation_is_an_error_of_ours(tmp_path, name):
    WRITERS[name](tmp_path / name)
    data = (tmp_path / name).read_bytes().rstrip(b"\n")
    for keep in sorted(
        {*range(0, min(len(data), 64), 7), *range(0, len(data), max(1, len(data) // 40)), len(data) - 1}
    ):
        (tmp_path / name).write_bytes(data[:keep])
        with pytest.raises(TraceError) as caught:
            read_all(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_a_flipped_byte_is_read_or_refused_but_never_another_error(tmp_path, name):
    WRITERS[name](tmp_path / name)
    data = (tmp_path / name).read_bytes()
    for position in range(0, len(data), max(1, len(data) // 150)):
        damaged = bytearray(data)
        damaged[position] ^= 0x55
        (tmp_path / name).write_bytes(damaged)
        try:
            read_all(tmp_path / name)
        except DittoError as error:
            assert "\n" not in str(error)


def test_an_archive_of_something_else_is_not_a_dump(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(TraceError, match="not a dump of a known format"):
        open_dump(tmp_path / "x.zip")


def test_an_entry_that_is_no_tensor_is_named(tmp_path):
    torch.save({"x": X, "who": "me"}, tmp_path / "x.pt")
    with pytest.raises(TraceError, match=r"x.pt cannot be read: entry 'who' is of type str, expected tensors"):
        open_dump(tmp_path / "x.pt").names(0)

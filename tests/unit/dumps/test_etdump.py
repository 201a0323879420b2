"""ETDumps that the real ExecuTorch wrote are read through its own Inspector, with the modules' names."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from ditto_core.compare.dumps import compare_dumps
from ditto_core.dumps import open_dump
from ditto_core.errors import TraceError
from ditto_core.stepping.dumps import compare_offline

MAKE = Path(__file__).with_name("make_etdump.py")
LINE = "        return x + self.down(torch.relu(self.up(self.norm(x))))"


@pytest.fixture(scope="session")
def opened(etdumps):
    """The first dump, and the second without its ETRecord: each costs a child process that imports ExecuTorch."""
    (etdumps / "two/etrecord.bin").unlink()
    return {name: open_dump(etdumps / name) for name in ("one", "two")}


def test_every_module_of_eager_is_found_with_its_shape_and_values(etdumps, opened):
    pairs = compare_dumps(opened["one"], etdumps / "one.safetensors")
    found = {p.name: (p.actual - p.expected).abs().max().item() for p in pairs.pairs() if not p.problem}
    assert len(found) == 9  # two blocks of norm, up, down and themselves, and the head
    assert max(found.values()) < 1e-5
    assert pairs.only_expected() == []
    assert all(n.startswith("et:") for _step, n in pairs.only_actual())


def test_without_an_etrecord_tensors_are_named_by_operator_and_said_so(etdumps, opened):
    dump = opened["two"]
    assert "no ETRecord" in dump.notes[0]
    assert all(n.startswith("et:") for n in dump.names(0))
    pairs = compare_dumps(dump, etdumps / "two.safetensors", name_map={"et:16.view_copy.out": "head"})
    ((name, actual, expected),) = [(p.name, p.actual, p.expected) for p in pairs.pairs()]
    assert name == "head"
    assert torch.allclose(actual, expected, atol=1e-5)


def test_runs_on_different_inputs_differ(opened):
    pairs = compare_dumps(opened["two"], opened["one"], name_map={"et:16.view_copy.out": "head"})
    (pair,) = [p for p in pairs.pairs() if p.name == "head"]
    assert not torch.allclose(pair.actual, pair.expected, atol=1e-2)


def test_facts_name_the_files(opened):
    assert (opened["one"].format, opened["one"].steps) == ("etdump", 1)
    assert opened["one"].info == {"etdump": "run.etdp", "debug_buffer": "debug_output.bin", "etrecord": "etrecord.bin"}


def test_without_a_debug_buffer_there_is_nothing_to_read(etdumps, tmp_path):
    shutil.copy(etdumps / "one/run.etdp", tmp_path)
    with pytest.raises(TraceError, match=r"has no debug buffer beside it: name the file with debug_buffer="):
        open_dump(tmp_path)
    with pytest.raises(TraceError, match=r"nowhere does not exist: it should be the debug buffer of run.etdp"):
        open_dump(tmp_path, debug_buffer=tmp_path / "nowhere")


def test_several_etdumps_in_a_folder_have_to_be_named(etdumps, tmp_path):
    for name in ("a.etdp", "b.etdp"):
        shutil.copy(etdumps / "one/run.etdp", tmp_path / name)
    with pytest.raises(TraceError, match=r"holds 2 ETDumps \(a.etdp, b.etdp\), name one"):
        open_dump(tmp_path)
    options = {"debug_buffer": etdumps / "one/debug_output.bin", "etrecord": etdumps / "one/etrecord.bin"}
    assert open_dump(tmp_path / "a.etdp", **options).info["etrecord"] == "etrecord.bin"


def test_a_truncated_etdump_is_refused_before_the_inspector_runs(etdumps, tmp_path):
    shutil.copytree(etdumps / "one", tmp_path / "dump")
    path = tmp_path / "dump/run.etdp"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(TraceError, match=r"run.etdp is truncated: it has 2000 bytes, expected \d{4}"):
        open_dump(tmp_path / "dump")


def test_a_truncated_etrecord_is_refused_before_the_inspector_runs(etdumps, tmp_path):
    shutil.copytree(etdumps / "one", tmp_path / "dump")
    record = tmp_path / "dump/etrecord.bin"
    record.write_bytes(record.read_bytes()[:40_000])
    with pytest.raises(TraceError, match=r"etrecord.bin is not an ETRecord, or a damaged one"):
        open_dump(tmp_path / "dump/run.etdp", etrecord=record)


def test_the_numbers_of_inspectors_own_example_are_the_inspectors(etdumps):
    """Its L1 is a sum. The record has other inputs than the run, for on the same ones all distances are zero."""
    pairs = compare_dumps(etdumps / "example", etdumps / "example/etrecord.bin")
    found = compare_offline(pairs)
    theirs = json.loads((etdumps / "inspector.json").read_text())
    values = {tap.site: tap.value for tap in pairs.actual.taps}
    assert {values[result.site] for result in found.results} == set(theirs)
    assert len(theirs) >= 8
    assert all(gap["MSE"] > 0 for name, gap in theirs.items() if name != "add_1")  # of two parameters
    for result in found.results:
        gap, ours = theirs[values[result.site]], result.metrics
        assert ours.mse == pytest.approx(gap["MSE"], rel=1e-5)
        assert ours.mean_abs * ours.count == pytest.approx(gap["L1"], rel=1e-5)
        assert ours.snr_db == pytest.approx(gap["SNR"], rel=1e-5)
        assert any(f"{result.site} MSE {gap['MSE']:.6g}, L1 {gap['L1']:.6g}" in note for note in found.notes)


def test_operators_have_their_module_and_eager_line_and_blocks_are_named(etdumps):
    pairs = compare_dumps(etdumps / "blocks/run.etdp", etdumps / "blocks/etrecord.bin")
    taps = {tap.site: tap for tap in pairs.actual.taps}
    norm, line = taps["layers.0.norm"], MAKE.read_text().splitlines().index(LINE) + 1
    assert (norm.module_class, norm.source) == ("LayerNorm", f"make_etdump.py:{line}")
    assert taps["layers.0"].value == "linear, relu, linear_1, add"
    assert "layers.0 is what a delegated block returns: linear, relu, linear_1, add" in pairs.notes
    assert not compare_offline(pairs)  # the inputs differ


def test_the_tensors_of_a_delegated_block_are_those_of_its_last_module(etdumps):
    found = open_dump(etdumps / "blocks")
    assert [name for name in found.names(0) if not name.startswith("et:")] == [
        "layers.0.norm",
        "layers.0",
        "layers.1.norm",
        "head",
    ]  # layers.1 ends inside of the second block


def test_an_etrecord_without_inputs_and_one_by_itself_are_refused_with_the_remedy(etdumps):
    with pytest.raises(TraceError, match=r"update_representative_inputs"):
        compare_dumps(etdumps / "one", etdumps / "one/etrecord.bin")
    with pytest.raises(TraceError, match=r"ditto compare run.etdp etrecord.bin"):
        open_dump(etdumps / "one/etrecord.bin")


class Payload:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (str(self.target),))


def test_code_pickled_into_an_etrecord_is_not_run(etdumps, tmp_path):
    shutil.copytree(etdumps / "one", tmp_path / "dump")
    record, target = tmp_path / "dump/etrecord.bin", tmp_path / "code was run"
    with zipfile.ZipFile(record) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    torch.save({"weight": Payload(target)}, tmp_path / "payload")
    poisoned = {n: (tmp_path / "payload").read_bytes() if n.endswith("_dict") else d for n, d in members.items()}
    assert poisoned != members
    with zipfile.ZipFile(record, "w") as archive:
        for name, data in poisoned.items():
            archive.writestr(name, data)
    with pytest.raises(TraceError, match="cannot be read by"):
        open_dump(tmp_path / "dump").names(0)
    assert not target.exists()
    pickle.loads(pickle.dumps(Payload(target)))
    assert target.exists()  # the payload does work where code is run

"""ExecuTorch as an engine: a decoder, a CNN and an encoder pass, a wrong weight is found where it is."""

import shutil
import subprocess
import sys

import pytest
from models import conv_net, many_ids

from ditto_core.backends.executorch import ExecuTorchBackend
from ditto_core.cache import Cache
from ditto_core.compare.dumps import compare_dumps
from ditto_core.compare.judging import UNTAPPED
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import BackendError, BuildError, UsageError
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.session import ShowsCache
from ditto_core.spec import EngineSpec
from ditto_core.stepping.dumps import compare_offline
from tests.faults.programs import scaled_in_program
from tests.module_models import averaging, counting

pytest.importorskip("executorch")

PROFILE = {"batch": (1, 2, 4), "length": (1, 5, 16), "past": (0, 8, 32)}


def spec(model, **fields):
    return EngineSpec.of(model, backend="executorch", profile=PROFILE, **{"outputs": "**", **fields})


def sites(found):
    return [site for site in found.sites if not site.endswith(UNTAPPED)]


def test_a_padded_batch_agrees_at_every_site_and_step_from_a_child_process(workspace):
    pair = Pair(workspace, spec(many_ids), PairOptions(observer=False))
    try:
        found = pair.generate([[3, 1, 4, 1, 5], [2, 7]], max_new_tokens=4)
        assert found, found
        assert (found.steps, len(sites(found)), found.missing) == (4, 15, {})
        session = pair.sessions.engine
        assert session.info.facts["isolation"] == "process"
        assert isinstance(session, ShowsCache)
        assert session.past["past_key_values.0.key"].shape == (2, 2, 8, 16)  # 5 tokens of the prompt, 3 fed after it
    finally:
        pair.close()


@pytest.mark.parametrize("model", [averaging, counting])
def test_each_step_begins_with_the_buffers_that_the_engine_was_built_with(workspace, model):
    pair = Pair(workspace, spec(model), PairOptions(isolation="none", observer=False))
    for _ in range(2):
        pair.run().assert_close()
    pair.close()


def test_a_convolutional_model_agrees_in_xnnpack(workspace):
    pair = Pair(workspace, spec(conv_net, options={"kernels": "xnnpack"}), PairOptions(isolation="none"))
    found = pair.run()
    assert found, found
    assert len(sites(found)) == 6
    assert found.observer is not None
    assert found.observer.rel_l2 <= 1e-6
    assert pair.engine.facts["delegated blocks"] == 2
    pair.close()


RUN = """
import sys
from executorch.devtools.etrecord import parse_etrecord
from executorch.runtime import Runtime, Verification

engine, record, folder = sys.argv[1:]
inputs = parse_etrecord(record)._representative_inputs
runtime = Runtime.get()
loaded = runtime.load_program(engine, verification=Verification.Minimal, enable_etdump=True, debug_buffer_size=1 << 20)
loaded.load_method("forward").execute(inputs)
loaded.write_etdump_result_to_file(f"{folder}/run.etdp", f"{folder}/debug_output.bin")
"""


def test_an_etdump_of_the_engine_is_judged_by_the_etrecord_among_the_artifacts(tmp_path):
    workspace = Workspace(Cache(tmp_path / "cache"), artifacts=tmp_path)
    built = workspace.build(spec(conv_net, outputs=()))
    (record,) = tmp_path.glob("*/etrecord.bin")
    command = [sys.executable, "-c", RUN, str(built.directory / "model.pte"), str(record), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    found = compare_offline(compare_dumps(tmp_path / "run.etdp", record))
    assert found, found
    assert {"0", "2", "3", "5"} <= {site.rpartition(".")[2] for site in found.sites}
    record.unlink()
    workspace.build(spec(conv_net, outputs=()))
    assert record.stat().st_size > 0  # of an engine that was in the cache, too


def test_a_wrong_weight_is_found_at_its_site(tmp_path, monkeypatch):
    scaled_in_program(monkeypatch, "0", 1.01)
    pair = Pair(Workspace(Cache(tmp_path)), spec(conv_net), PairOptions(isolation="none", observer=False))
    found = pair.run()
    assert not found
    assert found.first_bad.site == "0"
    pair.close()


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"dtype": "bfloat16"}, BackendError, "bfloat16"),
        ({"options": {"kernel": "xnnpack"}}, UsageError, "'kernels'"),
        ({"options": {"kernels": "xnn"}}, UsageError, "portable or xnnpack"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(fields, error, text):
    with pytest.raises(error, match=text) as caught:
        ExecuTorchBackend().check(spec(conv_net, **fields))
    assert len(str(caught.value).splitlines()) == 1


def test_the_runtime_refuses_what_is_not_an_engine_in_one_line(tmp_path, workspace):
    built = workspace.build(spec(conv_net, outputs=()))
    shutil.copytree(built.directory, tmp_path / "copy")
    (tmp_path / "copy/model.pte").unlink()
    (tmp_path / "copy/model.pte").write_bytes(b"not a program" * 100)
    with pytest.raises(BuildError, match="executorch refuses the engine") as caught:
        ExecuTorchBackend().open(built.spec, tmp_path / "copy", ())
    assert len(str(caught.value).splitlines()) == 1

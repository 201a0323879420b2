"""A gate on a real Dask cluster of three worker processes, one of which is killed."""

import os
import signal

import pytest

from ditto_core.compare.tolerance import Tolerance
from ditto_core.debug.iterations import IterationOptions
from ditto_core.debug.precision import find_precision
from ditto_core.debug.trials import Elsewhere, PrecisionOptions
from ditto_core.engines.workers import on_cluster
from ditto_core.errors import UsageError
from ditto_core.gates import run_gate
from ditto_core.gates.calibration import Calibration, calibrate_suite
from ditto_core.spec import EngineSpec
from tests.engines.overflow import one_hot_norm
from tests.gate_suites import int8_gate, tiny_gate, tiny_suite

distributed = pytest.importorskip("distributed")


@pytest.fixture
def cluster(tmp_path):
    options = {"dashboard_address": None, "local_directory": str(tmp_path), "silence_logs": 50}
    with distributed.LocalCluster(n_workers=3, threads_per_worker=1, host="127.0.0.1", **options) as cluster:
        yield cluster


def test_three_workers_of_which_one_is_killed_give_the_bits_of_one_process(cluster, workspace, tmp_path):
    gate = int8_gate(tmp_path, tiny_suite(14, 14, 2))
    alone = run_gate(gate, workspace)
    victims = []

    def kill_one(done, total):
        if victims:
            return
        with distributed.Client(cluster.scheduler_address, set_as_default=False) as client:
            pids, busy = client.run(os.getpid), client.processing()
        address = max(busy, key=lambda worker: len(busy[worker]))
        assert len(pids) == 3
        assert busy[address], "the killed worker has samples to lose"
        victims.append(pids[address])
        os.kill(pids[address], signal.SIGKILL)

    result = run_gate(gate, workspace, run=on_cluster(cluster.scheduler_address), on_sample=kill_one)
    assert victims
    assert [r.to_json() for r in result.records] == [r.to_json() for r in alone.records]
    assert [v.to_json() for v in result.verdicts] == [v.to_json() for v in alone.verdicts]

    bounds = {"kl_mean": 0.05, "top1_disagreement": 0.2}  # of 12 positions one may differ
    allowed = Tolerance.of({"logits": [{"metric": metric, "bound": bound} for metric, bound in bounds.items()]})
    work = Calibration.of(gate, "lm_head", workspace, allowed)  # on the same cluster: its workers are slow to start
    few = gate.suite.first(4)
    run = on_cluster(cluster.scheduler_address)
    assert calibrate_suite(work, few, workspace, run=run) == calibrate_suite(work, few, workspace)

    with run:
        spread = search(workspace, tmp_path / "spread.onnx", Elsewhere(run, workspace))
    alone = search(workspace, tmp_path / "alone.onnx", None)
    assert spread.kept == alone.kept
    assert len(alone.kept) == 4
    assert (tmp_path / "spread.onnx").read_bytes() == (tmp_path / "alone.onnx").read_bytes()


def search(workspace, output, elsewhere):
    """`ditto debug precision` on a graph whose norm overflows float16."""
    path = workspace.export(EngineSpec.of(one_hot_norm, dtype="float16")).onnx_path
    options = PrecisionOptions(path, {"x": one_hot_norm()[1]["x"].numpy()})
    iteration = IterationOptions(iter_info=output.with_suffix(".json"), save_replay=output.with_suffix(".replay"))
    return find_precision(options, iteration, output, print, elsewhere)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "without a port"])
def test_an_address_where_nobody_listens_is_one_line(workspace, address):
    run = on_cluster(address, timeout=1)
    with pytest.raises(UsageError, match=f"no Dask scheduler answers at {address}"):
        run_gate(tiny_gate(tiny_suite(1, 0, 0)), workspace, run=run)

"""Independent tasks in real processes: kept open, killed, killed for good, and on a cluster whose workers all die."""

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest

from ditto_core.engines.workers import OnExecutor, executor_of, in_process, kept_open, local_processes, on_cluster
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import RunError, UsageError


@dataclass(frozen=True)
class Squares:
    """Squares a number and says in which process; kills that process at 3, the first ``kills`` times."""

    cache: Path
    kills: int = 0
    remote: str = ""

    def open(self, workspace):
        return self.square

    def square(self, number):
        done = len(list(self.cache.glob("killed*")))
        if number == 3 and done < self.kills:
            (self.cache / f"killed{done}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number**2, os.getpid()


class Written:
    """Adds, and leaves a file when it is closed."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, number):
        return number + 1

    def close(self):
        (self.folder / f"closed{os.getpid()}").touch()


@dataclass(frozen=True)
class Adds(Squares):
    def open(self, workspace):
        return Written(self.cache)


@pytest.mark.parametrize("run", [in_process, local_processes(2)])
def test_what_was_opened_is_closed_after_the_last_task_in_every_process(tmp_path, workspace, run):
    assert collect(run, Adds(tmp_path), [1, 2, 3], workspace) == {"1": 2, "2": 3, "3": 4}
    closed = list(tmp_path.glob("closed*"))
    assert 1 <= len(closed) <= 2
    assert (tmp_path / f"closed{os.getpid()}" in closed) == (run is in_process)


@pytest.fixture
def workspace():
    said = []
    return Workspace(say=said.append), said


def one_process():
    return OnExecutor(lambda: ProcessPoolExecutor(1, get_context("spawn")))


def collect(run, work, numbers, workspace):
    return dict(run(work, {str(n): n for n in numbers}, workspace[0]))


def test_a_block_keeps_the_process_and_a_killed_one_is_replaced(tmp_path, workspace):
    run, work = one_process(), Squares(tmp_path, kills=1)
    with kept_open(run):
        first, second = (collect(run, work, [n], workspace) for n in (1, 2))
        third = collect(run, work, [4, 3, 5], workspace)
        fourth = collect(run, work, [3], workspace)
    assert first["1"][1] == second["2"][1] != os.getpid()
    assert {name: value for name, (value, _) in third.items()} == {"4": 16, "3": 9, "5": 25}
    assert fourth["3"][1] == third["3"][1] != first["1"][1]
    assert len(workspace[1]) == 1
    assert "attempt 1 of 3" in workspace[1][0]


def test_a_task_that_kills_every_process_ends_the_run(tmp_path, workspace, monkeypatch):
    monkeypatch.setattr("ditto_core.engines.workers.ATTEMPTS", 2)
    with pytest.raises(RunError, match="workers died 2 times, 1 tasks have no result: '3'"):
        collect(one_process(), Squares(tmp_path, kills=9), [3], workspace)


def test_a_task_that_kills_every_worker_of_a_cluster_ends_the_run(tmp_path, workspace):
    distributed = pytest.importorskip("distributed")
    import dask

    options = {"dashboard_address": None, "local_directory": str(tmp_path), "silence_logs": 50, "host": "127.0.0.1"}
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, **options) as cluster,
    ):
        run = on_cluster(cluster.scheduler_address)
        assert collect(run, Squares(tmp_path), [2], workspace)["2"][0] == 4
        with pytest.raises(RunError, match="a task killed every worker that took it"):
            collect(run, Squares(tmp_path, kills=9), [3], workspace)


def test_one_job_is_this_process():
    assert local_processes(1) is in_process
    assert executor_of(1, "") is in_process


def test_jobs_and_cluster_exclude_each_other_and_no_job_is_none():
    with pytest.raises(UsageError, match="exclude each other"):
        executor_of(2, "tcp://x:1")
    with pytest.raises(UsageError, match="number of jobs is 0"):
        executor_of(0, "")

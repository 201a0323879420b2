"""What runs the samples: this process, local processes, or a cluster. The records are the same, bit for bit."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from ditto_core.errors import RunError, UsageError
from ditto_core.gates.job import Job, Task, score, score_in_worker
from ditto_core.gates.record import Record

if TYPE_CHECKING:
    from ditto_core.workspace import Workspace

ATTEMPTS = 3
"""How often a sample is tried whose worker died; one that kills every worker must not go on for ever."""

Run = Callable[[Job, Sequence[Task], "Workspace"], Iterator[Record]]
"""Yields the record of each task, in any order."""

Open = Callable[[], AbstractContextManager[Executor]]


def in_process(job: Job, tasks: Sequence[Task], workspace: Workspace) -> Iterator[Record]:
    """Run the samples one after the other, here."""
    if tasks:
        scorer = job.open(workspace)
        for task in tasks:
            yield score(job, task, scorer)


def local_processes(count: int) -> Run:
    """Return what runs samples in ``count`` processes of this machine. Raises :class:`UsageError` below one."""
    if count < 1:
        raise UsageError(f"the number of jobs is {count}, expected at least 1")
    if count == 1:
        return in_process
    # A forked child inherits torch's locked mutexes and CUDA's dead context.
    spawn = multiprocessing.get_context("spawn")
    return on_executor(lambda: ProcessPoolExecutor(count, spawn))


def on_cluster(address: str, *, timeout: float = 30) -> Run:
    """Return what runs samples on a Dask cluster, ``tcp://host:8786``.

    ``timeout`` in seconds, to connect. Raises :class:`UsageError` without Dask, or where no scheduler answers.
    """
    try:
        import distributed
    except ImportError as error:
        raise UsageError("--cluster needs Dask: pip install 'pytest-ditto-engine[cluster]'") from error

    @contextmanager
    def connect() -> Iterator[Executor]:
        try:
            client = distributed.Client(address, timeout=timeout, set_as_default=False)
        except OSError as error:
            raise UsageError(f"no Dask scheduler answers at {address}: {error}") from error
        with client, client.get_executor() as executor:
            try:
                yield executor
            except distributed.KilledWorker as error:  # the scheduler has tried it on several workers by itself
                raise RunError(f"a sample killed every worker that took it: {error}") from error

    return on_executor(connect)


def on_executor(connect: Open) -> Run:
    """Return what runs samples on any :class:`concurrent.futures.Executor`.

    The samples of a worker that dies are run again: by the executor itself where it can (Dask), else in a new one
    (:class:`ProcessPoolExecutor`). Raises :class:`RunError` when workers die ``ATTEMPTS`` times.
    """

    def run(job: Job, tasks: Sequence[Task], workspace: Workspace) -> Iterator[Record]:
        left = {task.sample.id: task for task in tasks}
        for attempt in range(1, ATTEMPTS + 1):
            if not left:
                return
            try:
                with connect() as executor:
                    for record in submitted(executor, job, list(left.values())):
                        del left[record.id]
                        yield record
            except BrokenExecutor as error:
                workspace.say(f"a worker died ({error}); attempt {attempt} of {ATTEMPTS}, {len(left)} samples are left")
        if left:
            raise RunError(f"workers died {ATTEMPTS} times, {len(left)} samples have no result: {next(iter(left))!r} …")

    return run


def submitted(executor: Executor, job: Job, tasks: Sequence[Task]) -> Iterator[Record]:
    """Submit every task and yield records as they come; what is left is cancelled when one fails."""
    futures = [executor.submit(score_in_worker, job, task) for task in tasks]
    try:
        for future in as_completed(futures):
            yield future.result()
    finally:
        for future in futures:
            future.cancel()

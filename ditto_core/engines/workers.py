"""Run independent tasks in this process, in local processes, or on a cluster. A task runs alone, so
its result is the same, bit for bit, wherever it ran."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ditto_core.errors import RunError, UsageError
from ditto_core.system.gpus import pin_next_gpu

if TYPE_CHECKING:
    from ditto_core.engines.workspace import Workspace

ATTEMPTS = 3
"""How often a task is tried whose worker died; one that kills every worker must not go on for ever."""


class Work(Protocol):
    """What is the same for all tasks. It can be hashed, and pickled unless all of it runs in this process.

    ``cache`` and ``remote`` tell where a worker finds models and engines.
    """

    def __hash__(self) -> int: ...

    @property
    def cache(self) -> Path:
        """The cache's directory."""
        ...

    @property
    def remote(self) -> str:
        """The URL of the store behind the cache, empty for none."""
        ...

    def open(self, workspace: Workspace) -> Callable[[Any], Any]:
        """Return what does a task; called once a process, however many tasks it gets.

        Where that has a ``close``, it is called after the last task: engines keep what they compiled while they ran.
        """
        ...


Run = Callable[[Work, Mapping[str, Any], "Workspace"], Iterator[tuple[str, Any]]]
"""Takes tasks by name; yields the name and the result of each, in any order."""

Open = Callable[[], AbstractContextManager[Executor]]


def in_process(work: Work, tasks: Mapping[str, Any], workspace: Workspace) -> Iterator[tuple[str, Any]]:
    """Do the tasks one after the other, here."""
    if tasks:
        do = work.open(workspace)
        try:
            for name, task in tasks.items():
                yield name, do(task)
        finally:
            closing(do)()


def executor_of(jobs: int, cluster: str) -> Run:
    """Return what the options ``--jobs`` and ``--cluster`` ask for. Raises :class:`UsageError`."""
    if cluster and jobs != 1:
        raise UsageError("--jobs and --cluster exclude each other")
    return on_cluster(cluster) if cluster else local_processes(jobs)


def local_processes(count: int) -> Run:
    """Return what does tasks in ``count`` processes of this machine, each on a GPU of its own where there are several.

    Raises :class:`UsageError` below one.
    """
    if count < 1:
        raise UsageError(f"the number of jobs is {count}, expected at least 1")
    if count == 1:
        return in_process
    # A forked child inherits torch's locked mutexes and CUDA's dead context.
    spawn = multiprocessing.get_context("spawn")

    def connect() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(count, spawn, initializer=pin_next_gpu, initargs=(spawn.Value("i", 0),))

    return OnExecutor(connect)


def on_cluster(address: str, *, timeout: float = 30) -> OnExecutor:
    """Return what does tasks on a Dask cluster, ``tcp://host:8786``.

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
        except (OSError, ValueError) as error:
            raise UsageError(f"no Dask scheduler answers at {address}: {error}") from error
        with client, client.get_executor() as executor:
            yield executor

    return OnExecutor(connect, gives_up=(distributed.KilledWorker,))


class OnExecutor:
    """Does tasks on any :class:`concurrent.futures.Executor`; in a ``with`` block it stays open between calls.

    The tasks of a worker that dies are done again: by the executor itself where it can (Dask, which raises one of
    ``gives_up`` in the end), else in a new one (:class:`ProcessPoolExecutor`).
    """

    def __init__(self, connect: Open, gives_up: tuple[type[Exception], ...] = ()) -> None:
        self._connect, self._gives_up = connect, gives_up
        self._kept: ExitStack | None = None
        self._executor: Executor | None = None

    def __enter__(self) -> OnExecutor:
        self._kept = ExitStack()
        return self

    def __exit__(self, *error: object) -> None:
        if self._kept is not None:
            self._kept.close()
        self._kept = self._executor = None

    def __call__(self, work: Work, tasks: Mapping[str, Any], workspace: Workspace) -> Iterator[tuple[str, Any]]:
        """See :data:`Run`. Raises :class:`RunError` when workers die ``ATTEMPTS`` times."""
        left = dict(tasks)
        for attempt in range(1, ATTEMPTS + 1):
            if not left:
                return
            try:
                with self._opened() as executor:
                    for name, result in submitted(executor, work, left):
                        del left[name]
                        yield name, result
            except BrokenExecutor as error:
                workspace.say(f"a worker died ({error}); attempt {attempt} of {ATTEMPTS}, {len(left)} tasks are left")
            except self._gives_up as error:
                raise RunError(f"a task killed every worker that took it: {error}") from error
        if left:
            raise RunError(f"workers died {ATTEMPTS} times, {len(left)} tasks have no result: {next(iter(left))!r} …")

    @contextmanager
    def _opened(self) -> Iterator[Executor]:
        if self._kept is None:
            with self._connect() as executor:
                yield executor
            return
        if self._executor is None:
            self._executor = self._kept.enter_context(self._connect())
        try:
            yield self._executor
        except BrokenExecutor:
            self._executor = None
            raise


def kept_open(run: Run) -> AbstractContextManager[Any]:
    """Return a block in which what ``run`` uses stays open between calls."""
    return run if isinstance(run, OnExecutor) else nullcontext()


def submitted(executor: Executor, work: Work, tasks: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Submit every task and yield results as they come; what is left is cancelled when one fails."""
    futures = {executor.submit(do_in_worker, work, task): name for name, task in tasks.items()}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()


_ONE_AT_A_TIME = threading.Lock()
"""A session holds the KV cache of one sequence, and a cluster's worker may run several tasks at once."""


def do_in_worker(work: Work, task: Any) -> Any:
    """Do a task in this process."""
    with _ONE_AT_A_TIME:
        return opened(work)(task)


def closing(do: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return what lets go of all that was opened to do tasks."""
    return getattr(do, "close", lambda: None)


@lru_cache(maxsize=1)
def opened(work: Work) -> Callable[[Any], Any]:
    """Return what does a work's tasks, opened once a process and closed at its end.

    With a remote store, each machine has its own cache.
    """
    from ditto_core.cache import Cache
    from ditto_core.engines.workspace import Workspace

    do = work.open(Workspace(Cache(remote=work.remote) if work.remote else Cache(work.cache)))
    Finalize(None, closing(do), exitpriority=0)
    return do

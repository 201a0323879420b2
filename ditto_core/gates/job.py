"""What a worker process gets, and how it opens the two sides: once, however many samples it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.engines.workers import Run, Work
from ditto_core.errors import RunError
from ditto_core.gates.record import Record
from ditto_core.gates.scoring import Known, Scorer
from ditto_core.gates.suite import Sample
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from ditto_core.system.gpus import check_device

if TYPE_CHECKING:
    from ditto_core.engines.workspace import Workspace


@dataclass(frozen=True)
class Task:
    """One sample, and what a baseline knows of the reference there."""

    sample: Sample
    known: Known | None = None


def batched(run: Run, size: int) -> Run:
    """Return what runs tasks ``size`` at a time, those of like length together, and yields each one's result."""

    def run_batches(work: Work, tasks: Mapping[str, Task], workspace: Workspace) -> Iterator[tuple[str, Any]]:
        names = (
            sorted(tasks, key=lambda name: len(tasks[name].sample.text or tasks[name].sample.prompt))
            if size > 1
            else list(tasks)
        )
        parts = [names[first : first + size] for first in range(0, len(names), size)]
        groups = {part[0]: [tasks[name] for name in part] for part in parts}
        for _, records in run(work, groups, workspace):
            for record in records:
                yield record.id, record

    return run_batches


@dataclass(frozen=True)
class Job:
    """What is the same for every sample of a gate. It can be pickled unless the model is a lambda.

    ``reference`` is None where a baseline has its results. ``engine`` is the fingerprint that a worker's engine must
    have too. ``cache`` and ``remote`` tell where engines are. ``floor``: the dtype of the eager model whose error
    is the limit, empty where none runs.
    """

    spec: EngineSpec
    reference: Any
    engine: str
    steps: int
    threads: int
    device: str
    cache: Path
    remote: str = ""
    floor: str = ""

    def open(self, workspace: Workspace) -> Scoring:
        """Open both sides. Raises :class:`RunError` when this machine would build another engine.

        Raises :class:`~ditto_core.errors.UsageError` when it lacks the device.
        """
        check_device(self.device)
        engine = workspace.build(self.spec)
        if engine.directory.name != self.engine:
            raise RunError(
                f"this worker builds engine {engine.directory.name[:12]}, expected {self.engine[:12]}: "
                f"its versions or GPU differ from those of the machine that runs the gate"
            )
        from ditto_core.pair.reference import open_reference

        language = workspace.language(self.spec.model)
        options = PairOptions(reference=self.reference, device=self.device, threads=self.threads)
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(engine.open)  # it reads its file while the reference loads
            reference = None if self.reference is None else open_reference(workspace, self.spec, engine, options)
            floor = workspace.eager(self.spec, (), dtype=self.floor, device=self.device) if self.floor else None
            opened = opening.result()
        scorer = Scorer(
            opened, reference, language.tokenizer, language.vocab_size, self.spec.profile, self.steps, floor
        )
        return Scoring(scorer, self.threads)


@dataclass(frozen=True)
class Scoring:
    """Scores samples, with so many threads, until it is closed."""

    scorer: Scorer
    threads: int

    def __call__(self, tasks: Sequence[Task]) -> list[Record]:
        """Run samples on both sides, in one batch where there are several."""
        from ditto_core.system.threads import torch_threads

        with torch_threads(self.threads):
            return self.scorer.score_all([(task.sample, task.known) for task in tasks])

    def close(self) -> None:
        """Release both sides."""
        for session in (self.scorer.engine, self.scorer.reference, self.scorer.floor):
            if session is not None:
                session.close()

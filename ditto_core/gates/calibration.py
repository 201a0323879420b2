"""Calibration over a suite: the error of every site on every sample, wherever the samples run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.backends.registry import check_runs
from ditto_core.compare.tolerance import Tolerance
from ditto_core.compare.tolerance_files import Measured
from ditto_core.engines.workers import Run, in_process
from ditto_core.errors import UsageError
from ditto_core.gates.journal import Journal, OnSample, carry_on
from ditto_core.gates.suite import Sample, Suite
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec, parse_outputs
from ditto_core.system.fingerprint import fingerprint
from ditto_core.system.receipt import make_receipt

if TYPE_CHECKING:
    from ditto_core.engines.workspace import Workspace
    from ditto_core.gates.gate import Gate
    from ditto_core.pair.pair import Pair

STATE = "calibrations"


@dataclass(frozen=True)
class Calibration:
    """What a worker does: step an engine with taps beside its reference on a sample, and keep the errors alone.

    ``steps``: new tokens after a prompt; a text is one prefill. ``reference`` is what ``PairOptions`` takes.
    """

    spec: EngineSpec
    reference: Any
    steps: int
    threads: int
    device: str
    cache: Path
    remote: str = ""
    tolerance: Tolerance = field(default_factory=Tolerance)

    @classmethod
    def of(cls, gate: Gate, outputs: Any, workspace: Workspace, known: Tolerance | None = None) -> Calibration:
        """Take engine and reference from a gate and tap both; ``outputs`` is what :meth:`EngineSpec.of` takes. What
        ``known`` says of logits decides whether the engine is healthy.
        """
        selectors, aliases = parse_outputs(outputs)
        spec, reference = gate.spec, gate.reference
        if isinstance(reference, EngineSpec):
            reference = replace(reference, outputs=selectors, aliases=aliases)
        return cls(
            spec=replace(spec, outputs=selectors, aliases=aliases),
            reference=reference,
            steps=gate.max_new_tokens,
            threads=gate.threads,
            device=gate.device,
            cache=workspace.cache.root,
            remote=workspace.cache.remote,
            tolerance=(known or Tolerance()).on_logits(),
        )

    def key(self, suite: Suite, workspace: Workspace) -> str:
        """Return a digest of all that decides what is measured; what is built, is built for it."""
        sides = [workspace.build(self.spec).running]
        if isinstance(self.reference, EngineSpec):
            sides.append(workspace.build(self.reference).running)
        else:
            sides += [str(self.reference), workspace.digest(self.spec.model), str(self.spec.attention)]
        tokens = suite.tokens(workspace.language(self.spec.model).tokenizer)
        here = make_receipt(threads=self.threads).circumstances
        return fingerprint(sides, suite.digest, tokens, self.steps, self.device, here, self.tolerance.to_json())

    def open(self, workspace: Workspace) -> Measuring:
        """Build the engine, or find it, and open both sides."""
        from ditto_core.pair.pair import Pair

        options = PairOptions(self.reference, self.tolerance, observer=False, threads=self.threads, device=self.device)
        return Measuring(Pair(workspace, self.spec, options), self.steps)


@dataclass(frozen=True)
class Measuring:
    """Measures samples with a pair, prompts in so many steps, until it is closed."""

    pair: Pair
    steps: int

    def __call__(self, sample: Sample) -> Measured:
        """Run one sample in lockstep."""
        prompt: Any = sample.text or sample.prompt
        prompt = prompt if isinstance(prompt, str) else [list(prompt)]
        try:
            return Measured.of(self.pair.generate(prompt, max_new_tokens=1 if sample.text else self.steps))
        except UsageError as error:
            raise UsageError(f"sample {sample.id!r}: {error}") from error
        finally:
            self.pair.comparisons.clear()

    def close(self) -> None:
        """Release both sides."""
        self.pair.close()


def calibrate_suite(
    work: Calibration,
    suite: Suite,
    workspace: Workspace,
    *,
    run: Run = in_process,
    on_sample: OnSample | None = None,
) -> list[Measured]:
    """Return what each sample measured, in the suite's order, as ``write_rules`` takes it.

    The engine is built before the samples are handed out. Each finished sample is written to a journal in the cache
    at once: a run that was interrupted goes on where it stopped. Raises :class:`UsageError` for a sample that does
    not fit the engine or on which a site diverges.
    """
    check_runs(work.spec.backend)
    path = workspace.cache.state(STATE, f"{work.key(suite, workspace)}.jsonl")
    journal = Journal(path, Measured.to_json, Measured.from_json)
    tasks = {sample.id: sample for sample in suite.samples}
    found = carry_on(journal, f"calibration on {suite.name}", work, tasks, workspace, run=run, on_sample=on_sample)
    journal.remove()
    return [found[name] for name in tasks]

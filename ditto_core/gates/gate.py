"""Run a gate: the samples that are still to do, on whatever executes them, into one result."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ditto_core.backends.registry import check_runs
from ditto_core.compare.tolerance import QUANTIZED
from ditto_core.engines.workers import Run, in_process
from ditto_core.errors import RunError, UsageError
from ditto_core.gates.baseline import Baseline
from ditto_core.gates.job import Job, Task, batched
from ditto_core.gates.journal import Journal, OnSample, carry_on
from ditto_core.gates.policy import Policy
from ditto_core.gates.record import Record
from ditto_core.gates.result import GateResult, Identity
from ditto_core.gates.shards import WHOLE, Shard
from ditto_core.gates.suite import Suite
from ditto_core.pair.reference import check_reference, named_backend, recorded_at
from ditto_core.spec import EngineSpec, parse_dtype
from ditto_core.system.fingerprint import fingerprint
from ditto_core.system.receipt import Receipt, make_receipt

if TYPE_CHECKING:
    from ditto_core.engines.workspace import Workspace

NEW_TOKENS = 16
ON_DEVICE = 16
"""Samples of a batch on a GPU, where the engine's profile allows them; on the CPU a batch gains little."""
STATE = "gates"


@dataclass(frozen=True)
class Gate:
    """A suite, an engine, its reference and a policy. Taps are left out: a gate looks at the final outputs.

    ``reference``: ``eager``, ``eager:float32``, the name of a backend (the same model, without the engine's own
    options), or an :class:`~ditto_core.spec.EngineSpec`. ``batch``: samples that run at once, 0 for one on the CPU and
    several on a GPU.
    """

    spec: EngineSpec
    suite: Suite
    reference: Any = "eager"
    policy: Policy = field(default_factory=Policy)
    max_new_tokens: int = NEW_TOKENS
    threads: int = 1
    device: str = "cpu"
    batch: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", self.spec.untapped())
        object.__setattr__(self, "reference", resolved(self.spec, self.reference))
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")
        if self.batch < 0:
            raise UsageError(f"batch is {self.batch}, expected at least 1, or 0 for the device's usual one")

    @property
    def rows(self) -> int:
        """How many samples run at once."""
        return self.batch or (1 if self.device == "cpu" else ON_DEVICE)

    @property
    def dtype(self) -> str:
        """What the engine is judged by: the dtype of its quantized weights, where it has any."""
        return dtype_of(self.spec)

    def differences(self, result: GateResult) -> list[str]:
        """Return what a result does not share with the gate. Loads and builds nothing.

        The model is held by its name: its files need not be where a result is checked.
        """
        identity, policy = result.identity, result.policy
        expected = {
            "suite": (identity.suite_digest, self.suite.digest),
            "samples": (result.ids, self.suite.ids),
            "model": (identity.model, self.spec.model.label),
            "engine": (identity.engine_label, label_of(self.spec)),
            "reference": (identity.reference_label, reference_label(self)),
            "max_new_tokens": (identity.max_new_tokens, self.max_new_tokens),
            **{name: (getattr(policy, name), value) for name, value in vars(self.policy).items()},
        }
        return [f"its {name} is {found!r}, expected {own!r}" for name, (found, own) in expected.items() if found != own]


def resolved(spec: EngineSpec, reference: Any) -> Any:
    """Return a gate's reference as a spec, or as ``eager`` with a dtype. Raises :class:`UsageError`."""
    if isinstance(reference, EngineSpec):
        return reference.untapped()
    check_reference(reference)
    if recorded_at(reference):
        raise UsageError(f"a gate cannot run on the trace {reference}: it has one prompt's steps, not a suite's")
    built = named_backend(replace(spec, options=()), reference)
    return built if built is not None else str(reference)


def run_gate(
    gate: Gate,
    workspace: Workspace,
    *,
    shard: Shard = WHOLE,
    baseline: Baseline | None = None,
    run: Run = in_process,
    on_sample: OnSample | None = None,
) -> GateResult:
    """Run a gate, or one shard of it, and return its result.

    Each finished sample is written to a journal in the cache at once: a run that was interrupted, even by a kill, goes
    on where it stopped, unless versions, machine or settings are others now. ``baseline``: take the reference's results
    from there and run the engine alone. ``run`` executes the samples; see :mod:`ditto_core.engines.workers`. Raises
    :class:`UsageError` for what cannot be run, and :class:`RunError` when a sample has no result in the end.
    """
    job, identity = prepare(gate, workspace, baseline)
    receipt = receipt_of(gate, identity, workspace)
    known = baseline.to_json() if baseline else None
    key = fingerprint(identity.key, str(shard), receipt.circumstances, gate.device, gate.rows, known)
    path = workspace.cache.state(STATE, f"{key}.jsonl")
    journal = Journal(path, Record.to_json, Record.from_json)
    mine = shard.of(gate.suite.samples)
    tasks = {sample.id: Task(sample, baseline.known(sample.id) if baseline else None) for sample in mine}
    execute = batched(run, gate.rows)
    done = carry_on(journal, f"gate {gate.suite.name}", job, tasks, workspace, run=execute, on_sample=on_sample)
    lost = [sample.id for sample in mine if sample.id not in done]
    if lost:
        raise RunError(f"gate {gate.suite.name}: sample {lost[0]!r} has no result ({len(lost)} of {len(mine)} missing)")
    notes = tuple(baseline.warnings(receipt, gate.policy)) if baseline else ()
    result = GateResult(
        identity=identity,
        policy=gate.policy,
        ids=gate.suite.ids,
        records=tuple(done[sample.id] for sample in mine),
        receipts=(receipt,),
        shard=str(shard),
        notes=notes,
    )
    journal.remove()
    return result


def prepare(gate: Gate, workspace: Workspace, baseline: Baseline | None) -> tuple[Job, Identity]:
    """Build what the gate needs, once, and return what workers get and what the result is of."""
    check_runs(gate.spec.backend)
    engine = workspace.build(gate.spec)
    if not engine.decoder:
        raise UsageError(f"{gate.spec.model.label} is not a decoder: a gate needs logits of tokens")
    if baseline is not None:
        reference = baseline.identity.reference
    elif isinstance(gate.reference, EngineSpec):
        reference = workspace.build(gate.reference).running
    else:
        reference = eager_fingerprint(gate, workspace)
    job = Job(
        spec=gate.spec,
        reference=None if baseline else gate.reference,
        engine=engine.directory.name,
        steps=gate.max_new_tokens,
        threads=gate.threads,
        device=gate.device,
        cache=workspace.cache.root,
        remote=workspace.cache.remote,
        floor="" if baseline else floor_dtype(gate),
    )
    identity = Identity(
        suite=gate.suite.name,
        suite_digest=gate.suite.digest,
        model=gate.spec.model.label,
        engine=engine.running,
        engine_label=label_of(gate.spec),
        reference=reference,
        reference_label=reference_label(gate),
        dtype=gate.dtype,
        max_new_tokens=gate.max_new_tokens,
        floor=floor_dtype(gate),
        tokens=gate.suite.tokens(workspace.language(gate.spec.model).tokenizer),
    )
    if baseline is not None:
        baseline.check(gate.suite, workspace.digest(gate.spec.model), identity)
    return job, identity


def receipt_of(gate: Gate, identity: Identity, workspace: Workspace) -> Receipt:
    """Return the receipt of a gate that runs now, here."""
    from ditto_core.backends.registry import get_backend

    return make_receipt(
        engine=identity.engine,
        reference=identity.reference,
        model=workspace.digest(gate.spec.model),
        versions=get_backend(gate.spec.backend).versions(),
        threads=gate.threads,
        seeds={"bootstrap": gate.policy.seed},
    )


def eager_dtype(gate: Gate) -> str:
    """Return the dtype that an eager reference runs in."""
    from ditto_core.backends.eager import HIGHER

    _, _, dtype = str(gate.reference).partition(":")
    return parse_dtype(dtype) if dtype else HIGHER[gate.spec.dtype]


def floor_dtype(gate: Gate) -> str:
    """Return the dtype of the eager model whose distance from the reference is the floor; empty for budgets.

    The engine's own; where the eager reference has that dtype, the next higher one, from which the reference is as far.
    """
    from ditto_core.backends.eager import HIGHER

    if gate.dtype in QUANTIZED:
        return ""
    same = not isinstance(gate.reference, EngineSpec) and eager_dtype(gate) == gate.spec.dtype
    return HIGHER[gate.spec.dtype] if same else gate.spec.dtype


def reference_label(gate: Gate) -> str:
    """Return ``eager float32``, or an engine's label."""
    return label_of(gate.reference) if isinstance(gate.reference, EngineSpec) else f"eager {eager_dtype(gate)}"


def eager_fingerprint(gate: Gate, workspace: Workspace) -> str:
    """Return what an eager reference's results depend on, as a digest."""
    import torch
    import transformers

    versions = [torch.__version__, transformers.__version__]
    return fingerprint(
        workspace.digest(gate.spec.model),
        eager_dtype(gate),
        gate.spec.attention,
        gate.device,
        gate.threads,
        gate.rows,
        versions,
    )


def dtype_of(spec: EngineSpec) -> str:
    """Return the dtype that an engine is judged by: that of its quantized weights, where it has any."""
    return str(spec.option("quantize") or spec.dtype)


def label_of(spec: EngineSpec) -> str:
    """Return ``onnxruntime int8``."""
    return f"{spec.backend} {dtype_of(spec)}"

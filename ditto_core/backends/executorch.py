"""ExecuTorch on the CPU, by its portable kernels or by XNNPACK: taps are further outputs of the exported program."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export.graph_signature import OutputKind

from ditto_core.backends.base import BuildReport, BuildRequest
from ditto_core.backends.program_session import ProgramSession, Signature
from ditto_core.errors import BackendError, BuildError, RunError, UsageError, first_line, nearest
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

if TYPE_CHECKING:
    from ditto_core.model.program import Program

ENGINE_FILE = "model.pte"
RECORD_FILE = "etrecord.bin"
METHOD = "forward"
KERNELS = ("portable", "xnnpack")
OPTIONS = ("kernels", "threads")


class ExecuTorchBackend:
    """Lowers the exported program to a ``.pte`` file.

    Options: ``kernels`` (``portable``, or ``xnnpack`` for what XNNPACK takes), ``threads`` (of XNNPACK, default 1). Its
    runtime aborts on some errors, so that its sessions live in child processes.
    """

    name = "executorch"
    dtypes = ("float32", "float16")
    isolation = "process"

    def check(self, spec: EngineSpec) -> None:
        """Raise when executorch is missing, lacks the dtype, or an option is unknown."""
        installed()
        kernels = spec.option("kernels", KERNELS[0])
        if spec.dtype not in self.dtypes:
            raise BackendError(f"executorch is driven in {', '.join(self.dtypes)} only, got {spec.dtype}")
        for name, _ in spec.options:
            if name not in OPTIONS:
                known = ", ".join(OPTIONS)
                raise UsageError(f"executorch has no option {name!r}{nearest(name, OPTIONS)} (known: {known})")
        spec.threads()
        if kernels not in KERNELS:
            raise UsageError(f"executorch has no kernels {kernels!r}, expected {' or '.join(KERNELS)}")

    def versions(self) -> dict[str, str]:
        """What traces, lowers and runs a program."""
        return {"executorch": installed(), "torch": str(torch.__version__)}

    def build(self, request: BuildRequest) -> BuildReport:
        """Trace the model with the taps as outputs and lower it. Raises :class:`BuildError` with the reason."""
        program = request.exported_program()
        signature = Signature.of(program, request.outputs)
        lowered = lower(program, request.spec.option("kernels", KERNELS[0]), record=request.artifacts is not None)
        (request.directory / ENGINE_FILE).write_bytes(lowered.manager.buffer)
        signature.save(request.directory)
        if request.artifacts:
            lowered.save_record(request.artifacts)
        return BuildReport(program.taps, program.refused, lowered.facts)

    def write_artifacts(self, request: BuildRequest) -> None:
        """Lower the model again for its ETRecord, which has the weights twice: the cache does not keep it."""
        assert request.artifacts is not None
        kernels = request.spec.option("kernels", KERNELS[0])
        lower(request.exported_program(), kernels, record=True).save_record(request.artifacts)

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> ProgramSession:
        """Load the engine. Raises :class:`BuildError` when ExecuTorch refuses the file."""
        runtime = load_runtime()
        threads = spec.threads()
        if runtime._threadpool_get_thread_count() != threads:
            runtime._unsafe_reset_threadpool(threads)
        signature = Signature.load(directory)
        try:
            program = runtime._load_program(str(directory / ENGINE_FILE))
            method = program.load_method(METHOD)
        except RuntimeError as error:
            raise BuildError(f"executorch refuses the engine: {first_line(error)}") from error
        kernels = spec.option("kernels", KERNELS[0])
        facts = {**self.versions(), "kernels": kernels}
        label = f"executorch {kernels} {spec.dtype}"
        info = SessionInfo(label, self.name, spec.dtype, "cpu", spec.model.label, facts)

        def run(feed: Any, loaded: Any = program) -> Any:  # the method does not keep its program alive
            return method(feed)

        return ProgramSession(run, signature, taps, info)


def installed() -> str:
    """Return the version of executorch, or say how to get it."""
    try:
        return version("executorch")
    except PackageNotFoundError as error:
        raise BackendError("executorch is not installed: pip install 'pytest-ditto-engine[executorch]'") from error


def load_runtime() -> Any:
    """Import the runtime by itself: ``executorch.runtime`` imports the whole compiler, which takes seconds."""
    installed()
    try:
        from executorch.extension.pybindings import _C
    except ImportError as error:
        raise RunError(
            f"executorch {installed()} cannot be loaded beside torch {torch.__version__}: {first_line(error)}"
        ) from error
    return _C


@dataclass(frozen=True)
class Lowered:
    """ExecuTorch's program, of how many operators and delegated blocks it consists, and the inputs it was traced on."""

    manager: Any
    facts: dict[str, int]
    inputs: tuple[Any, ...]

    def save_record(self, directory: Path) -> None:
        """Write the ETRecord: `ditto compare run.etdp etrecord.bin` judges an ETDump of the program by it."""
        record = self.manager.get_etrecord()
        record.update_representative_inputs(list(self.inputs))
        directory.mkdir(parents=True, exist_ok=True)
        record.save(str(directory / RECORD_FILE))


def lower(program: Program, kernels: str, *, record: bool = False) -> Lowered:
    """Lower a traced model, with its ETRecord if that is to be saved. Raises :class:`BuildError` with the reason."""
    from ditto_core.model.tracing import quiet

    exported = without_dropout(without_writes(program.exported))
    inputs = exported.example_inputs[0] if exported.example_inputs else ()
    with quiet():
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

        config = EdgeCompileConfig(_check_ir_validity=False)
        try:
            edge = to_edge_transform_and_lower(
                exported, partitioner=partitioners(kernels), compile_config=config, generate_etrecord=record
            )
            manager = edge.to_executorch()
        except Exception as error:
            raise BuildError(f"executorch cannot lower the model: {first_line(error)}") from error
    calls = [str(node.target) for node in edge.exported_program().graph.nodes if node.op == "call_function"]
    blocks = sum("executorch_call_delegate" in call for call in calls)
    getters = sum("getitem" in call for call in calls)
    return Lowered(manager, {"operators": len(calls) - blocks - getters, "delegated blocks": blocks}, inputs)


def without_writes(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program that leaves its buffers as they are, for each step begins with what they held at first.

    ExecuTorch begins with zeros in a buffer that is written into, and keeps what was written for the next step.
    """
    schemas = [getattr(node.target, "_schema", None) for node in exported.graph.nodes]
    if not any(schema is not None and schema.is_mutable for schema in schemas):
        return exported
    # What is written in place is an output of its own there.
    functional: torch.export.ExportedProgram = exported.run_decompositions({})
    signature, last = functional.graph_signature, functional.graph.output_node()
    results: Any = last.args[0]
    kept = [
        (node, spec)
        for node, spec in zip(results, signature.output_specs, strict=True)
        if spec.kind is not OutputKind.BUFFER_MUTATION
    ]
    last.args = (tuple(node for node, _ in kept),)
    signature.output_specs[:] = [spec for _, spec in kept]
    functional.graph_module.recompile()
    return functional


def without_dropout(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Take dropouts off that do nothing: XNNPACK refuses a block that returns one of them and what it reads."""
    graph = exported.graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.dropout.default and not node.args[2]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    exported.graph_module.recompile()
    return exported


def partitioners(kernels: str) -> list[Any] | None:
    """Return what takes operators away from the portable kernels."""
    if kernels == "portable":
        return None
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return [XnnpackPartitioner()]

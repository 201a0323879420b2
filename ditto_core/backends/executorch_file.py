"""An existing ``.pte`` file as an engine: it runs unchanged and shows its outputs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ditto_core.backends.base import BuildReport, BuildRequest
from ditto_core.backends.executorch import ENGINE_FILE, METHOD, installed, load_runtime
from ditto_core.backends.given_file import check_options, not_there
from ditto_core.backends.program_session import ProgramSession, Run, Signature
from ditto_core.errors import BuildError, UsageError, first_line
from ditto_core.graphs.files import read_graph
from ditto_core.graphs.nodes import shape_of
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

OPTIONS = ("file", "threads")
DTYPES = {5: "float16", 6: "float32", 15: "bfloat16", 7: "float64"}
"""Torch's names of ExecuTorch's floating types."""
INTEGERS = {4: "int64", 3: "int32", 11: "bool"}
STATEFUL = ("input_ids", "position_ids")
"""What a decoder that keeps its cache by itself is fed: token ids [1, length], and their positions [length]."""


class PteBackend:
    """Runs a ``.pte`` file. Options: ``file`` (the marker's ``engine=``), ``threads``.

    Inputs and outputs are matched by order. A decoder takes and returns its cache as the exported model does, or keeps
    it by itself, as transformers' exportable module with a static cache.
    """

    name = "pte-file"
    dtypes = ("float32", "float16", "bfloat16", "float64")
    isolation = "process"

    def check(self, spec: EngineSpec) -> None:
        """Raise when executorch or the file is missing, or an option is unknown."""
        installed()
        check_options(spec, OPTIONS, "a .pte file", "model.pte")
        if not (file := Path(spec.option("file"))).is_file():
            raise not_there(file, "a .pte file")

    def versions(self) -> dict[str, str]:
        """What runs the file; torch decides the export whose names its inputs and outputs get."""
        return {"executorch": installed(), "torch": str(torch.__version__)}

    def content(self, spec: EngineSpec) -> dict[str, str]:
        """Return the digest of the file. Part of the cache key."""
        from ditto_core.system.fingerprint import hash_file

        path = Path(spec.option("file"))
        return {path.name: hash_file(path)}

    def build(self, request: BuildRequest) -> BuildReport:
        """Copy the file, and write down which of its inputs and outputs is what."""
        path = Path(request.spec.option("file"))
        shutil.copyfile(path, request.directory / ENGINE_FILE)
        signature = signature_of(request, loaded(request.directory).method_meta(METHOD), path.name)
        signature.save(request.directory)
        taps = tuple(tap for tap in request.taps if tap.value in signature.finals)
        refused = {tap.site: "a .pte file shows its outputs only" for tap in request.taps if tap not in taps}
        return BuildReport(taps, refused, {"file": str(path), **self.content(request.spec)}, partial=True)

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> ProgramSession:
        """Load the file. Raises :class:`BuildError` when ExecuTorch refuses it."""
        signature = Signature.load(directory)
        program = loaded(directory, spec.threads())
        name = Path(spec.option("file")).name
        info = SessionInfo(
            f"{name} {spec.dtype}", "executorch", spec.dtype, "cpu", spec.model.label, {**self.versions(), "file": name}
        )
        return ProgramSession(runner(program), signature, taps, info)


def loaded(directory: Path, threads: int = 0) -> Any:
    """Return the program in an engine's folder. Raises :class:`BuildError` when it is none."""
    runtime = load_runtime()
    if threads and runtime._threadpool_get_thread_count() != threads:
        runtime._unsafe_reset_threadpool(threads)
    try:
        return runtime._load_program(str(directory / ENGINE_FILE))
    except RuntimeError as error:
        raise BuildError(f"executorch refuses the file: {first_line(error)}") from error


def runner(program: Any) -> Run:
    """Return the program's method as a function of its flat inputs; positions lose their batch where it has none."""
    try:
        method = program.load_method(METHOD)
    except RuntimeError as error:
        raise BuildError(f"executorch refuses the file: {first_line(error)}") from error
    meta = method.method_meta()
    ranks = [len(meta.input_tensor_meta(i).sizes()) for i in range(meta.num_inputs())]

    def run(feed: Sequence[torch.Tensor], _: Any = program) -> Sequence[torch.Tensor]:  # a method needs its program
        given = [tensor[0] if tensor.ndim == rank + 1 else tensor for tensor, rank in zip(feed, ranks, strict=True)]
        results: Sequence[torch.Tensor] = method(given)
        return results

    return run


def signature_of(request: BuildRequest, meta: Any, name: str) -> Signature:
    """Name a program's inputs and outputs by those of the exported model.

    Raises :class:`BuildError` for another number of inputs or outputs, :class:`UsageError` for another dtype.
    """
    graph = read_graph(request.onnx_path).graph
    shapes = {value.name: shape_of(value) for value in graph.input}
    takes, gives = meta.num_inputs(), meta.num_outputs()
    codes = [meta.input_tensor_meta(i).dtype() for i in range(takes)]
    stateful = request.decoder and takes <= len(STATEFUL) and all(code in INTEGERS for code in codes)
    inputs = list(STATEFUL[:takes]) if stateful else list(shapes)
    outputs = list(request.outputs) if stateful else [value.name for value in graph.output]
    if takes != len(inputs) or gives < len(outputs):
        raise BuildError(
            f"{name} takes {takes} inputs and gives {gives} outputs, expected those of the model in its order: "
            f"{len(inputs)} ({', '.join(inputs[:4])}{' …' * (len(inputs) > 4)}) and {len(outputs)}"
        )
    dtype = DTYPES.get(meta.output_tensor_meta(0).dtype(), "")
    if dtype != request.spec.dtype:
        raise UsageError(f"{name} computes in {dtype or 'integers'}, not in {request.spec.dtype}: give dtype={dtype!r}")
    return Signature(
        inputs,
        [[None] * len(shapes[each]) for each in inputs],
        [{**DTYPES, **INTEGERS}.get(code, "int64") for code in codes],
        [*outputs, *(f"further:{i}" for i in range(gives - len(outputs)))],
        list(request.outputs),
        {
            each: [1, *(size if isinstance(size, int) else 0 for size in shapes[each][1:])]
            for each in inputs
            if each.startswith("past_key_values.")
        },
    )

"""torch.compile and AOTInductor on the CPU: the exported program with the taps as outputs, compiled as one graph."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

from ditto_core.backends.base import BuildReport, BuildRequest
from ditto_core.backends.program_session import ProgramSession, Run, Signature
from ditto_core.errors import BackendError, BuildError, SelectorError, UsageError, first_line, nearest
from ditto_core.graphs.outputs import GIVEN
from ditto_core.model.buffers import Buffers
from ditto_core.model.examples import token_inputs
from ditto_core.model.forward import Forward
from ditto_core.model.loading import LoadedModel
from ditto_core.model.tracing import quiet
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec
from ditto_core.system.cpu import INSTRUCTIONS, instruction_sets
from ditto_core.system.fingerprint import fingerprint

PROGRAM_FILE, PACKAGE_FILE, WRITTEN_FILE = "program.pt2", "package.pt2", "written.safetensors"
COMPILERS = ("inductor", "aot_inductor", "aot_eager")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
OPTIONS = ("compiler", "mode", "fullgraph")
DAMAGED = (RuntimeError, ValueError, EOFError, KeyError, OSError, zipfile.BadZipFile, SafetensorError)


class InductorBackend:
    """Compiles the exported program.

    Options: ``compiler``, which is ``inductor`` (``torch.compile`` when the engine is first stepped), ``aot_inductor``
    (a package that is compiled when the engine is built) or ``aot_eager`` (traced as for a compiler, run by PyTorch's
    own kernels); ``mode`` of ``inductor``; ``fullgraph`` (default true: a graph break of the module is an error).
    """

    name = "inductor"
    dtypes = ("float32", "float16", "bfloat16")

    def check(self, spec: EngineSpec) -> None:
        """Raise when the dtype or an option is unknown, or there is no C++ compiler for the generated code."""
        if spec.dtype not in self.dtypes:
            raise BackendError(f"inductor is driven in {', '.join(self.dtypes)} only, got {spec.dtype}")
        for name, _ in spec.options:
            if name not in OPTIONS:
                known = ", ".join(OPTIONS)
                raise UsageError(f"inductor has no option {name!r}{nearest(name, OPTIONS)} (known: {known})")
        whole(spec)
        compiler = one_of("compiler", spec, COMPILERS)
        if one_of("mode", spec, MODES) != MODES[0] and compiler != "inductor":
            raise UsageError(f"inductor's option mode is for compiler='inductor', got compiler={compiler!r}")
        if compiler != "aot_eager" and not cxx():
            raise BackendError("inductor needs a C++ compiler on the PATH (g++ or clang++), or compiler='aot_eager'")

    def versions(self) -> dict[str, str]:
        """What traces and compiles a program."""
        return {"torch": str(torch.__version__)}

    def machine_code(self, spec: EngineSpec) -> dict[str, str]:
        """Return the CPU, the compiler and the compiler's settings of a package, and the number of threads that it
        divides work among.

        See :class:`~ditto_core.backends.base.CompilesForCpu`.
        """
        if one_of("compiler", spec, COMPILERS) != "aot_inductor":
            return {}
        decided = {"vectors": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads())}
        return {INSTRUCTIONS: instruction_sets(), "compiler": compiler_version(), "settings": settings(), **decided}

    def build(self, request: BuildRequest) -> BuildReport:
        """Trace the model with the taps as outputs; AOTInductor also compiles it here.

        Raises :class:`BuildError`, also when ``torch.compile`` would run the module in parts.
        """
        breaks = [] if request.spec.later else graph_breaks(request.model())  # a later step is part of the module
        if breaks and whole(request.spec):
            raise BuildError(
                f"torch.compile breaks the graph of {request.spec.model.label} at {breaks[0]} "
                f"({len(breaks)} such places); to allow it: options={{'fullgraph': False}}"
            )
        facts = {"graph breaks": breaks}
        program = request.exported_program()
        Signature.of(program, request.outputs).save(request.directory)
        if one_of("compiler", request.spec, COMPILERS) != "aot_inductor":
            torch.export.save(program.exported, request.directory / PROGRAM_FILE)
            return BuildReport(program.taps, program.refused, facts)
        try:
            with quiet():
                path = str(request.directory / PACKAGE_FILE)
                torch._inductor.aoti_compile_and_package(program.exported, package_path=path)
                save_file(written(program.exported), request.directory / WRITTEN_FILE)
        except Exception as error:
            raise BuildError(f"AOTInductor cannot compile the model: {first_line(error)}") from error
        return BuildReport(program.taps, program.refused, facts)

    def cut(self, spec: EngineSpec, directory: Path, values: Sequence[str]) -> None:
        """Let the program take some of its outputs as inputs; see :class:`~ditto_core.backends.base.CutsEngine`."""
        if one_of("compiler", spec, COMPILERS) == "aot_inductor":
            raise UsageError("a tensor cannot be put into a compiled package: use compiler='inductor' or 'aot_eager'")
        signature = Signature.load(directory)
        hidden = sorted(set(values) - set(signature.outputs))
        if hidden:
            raise SelectorError(f"the engine does not show {hidden[0]!r}: {', '.join(signature.outputs[:3])} …")
        found = outputs_of(torch.export.load(directory / PROGRAM_FILE).module(check_guards=False))
        metas = [found[signature.outputs.index(value)].meta["val"] for value in values]
        signature.given(values, metas).save(directory)

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> ProgramSession:
        """Load the engine. Raises :class:`BuildError` when it is damaged."""
        compiler, mode = one_of("compiler", spec, COMPILERS), one_of("mode", spec, MODES)
        signature = Signature.load(directory)
        try:
            run = loaded(directory) if compiler == "aot_inductor" else compiled(directory, compiler, mode)
        except DAMAGED as error:
            raise BuildError(f"inductor refuses the engine: {first_line(error)}") from error
        facts = {**self.versions(), "compiler": compiler, "mode": mode}
        info = SessionInfo(f"{compiler} {spec.dtype}", self.name, spec.dtype, "cpu", spec.model.label, facts)
        return ProgramSession(run, signature, taps, info)


def one_of(name: str, spec: EngineSpec, known: Sequence[str]) -> str:
    """Return an option, by default the first known value. Raises :class:`UsageError` for an unknown one."""
    value: str = spec.option(name, known[0])
    if value not in known:
        raise UsageError(f"inductor's {name} is {value!r}, expected {', '.join(known)}{nearest(value, known)}")
    return value


def whole(spec: EngineSpec) -> bool:
    """Return the option ``fullgraph``. Raises :class:`UsageError` for what is neither true nor false."""
    value = spec.option("fullgraph", True)
    known = {True: True, False: False, "true": True, "false": False}
    if value not in known:
        raise UsageError(f"inductor's fullgraph is {value!r}, expected true or false")
    return known[value]


def graph_breaks(model: LoadedModel) -> list[str]:
    """Return where ``torch.compile`` cannot trace the module as one graph: file, line and reason of each break.

    The program that is compiled comes from ``torch.export``, which reads past calls such as ``print``.
    """
    inputs = dict(model.examples) or token_inputs()
    forward = Forward(model.module, decoder=model.decoder)
    forward.start()
    with quiet(), torch.no_grad(), Buffers(model.module).kept():
        found = torch._dynamo.explain(forward)(inputs)
    # A function that was inlined is traced again by itself, and breaks at the same place.
    return list(dict.fromkeys(place(reason) for reason in found.break_reasons if reason.graph_break))


def place(reason: Any) -> str:
    """Return ``file:line: reason`` of a graph break."""
    lines = [line.strip() for line in str(reason.reason).splitlines() if line.strip()]
    explained = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    frame = reason.user_stack[-1] if reason.user_stack else None
    where = f"{Path(frame.filename).name}:{frame.lineno}: " if frame else ""
    return where + (explained or (lines or ["unknown reason"])[0])


def cxx() -> str | None:
    """Return the C++ compiler that inductor would find."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((path for name in names if (path := shutil.which(name))), None)


def compiler_version() -> str:
    """Return the first line of what the compiler says of its version, empty without one."""
    path = cxx()
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout if path else ""
    return said.partition("\n")[0]


def settings() -> str:
    """Return a digest of inductor's settings, which ``TORCHINDUCTOR_…`` variables set, too: they decide its code."""
    from torch._inductor import config

    return fingerprint(repr(sorted(config.save_config_portable().items())))[:12]


def compiled(directory: Path, compiler: str, mode: str) -> Run:
    """Return the program, to be compiled when it is first run. A graph break is an error: the engine is one graph."""
    module = cut_off(torch.export.load(directory / PROGRAM_FILE).module(check_guards=False), Signature.load(directory))
    options: dict[str, Any] = {"mode": mode} if compiler == "inductor" else {}
    function = torch.compile(module, backend=compiler, fullgraph=True, dynamic=True, **options)
    run, buffers = without_gradients(function), Buffers(module)

    def step(feed: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with buffers.kept():
            return [buffers.own(tensor) for tensor in run(feed)]

    return step


def cut_off(module: torch.fx.GraphModule, signature: Signature) -> torch.fx.GraphModule:
    """Return the program that takes the tensors ``VALUE::given`` of its signature, and shows these."""
    given = [name.removesuffix(GIVEN) for name in signature.inputs if name.endswith(GIVEN)]
    found, last = outputs_of(module), [node for node in module.graph.nodes if node.op == "placeholder"][-1]
    for number, value in enumerate(given):
        own = found[signature.outputs.index(value)]
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"given_{number}")
        last.meta = dict(own.meta)
        own.replace_all_uses_with(last)
    if not given:
        return module
    module.graph.set_codegen(torch.fx.graph.CodeGen())  # flat, without the export's tree and its checks
    return torch.fx.GraphModule(module, module.graph)


def outputs_of(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return the nodes that a program gives, flat."""
    return [node for node in tree_leaves(module.graph.output_node().args) if isinstance(node, torch.fx.Node)]


def written(program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the buffers that a program writes into, as they are before its first step."""
    held = {**program.constants, **program.state_dict}
    functional = program.run_decompositions({})  # what is written in place is an output of its own
    names = functional.graph_signature.buffers_to_mutate.values()
    return {name: held[name].detach().clone() for name in names}


def loaded(directory: Path) -> Run:
    """Return the compiled package. What it writes into its buffers is put back after each step."""
    package: Any = torch._inductor.aoti_load_package(str(directory / PACKAGE_FILE))
    run, held = without_gradients(package), load_file(directory / WRITTEN_FILE)

    def step(feed: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        try:
            return [tensor.clone() for tensor in run(feed)]
        finally:
            package.load_constants(held, check_full_update=False)

    return step if held else run


def without_gradients(function: Any) -> Run:
    """Return a function of a flat list of inputs."""

    def run(feed: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            results: Sequence[torch.Tensor] = function(*feed)
        return results

    return run

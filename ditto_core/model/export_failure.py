"""Why a model could not be exported, in one sentence: the innermost reason, the model's own line, a known way out."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ditto_core.sites import source_line
from ditto_core.visible import source_path

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
TORCHS_OWN = re.compile(r" \(unhinted: .*")
"""What torch adds of its own symbols behind an expression that it could not decide."""
NODE = re.compile(r"translating node %(\w+)")
VALUES = r"data-dependent|unbacked"
WAYS_OUT = (
    (VALUES, "its control flow depends on values: use torch.cond, or torch._check what is known"),
    (r"complex", "the exporter has no complex numbers: write the product with real and imaginary parts"),
    (r"No ONNX function found", "the exporter cannot translate this operator: write it with others"),
    (
        r"[Cc]onstraints violated|specialized",
        "the model fixes a size that has to vary: compute it from the inputs",
    ),
)
"""What a reason says, and what has been found to help."""
RUNNING = (
    (
        r"^This higher order operator doesn't work unless|Unsafe side effect",
        "write torch.cond(...) for a cond that was imported by its name: only so a run follows its branch",
    ),
    (r"not implemented for '(Half|BFloat16)'", "torch has no such kernel in this dtype on a CPU: dtype='float32'"),
    (
        r"same dtype|should be the same|expected scalar type",
        "a tensor made in the model has a fixed dtype: give it that of the weights or inputs",
    ),
)
"""Likewise, where the model itself does not run in its dtype."""


def innermost(error: BaseException) -> str:
    """Return the first line of an error's innermost cause, without colours."""
    last = list(chain(error))[-1]
    lines = (line.strip() for line in COLOUR.sub("", str(last)).splitlines())
    return next((line for line in lines if line), type(last).__name__)


def told(error: BaseException) -> str:
    """Return an error's innermost reason, the line outside of torch and of this package that raised it, and what helps
    a model that does not run in its dtype."""
    reason, place = innermost(error), own_line(error)
    return reason + (f" at {place}" if place else "") + way_out(reason, RUNNING)


def export_failure(label: str, error: BaseException, program: Any = None) -> str:
    """Say why a model could not be exported. ``program`` is the traced one, where tracing went well."""
    reason = TORCHS_OWN.sub("", innermost(error))
    place = failed_node(error, program) or own_line(error)
    where = f" at {place}" if place else ""
    return f"{label} could not be exported: {reason}{where}" + way_out(reason, WAYS_OUT)


def way_out(reason: str, known: Sequence[tuple[str, str]]) -> str:
    """Return what helps against a reason, behind a semicolon; nothing where that is not known."""
    return next((f"; {advice}" for pattern, advice in known if re.search(pattern, reason)), "")


def depends_on_values(error: BaseException) -> bool:
    """Tell whether a model could not be exported because of numbers that are known only when it runs."""
    return re.search(VALUES, innermost(error)) is not None


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, the innermost last."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def failed_node(error: BaseException, program: Any) -> str:
    """Return the site and the source line of the node that the ONNX exporter could not translate, or nothing."""
    names = [match.group(1) for found in chain(error) if (match := NODE.search(str(found)))]
    if not names or program is None:
        return ""
    node = next((node for node in program.graph.nodes if node.name == names[-1]), None)
    if node is None:
        return ""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]
    site = paths[-1].removeprefix("module.") if paths else ""
    return ", ".join(filter(None, (site, source_line(node.meta.get("stack_trace") or ""))))


def own_line(error: BaseException) -> str:
    """Return the innermost line outside of torch and of this package that an error passed through, or nothing."""
    here = str(Path(__file__).parent.parent)
    frames = [frame for found in chain(error) for frame in traceback.extract_tb(found.__traceback__)]
    own = [frame for frame in frames if "/torch/" not in frame.filename and not frame.filename.startswith(here)]
    own = [frame for frame in own if "/onnxscript/" not in frame.filename and not frame.filename.startswith("<")]
    if not own:
        return ""
    frame = own[-1]
    return f"{source_path(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}"

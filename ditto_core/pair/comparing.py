"""One call for a script or a notebook: a model, an engine, inputs; what comes back is the comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.backends.registry import backend_names
from ditto_core.compare.comparison import Comparison
from ditto_core.engines.engine import MANIFEST_FILE, Engine
from ditto_core.engines.origin import another_model
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import UsageError, check_type, nearest
from ditto_core.pair.inputs import rounded
from ditto_core.pair.pair import AnyInputs, Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec, ModelSource, parse_backend
from ditto_core.stepping.lockstep import single_step
from ditto_core.stepping.sides import Sides
from ditto_core.system.files import path_of
from ditto_core.system.receipt import make_receipt
from ditto_core.system.threads import torch_threads

if TYPE_CHECKING:
    AnyModel = ModelSource | str | Path | Callable[[], Any] | torch.nn.Module | tuple[torch.nn.Module, Any]

OPTIONS = tuple(PairOptions.__dataclass_fields__)


def compare_engine(
    model: AnyModel,
    engine: str | Path | Engine | Callable[..., Any] = "onnxruntime",
    inputs: AnyInputs = None,
    *,
    max_new_tokens: int = 10,
    workspace: Workspace | None = None,
    **settings: Any,
) -> Comparison:
    """Compare an engine with its model, without pytest; a notebook shows the result as a table.

    ``model``: a Hub id, a path, a factory, a module, or ``(module, example inputs)``. ``engine``: the name of a backend
    (the engine is built, or taken from the cache), a folder of ``ditto build``, an ONNX file of any exporter, or a
    function that takes the model's inputs and returns its outputs, of which only these are compared. ``inputs``: one
    prompt or several for a decoder, else tensors by name (default: the examples). ``settings`` are those of
    :class:`~ditto_core.spec.EngineSpec` (``dtype``, ``outputs``, ``profile`` …) and
    :class:`~ditto_core.pair.pair_options.PairOptions` (``tolerance``, ``reference``, ``localize`` …). A note says where
    a folder's engine was built of another model.

    Raises :class:`~ditto_core.errors.UsageError` for settings or inputs that do not fit.
    """
    check_type(workspace, (Workspace, type(None)), "workspace", "a Workspace")
    workspace = workspace or Workspace()
    options = PairOptions(**{name: settings.pop(name) for name in OPTIONS if name in settings})
    if callable(engine):
        return _compare_function(workspace, EngineSpec.of(source(model), **settings), options, engine, inputs)
    built = _built(engine)
    if built is not None and settings:
        raise UsageError(f"{engine} is built already: {', '.join(settings)} cannot be chosen any more")
    note = ""
    if built is None:
        spec = EngineSpec.of(source(model), **_backend(engine), **settings)
    else:
        spec = replace(built.spec, model=ModelSource.of(source(model)))  # a folder knows a module's name only
        note = another_model(built, spec.model, workspace.digest)
        built = replace(built, spec=spec, built_of="")
    pair = Pair(workspace, spec, options, built)
    try:
        if pair.sessions.model.decoder:
            if inputs is None or isinstance(inputs, Mapping):
                raise UsageError(f"{spec.model.label} is a decoder: give a prompt, as text or token ids")
            found = pair.generate(inputs, max_new_tokens=max_new_tokens)
        else:
            found = pair.run(_by_name(inputs))
    finally:
        pair.close()
    return replace(found, notes=(*found.notes, note)) if note else found


def source(model: Any) -> Any:
    """Return a model as a spec takes it."""
    return str(model) if isinstance(model, Path) else model


def _built(engine: Any) -> Engine | None:
    """Return an engine that exists; None for a backend's name, also where a folder has it, and for another tool's."""
    if isinstance(engine, Engine):
        return engine
    path_of(engine, "engine")
    return Engine.load(engine) if not _named(engine) and (Path(engine) / MANIFEST_FILE).is_file() else None


def _named(engine: Any) -> str:
    """Return the backend that a text names, or an empty string; ``./`` makes it a path."""
    name = parse_backend(engine) if isinstance(engine, str) else ""
    return name if name in backend_names() else ""


def _backend(engine: Any) -> dict[str, str]:
    """Return what a spec calls an engine: the name of a backend, or a file of another tool."""
    if name := _named(engine):
        return {"backend": name}
    if not Path(engine).exists():
        listed, near = ", ".join(backend_names()), nearest(str(engine), backend_names())
        raise UsageError(f"engine {str(engine)!r} is no path and no backend, expected {listed}{near}")
    return {"engine": str(engine)}


def _by_name(inputs: AnyInputs) -> Mapping[str, torch.Tensor] | None:
    if inputs is None or isinstance(inputs, Mapping):
        return inputs
    raise UsageError(f"inputs are {type(inputs).__name__}, but the model is not a decoder: give tensors by name")


def _compare_function(
    workspace: Workspace, spec: EngineSpec, options: PairOptions, function: Callable[..., Any], inputs: AnyInputs
) -> Comparison:
    """Compare the outputs of a function with the model's, judged by the noise floor of its dtype."""
    from ditto_core.backends.called import CalledSession
    from ditto_core.compare.tolerance import Tolerance

    model = workspace.model(spec.model, spec.attention)
    if model.decoder:
        raise UsageError(f"{model.label} is a decoder, a function has no KV cache: give an engine, or compare tensors")
    values = {name: torch.as_tensor(value) for name, value in (_by_name(inputs) or model.examples).items()}
    if options.reference != "eager":
        raise UsageError(
            f"a function is compared with the eager model, reference {options.reference!r} is not possible"
        )
    if unknown := [name for name in values if name not in model.examples]:
        raise UsageError(f"{model.label} has no input {unknown[0]!r}, expected {', '.join(model.examples)}")
    sides = Sides(
        CalledSession(function, spec.dtype, model.label),
        workspace.eager(spec, (), device=options.device),
        workspace.eager(spec, (), dtype=spec.dtype, device=options.device),
    )
    tolerance = Tolerance.of(options.tolerance)
    with torch_threads(options.threads):
        found, _ = single_step(sides, rounded(values, spec.dtype), tolerance=tolerance)
    tolerance.check([*found.sites, *found.missing])
    note = "a function shows its outputs only: no module inside it was compared"
    return replace(found, notes=(*found.notes, note), receipt=make_receipt())

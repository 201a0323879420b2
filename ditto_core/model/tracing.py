"""How a model is traced: what wraps it, what is held while it runs, and what is put back afterwards."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from io import StringIO
from typing import Any, TypeVar

from ditto_core.errors import BuildError, UsageError
from ditto_core.model.buffers import Buffers
from ditto_core.model.export_failure import depends_on_values, export_failure, told
from ditto_core.model.loading import LoadedModel
from ditto_core.model.staged_wrappers import FirstWrapper, LaterWrapper
from ditto_core.model.wrappers import DecoderWrapper, ModuleWrapper, Wrapper

T = TypeVar("T")


def held_where_read(model: LoadedModel, wrapper: Wrapper, trace: Callable[[], T]) -> T:
    """Trace a model; where that fails for numbers that its code reads, hold the inputs they are of and trace again.

    Raises :class:`BuildError` with the exporter's innermost complaint.
    """
    try:
        try:
            with Buffers(model.module).kept():
                return trace()
        except Exception as error:
            if not depends_on_values(error) or not wrapper.hold():
                raise
            return trace()
    except Exception as error:
        raise BuildError(export_failure(model.label, error)) from error


def wrap(model: LoadedModel, named: Sequence[tuple[str, int, str]] = ()) -> Wrapper:
    """Return what is traced of a loaded model. Raises :class:`UsageError` for a dimension that no input has."""
    if model.decoder and named:
        raise UsageError(f"dynamic names {named[0][0]!r}, but {model.label} is a decoder, whose sizes are all dynamic")
    if model.decoder:
        return DecoderWrapper(model.module)
    if model.later:
        return LaterWrapper(model.module, model.examples)
    for name, index, dimension in named:
        if name not in model.examples:
            raise UsageError(f"dynamic names input {name!r}, {model.label} has {', '.join(model.examples)}")
        if index >= model.examples[name].ndim:
            raise UsageError(
                f"dynamic gives {dimension!r} to dimension {index} of {name!r}, which has {model.examples[name].ndim}"
            )
    return (FirstWrapper if model.staged else ModuleWrapper)(model.module, model.examples, named)


def run_once(model: LoadedModel, wrapper: Wrapper, arguments: tuple[Any, ...]) -> None:
    """Run a wrapper before it is traced. Raises :class:`BuildError` when the model cannot run on its own examples, and
    when what it takes or returns is nothing that a graph can."""
    try:
        with Buffers(model.module).kept():
            results = wrapper(*arguments)
    except Exception as error:
        raise BuildError(f"{model.label} could not be run: {told(error)}") from error
    if not wrapper.traced.outputs:
        raise BuildError(f"{model.label} returns no tensor, expected at least one to compare")
    for name, tensor in (*model.examples.items(), *zip(wrapper.traced.outputs, results, strict=False)):
        if tensor.is_complex():
            raise BuildError(
                f"{model.label} takes or returns complex numbers ({name!r}), which a graph does not: give or return "
                f"their torch.view_as_real"
            )


def own_symbols(wanted: bool) -> AbstractContextManager[Any]:
    """Give dimensions symbols of their own: without that, an image that is square in the example always is."""
    config: Any = importlib.import_module("torch.fx.experimental._config")
    patched: AbstractContextManager[Any] = config.patch(use_duck_shape=not wanted)
    return patched


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' chatter off the screen; their errors still raise. Of one torch prints the graph so far."""
    names = ("torch.onnx", "onnxscript", "torch.export", "torch._export", "torch.fx", "onnx_ir")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    # torch's structured trace is at debug level on purpose, and pytest captures loggers that do not propagate as well.
    trace = logging.getLogger("torch.__trace")
    propagate, trace.propagate = trace.propagate, False
    handlers, trace.handlers = trace.handlers, [h for h in trace.handlers if type(h).__module__.startswith("torch.")]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        trace.propagate, trace.handlers = propagate, handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

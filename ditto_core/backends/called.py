"""Any Python function as an engine: it is called with a step's inputs, and shows its outputs only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ditto_core.errors import RunError, first_line
from ditto_core.model.forward import named_outputs
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap


class CalledSession:
    """A function, a compiled module or another runtime's session behind a lambda; implements
    :class:`~ditto_core.session.Session`.

    It gets the inputs by name where its signature has the names, else in their order. What it returns is named as a
    module's output is: a tensor or array is ``output``, others go by key or index; a list of one is that one.
    """

    taps: tuple[Tap, ...] = ()

    def __init__(self, function: Callable[..., Any], dtype: str, model: str = "") -> None:
        self._function = function
        name = getattr(function, "__name__", type(function).__name__)
        self.info = SessionInfo(name, "callable", dtype, model=model)

    def start(self, batch: int) -> None:
        """Nothing is carried from one sequence to the next."""

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Call the function on copies of the inputs. Raises :class:`RunError` when it fails or returns no tensor."""
        given = {name: tensor.clone() for name, tensor in inputs.items()}
        try:
            with torch.inference_mode():
                found = self._function(**given) if self._takes(given) else self._function(*given.values())
        except Exception as error:
            raise RunError(f"{self.info.label} failed: {type(error).__name__}: {first_line(error)}") from error
        outputs = named_outputs(as_tensors(found), inputs)
        if not outputs:
            raise RunError(f"{self.info.label} returned {type(found).__name__}, expected tensors or arrays")
        return outputs

    def close(self) -> None:
        """Nothing is held open."""

    def _takes(self, inputs: Mapping[str, torch.Tensor]) -> bool:
        try:
            inspect.signature(self._function).bind(**inputs)
        except TypeError:
            return False
        except ValueError:  # built-in functions may have none
            pass
        return True


def as_tensors(value: Any) -> Any:
    """Return arrays as tensors, in the lists and dictionaries that hold them; one in a list alone by itself."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, list | tuple):
        return as_tensors(value[0]) if len(value) == 1 else [as_tensors(item) for item in value]
    return {key: as_tensors(item) for key, item in value.items()} if isinstance(value, Mapping) else value

"""Does the inference engine still compute what the model computes?

Importing this package loads neither torch nor onnx: the public names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ditto_core.errors import DittoError as DittoError
    from ditto_core.recording import tap as tap
    from ditto_core.spec import EngineSpec as EngineSpec
    from ditto_core.spec import ModelSource as ModelSource
    from ditto_core.spec import ShapeProfile as ShapeProfile

__version__ = "0.1.0"

_PUBLIC = {
    "DittoError": "ditto_core.errors",
    "EngineSpec": "ditto_core.spec",
    "ModelSource": "ditto_core.spec",
    "ShapeProfile": "ditto_core.spec",
    "tap": "ditto_core.recording",
}

__all__ = ["DittoError", "EngineSpec", "ModelSource", "ShapeProfile", "__version__", "tap"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ditto_core' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)

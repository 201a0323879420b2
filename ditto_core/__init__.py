"""Does the inference engine still compute what the model computes?

Importing this package loads neither torch nor onnx: the public names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ditto_core.version import __version__

if TYPE_CHECKING:
    from ditto_core.compare.assertion import assert_close as assert_close
    from ditto_core.compare.comparison import Comparison as Comparison
    from ditto_core.compare.dumps import compare_dumps as compare_dumps
    from ditto_core.compare.tolerance import Tolerance as Tolerance
    from ditto_core.engines.engine import Engine as Engine
    from ditto_core.engines.workspace import Workspace as Workspace
    from ditto_core.engines.workspace import build as build
    from ditto_core.engines.workspace import open_session as open_session
    from ditto_core.errors import DittoError as DittoError
    from ditto_core.model.recorder import tap as tap
    from ditto_core.pair.comparing import compare_engine as compare_engine
    from ditto_core.pair.pair import Pair as Pair
    from ditto_core.pair.pair_options import PairOptions as PairOptions
    from ditto_core.profile import ShapeProfile as ShapeProfile
    from ditto_core.spec import EngineSpec as EngineSpec
    from ditto_core.spec import ModelSource as ModelSource
    from ditto_core.trace import Trace as Trace

_PUBLIC = {
    "Comparison": "ditto_core.compare.comparison",
    "Engine": "ditto_core.engines.engine",
    "Pair": "ditto_core.pair.pair",
    "PairOptions": "ditto_core.pair.pair_options",
    "Tolerance": "ditto_core.compare.tolerance",
    "Trace": "ditto_core.trace",
    "Workspace": "ditto_core.engines.workspace",
    "assert_close": "ditto_core.compare.assertion",
    "build": "ditto_core.engines.workspace",
    "compare_dumps": "ditto_core.compare.dumps",
    "compare_engine": "ditto_core.pair.comparing",
    "DittoError": "ditto_core.errors",
    "EngineSpec": "ditto_core.spec",
    "ModelSource": "ditto_core.spec",
    "ShapeProfile": "ditto_core.profile",
    "open_session": "ditto_core.engines.workspace",
    "tap": "ditto_core.model.recorder",
}

__all__ = [
    "Comparison",
    "DittoError",
    "Engine",
    "EngineSpec",
    "ModelSource",
    "Pair",
    "PairOptions",
    "ShapeProfile",
    "Tolerance",
    "Trace",
    "Workspace",
    "__version__",
    "assert_close",
    "build",
    "compare_dumps",
    "compare_engine",
    "open_session",
    "tap",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ditto_core' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)

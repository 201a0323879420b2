"""Builds an engine in a child process, for the check that an engine needs nothing of the process that built it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from ditto_core.backends.base import Backend, BuildRequest
from ditto_core.engines.engine import spec_from_json
from ditto_core.model.exported import Export
from ditto_core.spec import ModelSource
from ditto_core.testing.subject import decoder


def build(backend: str, spec: dict[str, Any], export: str, directory: str) -> None:
    """Build the decoder without taps; ``backend`` is ``module:class``."""
    module, _, name = backend.partition(":")
    made: Backend = getattr(importlib.import_module(module), name)()
    source = Export.load(Path(export))
    given = replace(spec_from_json(spec), model=ModelSource.of(decoder))
    made.build(BuildRequest(given, source.onnx_path, (), source.finals, source.decoder, Path(directory)))

"""The JSON Schema of a comparison's JSON."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def comparison_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) of what :meth:`Comparison.to_json` returns."""
    file = resources.files("ditto_core.report").joinpath("assets").joinpath("comparison.schema.json")
    schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return schema

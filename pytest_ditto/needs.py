"""What the collected tests need of the engine cache, for `ditto cache needs` and `ditto cache fetch`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ditto_core.errors import CacheError, UsageError
from pytest_ditto.bench import bench_of
from pytest_ditto.fixtures import missing
from pytest_ditto.marker import uses_ditto, wanted
from pytest_ditto.pytest_options import OPTIONS

if TYPE_CHECKING:
    from ditto_core.spec import EngineSpec


def written(session: pytest.Session) -> bool | None:
    """Write the needs of the collected tests to the file of ``--ditto-needs``; None without that option.

    Ends the run, as pytest does by default, where a file could not be collected: its needs are not known.
    """
    file = session.config.stash[OPTIONS].needs
    if file is None:
        return None
    if session.testsfailed:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    from ditto_core.pair.needs import needs_of
    from ditto_core.system.files import replace_text

    workspace = bench_of(session.config).workspace
    try:
        found = needs_of(workspace, specs(session.items))
    except CacheError as error:
        raise pytest.UsageError(str(error)) from error
    store = {"cache": str(workspace.cache.root), "remote": workspace.cache.remote}
    replace_text(file, json.dumps({**store, "needs": [need.to_json() for need in found]}, indent=1) + "\n")
    return True


def specs(items: list[pytest.Item]) -> Iterator[EngineSpec]:
    """Yield the engines of tests that could run here; a wrong marker is its test's error, when it runs."""
    from ditto_core.pair.needs import specs_of

    for item in filter(uses_ditto, items):
        try:
            spec, options = wanted(item)
            if missing(spec, options.reference):
                continue
        except UsageError:
            continue
        of_gate = "ditto_gate" in getattr(item, "fixturenames", ())
        yield from specs_of(spec.untapped(), replace(options, observer=False)) if of_gate else specs_of(spec, options)

"""The fixtures: an engine beside its reference, either of them alone, and the workspace that they come from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ditto_core.errors import BackendError, UsageError
from pytest_ditto.bench import DtypeMissing, bench_of, dump_folder, unavailable
from pytest_ditto.marker import listed_combinations, wanted
from pytest_ditto.pytest_options import OPTIONS

if TYPE_CHECKING:
    from ditto_core.engines.workspace import Workspace
    from ditto_core.pair.pair import Pair
    from ditto_core.pair.pair_options import PairOptions
    from ditto_core.session import Session
    from ditto_core.spec import EngineSpec

PAIR = pytest.StashKey["Pair"]()
UNAVAILABLE = pytest.StashKey[str]()
ASKED = pytest.StashKey[bool]()
"""Why a test was skipped: its backend cannot be used here."""


@pytest.fixture(scope="session")
def ditto_workspace(pytestconfig: pytest.Config) -> Workspace:
    """The run's :class:`~ditto_core.engines.workspace.Workspace`: the cache, and the models loaded from it."""
    return bench_of(pytestconfig).workspace


@pytest.fixture
def _ditto_engine_variant() -> None:
    """Backend and dtype, if a marker lists several."""


@pytest.fixture
def ditto(request: pytest.FixtureRequest, ditto_workspace: Workspace, _ditto_engine_variant: None) -> Pair:
    """Engine beside reference: ditto.generate(prompts, max_new_tokens=10) of a decoder, ditto.run(inputs) of others.

    A :class:`~ditto_core.pair.pair.Pair` as the marker ``ditto_engine`` asks for it, its engine built. Both return a
    :class:`~ditto_core.compare.comparison.Comparison`.
    """
    item, options = request.node, request.config.stash[OPTIONS]
    asked = wanted(item)
    require(item, asked.spec, asked.options, must=options.require_backends)
    folder = dump_folder(options, item.nodeid)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)  # an earlier run's
    bench = bench_of(request.config)
    pair = bench.pair(asked.spec, replace(asked.options, dump=folder))
    try:
        _ = pair.engine
    except BackendError as error:
        refuse(item, str(error), must=options.require_backends)
    item.stash[PAIR] = pair
    return pair


@pytest.fixture
def ditto_engine(ditto: Pair) -> Session:
    """The engine alone, to be stepped by hand: start(rows), step(inputs, sink)."""
    return ditto.sessions.engine


@pytest.fixture
def ditto_reference(ditto: Pair) -> Session:
    """The reference alone, to be stepped by hand: start(rows), step(inputs, sink)."""
    return ditto.sessions.reference


def require(item: pytest.Item, spec: EngineSpec, options: PairOptions, *, must: bool) -> None:
    """Skip the test when its engine's or its reference's backend cannot be used here; refuse it when it ``must``.

    A dtype that a backend lacks is a skip too where the marker lists combinations and another one of them can be.
    Else it raises :class:`UsageError`: nothing that the marker asks for could ever run.
    """
    item.stash[ASKED] = True
    try:
        reason = missing(spec, options.reference)
    except DtypeMissing as error:
        combinations = listed_combinations(item)
        if not any(possible(replace(spec, backend=b, dtype=d), options.reference) for b, d in combinations):
            raise
        reason = str(error)
    if reason:
        refuse(item, reason, must=must)


def missing(spec: EngineSpec, reference: Any) -> str:
    """Return why the backend of an engine or of its reference cannot be used here, or an empty string.

    Raises :class:`UsageError` as :func:`~pytest_ditto.bench.unavailable` does.
    """
    from ditto_core.pair.reference import named_backend

    return next(filter(None, map(unavailable, filter(None, (spec, named_backend(spec, reference))))), "")


def possible(spec: EngineSpec, reference: Any) -> bool:
    """Tell whether engine and reference exist in the dtype, on this machine or on another."""
    try:
        missing(spec, reference)
    except DtypeMissing:
        return False
    return True


def refuse(item: pytest.Item, reason: str, *, must: bool) -> None:
    """Skip a test whose backend cannot be used here; raise :class:`UsageError` if it ``must`` run."""
    item.stash[UNAVAILABLE] = reason
    if must:
        raise UsageError(reason)
    pytest.skip(reason)

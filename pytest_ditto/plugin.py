"""Hooks only; what they do is in the modules beside this one. None of it imports torch before a ditto test runs."""

from __future__ import annotations

import gc
from collections.abc import Generator
from typing import Any

import pytest

from ditto_core.gates.signature import SIGNATURE as GATE_SIGNATURE
from ditto_core.system.gpus import pin_gpu
from pytest_ditto import bench, examples, gate, marker, needs, pytest_options, reporting, reports, tally
from pytest_ditto.fixtures import _ditto_engine_variant, ditto, ditto_engine, ditto_reference, ditto_workspace
from pytest_ditto.gate import _ditto_gate_shard, ditto_gate
from pytest_ditto.relations import ditto_relations

__all__ = [
    "_ditto_engine_variant",
    "_ditto_gate_shard",
    "ditto",
    "ditto_engine",
    "ditto_gate",
    "ditto_reference",
    "ditto_relations",
    "ditto_workspace",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and ini keys."""
    pytest_options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Read the options and register the marker."""
    config.addinivalue_line("markers", marker.SIGNATURE)
    config.addinivalue_line("markers", GATE_SIGNATURE)
    config.stash[pytest_options.OPTIONS] = pytest_options.read_options(config)
    pin_worker(config)
    config.stash[bench.NOTES] = []
    reports.prepare(config)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(tally.Tally(), "ditto-engine-tally")
        config.pluginmanager.register(gate.GateTally(), "ditto-engine-gates")


def pin_worker(config: pytest.Config) -> None:
    """Give a worker of xdist (``gw0``, ``gw1`` …) its own GPU, if there are several."""
    number = getattr(config, "workerinput", {}).get("workerid", "").removeprefix("gw")
    if number.isdigit() and config.stash[pytest_options.OPTIONS].pin_gpus:
        pin_gpu(int(number))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist where comparisons are gathered."""
    reports.tell_worker(node)


def pytest_keyboard_interrupt() -> None:
    """Let the run end soon: pytest collects garbage five times at its end, among all of torch's objects."""
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Release the engines, and what was gathered for reports."""
    reports.discard(config)
    if bench.BENCH in config.stash:
        config.stash[bench.BENCH].close()


def pytest_report_header(config: pytest.Config) -> str:
    """Name the backends and the cache."""
    return tally.header(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each backend and dtype that a marker lists, and for each shard of a gate."""
    marker.parametrize(metafunc)
    gate.parametrize(metafunc)


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Refuse a marker that pytest gave to the model's callable instead of the test."""
    marker.refuse_marked_model(collector, name, obj)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check the markers of the tests that are going to run, before any of them does.

    What is wrong is the error of the test that has the marker; where the user is strict, it ends the run. A worker
    of xdist leaves it to the test: its end would look like a crash.
    """
    wrong = marker.check_items(items)
    if wrong and pytest_options.is_strict(config) and not hasattr(config, "workerinput"):
        raise pytest.UsageError(*(f"{nodeid}: {error}" for nodeid, error in wrong.items()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Write what the tests need of the cache instead of running them, where that was asked for."""
    return needs.written(session)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a test whose marker is wrong, whether or not it uses the fixtures; one that is skipped needs none."""
    marker.refuse_wrong(item)


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fit a hypothesis test to engines before hypothesis looks at it; tell its subtests' reports from its own."""
    examples.prepare(item)
    with reporting.calling(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add numbers, tables and notes to a test's report."""
    reporting.add_properties(item, call)
    reporting.explain_assert(item, call)
    report = yield
    reporting.complete(item, call, report)
    return report

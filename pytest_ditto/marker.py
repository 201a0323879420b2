"""The marker ``ditto_engine``: merged over class, module and function, checked, and turned into a spec."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from ditto_core.errors import UsageError, nearest
from pytest_ditto.pytest_options import OPTIONS, PytestOptions

if TYPE_CHECKING:
    from ditto_core.pair.pair_options import PairOptions
    from ditto_core.spec import EngineSpec

MARKER = "ditto_engine"
SIGNATURE = (
    f"{MARKER}(model, *, backend='onnxruntime', dtype='float32', outputs='**', profile=None, attention='eager', "
    "options=None, reference='eager', tolerance=None, observer=True, threads=1, …): build an engine of "
    "`model` (a Hub id, a path, or model=callable) and step it beside its reference. Markers of class, module and "
    "function merge, the nearest wins; a list for `backend` or `dtype` parametrizes."
)
VARIANT = "_ditto_engine_variant"
FIXTURES = ("ditto", "ditto_engine", "ditto_gate", "ditto_reference", "ditto_relations")
LISTS = ("backend", "dtype")

Variant = tuple[str, str]
"""Backend and dtype of one parametrized test."""


class Wanted(NamedTuple):
    """What a test asks for."""

    spec: EngineSpec
    options: PairOptions


WANTED = pytest.StashKey[Wanted | UsageError]()


class Arguments(NamedTuple):
    """The names that a marker takes besides ``model``: fields of the spec, and of the pair's options."""

    spec: tuple[str, ...]
    pair: tuple[str, ...]

    @classmethod
    def known(cls) -> Arguments:
        """Read them off the classes."""
        from ditto_core.pair.pair_options import PairOptions
        from ditto_core.spec import EngineSpec

        spec = ("engine", *(field.name for field in fields(EngineSpec) if field.name != "model"))
        return cls(spec, tuple(field.name for field in fields(PairOptions) if field.name != "dump"))


def uses_ditto(item: pytest.Item) -> bool:
    """Tell whether a test uses one of the fixtures that need the marker."""
    return any(name in FIXTURES for name in getattr(item, "fixturenames", ()))


def merged(node: pytest.Item | pytest.Function | Any) -> dict[str, Any]:
    """Return the arguments of all markers around a test; the nearest wins. Raises :class:`UsageError`."""
    arguments: dict[str, Any] = {}
    for mark in reversed(list(node.iter_markers(MARKER))):
        arguments |= arguments_of(mark)
    return arguments


def arguments_of(mark: pytest.Mark) -> dict[str, Any]:
    """Return one marker's arguments by name."""
    if len(mark.args) > 1:
        raise UsageError(f"marker {MARKER} takes one positional argument, the model, but got {len(mark.args)}")
    names = Arguments.known()
    known = ("model", *names.spec, *names.pair)
    for name in mark.kwargs:
        if name not in known:
            raise UsageError(
                f"marker {MARKER} has no argument {name!r}{nearest(name, known)} (known: {', '.join(known)})"
            )
    if mark.args and "model" in mark.kwargs:
        raise UsageError(f"marker {MARKER} got its model twice")
    return {**dict(zip(("model",), mark.args, strict=False)), **mark.kwargs}


def variants(arguments: Mapping[str, Any], only: str | None) -> list[Variant]:
    """Return what a test is parametrized over: nothing unless ``backend`` or ``dtype`` is a list.

    ``only`` names the one backend to keep, or, where the marker names a single one, to use in its place. The result
    can be empty then for a list that does not have it. An engine file has a backend of its own.
    """
    from ditto_core.spec import parse_backend, parse_dtype

    backends = [*dict.fromkeys(map(parse_backend, listed("backend", arguments)))]
    if only is not None and arguments.get("engine") is None:
        backends = [only] if not is_list(arguments.get("backend")) or only in backends else []
    dtypes = dict.fromkeys(map(parse_dtype, listed("dtype", arguments)))
    return [(backend, dtype) for backend in backends for dtype in dtypes]


def listed_combinations(item: pytest.Item) -> list[Variant]:
    """Return all backends and dtypes that a test's markers list, whatever ``--ditto-backend`` keeps of them."""
    arguments = merged(item)
    return variants(arguments, None) if parametrized(arguments) else []


def parametrized(arguments: Mapping[str, Any]) -> bool:
    """Tell whether the marker makes several tests of one."""
    return any(is_list(arguments.get(name)) for name in LISTS)


def is_list(value: Any) -> bool:
    """Tell whether an argument lists several values."""
    return isinstance(value, list | tuple | set | frozenset)


def listed(name: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return an argument's values, each once."""
    from ditto_core.spec import EngineSpec

    value = arguments.get(name)
    if not is_list(value):
        return [str(EngineSpec.__dataclass_fields__[name].default) if value is None else value]
    if not value:
        raise UsageError(f"marker {MARKER} has an empty list for {name}, expected at least one")
    return list(dict.fromkeys(value))


def refuse_marked_model(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Refuse ``@pytest.mark.ditto_engine(factory)``, for which pytest marks the factory and calls it with the test.

    The test's name is then bound to the model, and the test would disappear silently.
    """
    if not (inspect.isfunction(obj) or inspect.isclass(obj)) or collector.funcnamefilter(name):
        return
    own = obj.__dict__.get("pytestmark", ())
    bare = (mark for mark in (own if is_list(own) else [own]) if not (mark.args or mark.kwargs))
    if any(mark.name == MARKER for mark in bare) and not (inspect.isclass(obj) and collector.classnamefilter(name)):
        raise collector.CollectError(
            f"marker {MARKER} is on {name!r}, which is not a test; write @pytest.mark.{MARKER}(model={name})"
        )


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make one test for each backend and dtype that a marker lists. Errors are reported after collection."""
    if VARIANT not in metafunc.fixturenames:
        return
    only = metafunc.config.stash[OPTIONS].backend
    try:
        arguments = merged(metafunc.definition)
        if not parametrized(arguments):
            return
        found = variants(arguments, only)
    except UsageError:
        return
    if found:
        metafunc.parametrize(VARIANT, found, ids=["-".join(variant) for variant in found], indirect=True)
    else:
        reason = f"the marker lists {', '.join(arguments['backend'])}, and --ditto-backend keeps {only} only"
        nothing = pytest.param((only, listed("dtype", arguments)[0]), marks=pytest.mark.skip(reason=reason))
        metafunc.parametrize(VARIANT, [nothing], ids=["no-backend"], indirect=True)


def check_items(items: list[pytest.Item]) -> dict[str, UsageError]:
    """Read the marker of every test that has one or needs one; return what is wrong, by node id."""
    wrong: dict[str, UsageError] = {}
    for item in items:
        if not uses_ditto(item) and item.get_closest_marker(MARKER) is None:
            continue
        try:
            if uses_ditto(item):
                item.stash[WANTED] = read(item)
            else:
                merged(item)
        except UsageError as error:
            item.stash[WANTED] = wrong[item.nodeid] = error
    return wrong


def wanted(item: pytest.Item) -> Wanted:
    """Return what a test asks for. Raises :class:`UsageError`; a fixture asked for by name at run time is read late."""
    found = item.stash.get(WANTED, None) or read(item)
    if isinstance(found, UsageError):
        raise found
    return found


def refuse_wrong(item: pytest.Item) -> None:
    """Raise what :func:`check_items` found wrong with a test."""
    found = item.stash.get(WANTED, None)
    if isinstance(found, UsageError):
        raise found


def read(item: pytest.Item) -> Wanted:
    """Turn a test's markers and the options into a spec. Raises :class:`UsageError`."""
    if item.get_closest_marker(MARKER) is None:
        raise UsageError(f"the test uses a ditto fixture without a marker: add @pytest.mark.{MARKER}(model)")
    arguments = merged(item)
    if "model" not in arguments:
        raise UsageError(f"marker {MARKER} names no model, expected a Hub id, a path or model=callable")
    options = item.config.stash[OPTIONS]
    variant = getattr(item, "callspec", None) and item.callspec.params.get(VARIANT)  # type: ignore[attr-defined]
    if variant:
        arguments |= dict(zip(LISTS, variant, strict=True))
    elif options.backend and arguments.get("engine") is None:
        arguments["backend"] = options.backend
    if parametrized(arguments):  # parametrization has given up on it: raise what it met
        variants(arguments, options.backend)
        raise UsageError(
            f"marker {MARKER} lists several values, which makes several tests only on a test that names the fixture: "
            "give one value in pytest.param(marks=…), or where the test calls getfixturevalue"
        )
    return Wanted(read_spec(arguments), read_pair_options(arguments, options, item.config.rootpath))


def read_spec(arguments: Mapping[str, Any]) -> EngineSpec:
    """Build and check the spec. Raises :class:`UsageError`; nothing is loaded."""
    from ditto_core.backends.registry import backend_names
    from ditto_core.spec import FILE_BACKENDS, EngineSpec

    chosen = {name: arguments[name] for name in Arguments.known().spec if name in arguments}
    try:
        spec = EngineSpec.of(arguments["model"], **chosen)
    except (TypeError, ValueError) as error:
        raise UsageError(f"marker {MARKER}: {error}") from error
    names = backend_names()
    if spec.backend not in (*names, *FILE_BACKENDS.values()):
        raise UsageError(
            f"unknown backend {spec.backend!r}, registered: {', '.join(names)}{nearest(spec.backend, names)}"
        )
    return spec


def read_pair_options(arguments: Mapping[str, Any], options: PytestOptions, root: Path) -> PairOptions:
    """Build and check the pair's options; the project's tolerances stand behind the marker's. Raises ``UsageError``."""
    from ditto_core.compare.tolerance import Tolerance
    from ditto_core.compare.tolerance_files import project_tolerance
    from ditto_core.pair.pair_options import PairOptions
    from ditto_core.pair.reference import check_reference

    chosen = {name: arguments[name] for name in Arguments.known().pair if name in arguments}
    if options.threads is not None:
        chosen.setdefault("threads", options.threads)
    chosen.setdefault("localize_failed", options.localize_failed)
    chosen["localize"] = options.localize or chosen.get("localize", False)
    chosen["observer"] = options.observer and chosen.get("observer", True)
    tolerance = Tolerance.of(chosen.get("tolerance")).over(project_tolerance(root))
    if options.tolerance_factor is not None:
        tolerance = replace(tolerance, factor=options.tolerance_factor)
    check_reference(chosen.get("reference", "eager"), chosen.get("name_map"))
    return PairOptions(**{**chosen, "tolerance": tolerance})

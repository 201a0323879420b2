"""The checks of a backend: as a list for pytest's parametrize, or all at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ditto_core.backends.base import Backend
from ditto_core.backends.registry import get_backend
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import UsageError, first_line, nearest
from ditto_core.testing import building, stepping, tapping
from ditto_core.testing.subject import Subject

PROMISES: tuple[Callable[[Subject], None], ...] = (
    building.description,
    building.unknown_dtype,
    building.unknown_option,
    building.report,
    building.own_folder,
    building.moved_engine,
    building.other_process,
    building.damaged_engine,
    tapping.no_tap,
    tapping.one_tap,
    tapping.output_as_tap,
    tapping.every_tap,
    tapping.tap_order,
    tapping.dtypes,
    tapping.tensors_last,
    stepping.outputs,
    stepping.decoding,
    stepping.batch_sizes,
    stepping.padding,
    stepping.restart,
    stepping.two_sessions,
    stepping.determinism,
    stepping.inputs_kept,
    stepping.missing_input,
    stepping.wrong_shape,
    stepping.works_after_a_refusal,
    stepping.errors_in_one_line,
    stepping.model_without_a_cache,
    stepping.memory,
    stepping.cleanup,
)


@dataclass(frozen=True)
class BackendCheck:
    """One promise. Calling it raises AssertionError when the backend breaks it; ``str`` gives its name."""

    promise: Callable[[Subject], None]
    subject: Subject

    @property
    def name(self) -> str:
        """The name of the promise, such as ``two_sessions``."""
        return self.promise.__name__

    def __str__(self) -> str:
        return self.name

    def __call__(self) -> None:
        """Check the promise. Raises AssertionError with what was found, or what the backend raised on a good call."""
        __tracebackhide__ = True
        try:
            self.promise(self.subject)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {first_line(error)}") from error


def backend_checks(
    backend: Backend | str,
    *,
    dtype: str = "",
    options: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    workspace: Workspace | None = None,
    isolation: str = "",
) -> list[BackendCheck]:
    """Return the checks of a backend, for ``@pytest.mark.parametrize("check", backend_checks(...), ids=str)``.

    Nothing is built before a check is called; the checks of one list share their engines.

    Args:
        backend: an instance, registered or not, or the name of a registered one. Its class needs no arguments.
        dtype: the engines' dtype, by default the first of ``backend.dtypes``.
        options: the backend's own options.
        without: names of promises that the backend does not give.
        workspace: where the models' exports are kept, by default the user's cache.
        isolation: ``process`` for sessions in child processes, ``none`` for here; by default as the backend asks.

    Raises :class:`UsageError` for an unknown name in ``without``.
    """
    known = [promise.__name__ for promise in PROMISES]
    for name in without:
        if name not in known:
            raise UsageError(f"unknown check {name!r}, expected some of {', '.join(known)}{nearest(name, known)}")
    made = get_backend(backend) if isinstance(backend, str) else backend
    subject = Subject(made, dtype or made.dtypes[0], dict(options or {}), workspace or Workspace(), isolation)
    return [BackendCheck(promise, subject) for promise in PROMISES if promise.__name__ not in without]


def check_backend(backend: Backend | str, **arguments: Any) -> None:
    """Run all checks; see :func:`backend_checks` for the arguments.

    Raises AssertionError that lists what is broken, one line each; :class:`UsageError` where ``without`` leaves none.
    """
    __tracebackhide__ = True
    checks = backend_checks(backend, **arguments)
    if not checks:
        raise UsageError("without= leaves no check: nothing is known of this backend")
    broken = [line for check in checks if (line := failure(check))]
    if broken:
        name = checks[0].subject.backend.name
        raise AssertionError(f"backend {name} breaks {len(broken)} of {len(checks)} promises:\n" + "\n".join(broken))


def failure(check: BackendCheck) -> str:
    """Run a check and return what it found in one line, or an empty string."""
    try:
        check()
    except AssertionError as error:
        return f"  {check}: {first_line(error)}"
    return ""

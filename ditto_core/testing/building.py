"""What a build must do: report completely, write an engine that needs nothing outside its folder, refuse bad specs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ditto_core.errors import BackendError, DittoError
from ditto_core.sites import Tap
from ditto_core.spec import DTYPES
from ditto_core.system.fingerprint import directory_digest
from ditto_core.system.isolate import run_isolated
from ditto_core.testing.subject import Built, Subject, run, same, tokens

OTHER_PROCESS = "ditto_core.testing.other_process:build"
UNKNOWN_OPTION = "no_such_option_of_any_backend"


def description(subject: Subject) -> None:
    """The backend names itself, its dtypes and its versions, and a session names the backend and the dtype."""
    backend = subject.backend
    assert backend.name and backend.dtypes, "name and dtypes are empty"
    assert set(backend.dtypes) <= set(DTYPES), f"dtypes {backend.dtypes} are not torch's names"
    versions = backend.versions()
    assert versions and json.loads(json.dumps(versions)) == versions == backend.versions(), (
        f"versions() is {versions!r}, expected the same JSON-ready table of strings on every call"
    )
    with subject.session(subject.engine()) as session:
        info = session.info
        assert info.backend == backend.name, f"SessionInfo.backend is {info.backend!r}, expected {backend.name!r}"
        assert info.quantized or info.dtype == subject.dtype, f"SessionInfo.dtype is {info.dtype!r}"


def report(subject: Subject) -> None:
    """The report of a build accounts for each tap of the request: it is in ``taps``, or in ``refused`` with a reason.

    A tap of an unknown value has to be refused, by the report or by an error.
    """
    taps = subject.every_tap()
    built = subject.engine(taps)
    shown, refused = {tap.site for tap in built.report.taps}, built.report.refused
    lost = [tap.site for tap in taps if (tap.site in shown) == (tap.site in refused)]
    assert not lost, f"{lost[0]} is in both or neither of the report's taps and refused ({len(lost)} such taps)"
    assert all(refused.values()), "a tap is refused without a reason"
    unknown = Tap("no.such.site", "no.such.value")
    try:
        made = subject.backend.build(subject.request([unknown]))
    except DittoError:
        return
    assert unknown not in made.taps, "a tap of a value that is not in the model is reported as shown"


def own_folder(subject: Subject) -> None:
    """A build writes into its folder and leaves the export as it was: hard links make that easy to miss."""
    export = subject.export().directory
    before = directory_digest(export)
    built = subject.engine(subject.every_tap()[:1])
    with subject.session(built) as session:
        run(session, tokens())
    assert any(built.directory.iterdir()), "the engine's folder is empty"
    assert directory_digest(export) == before, f"the build or the session changed the export's files in {export}"


def moved_engine(subject: Subject) -> None:
    """An engine opens in another folder than the one it was built in: the cache moves it."""
    built = subject.engine()
    moved = subject.copy(built)
    hidden = built.directory.rename(built.directory.with_suffix(".hidden"))
    try:
        with subject.session(moved) as session:
            run(session, tokens())
    finally:
        hidden.rename(built.directory)


def other_process(subject: Subject) -> None:
    """An engine that another process built opens here and computes the same bits."""
    built = subject.engine()
    request = subject.request(())
    kind = type(subject.backend)
    arguments = {
        "backend": f"{kind.__module__}:{kind.__qualname__}",
        "spec": request.spec.to_json(),
        "export": str(subject.export().directory),
        "directory": str(request.directory),
    }
    run_isolated(OTHER_PROCESS, arguments, timeout=600)
    with subject.session(built) as here, subject.session(Built(request, built.report)) as there:
        assert same(run(here, tokens()), run(there, tokens())), "engines of two processes differ"


def damaged_engine(subject: Subject) -> None:
    """An engine whose files are empty is refused when it is opened."""
    refused(lambda: open_damaged(subject), "opening an engine whose files are empty")


def open_damaged(subject: Subject) -> None:
    """Open a copy of an engine whose files are empty. They are new files: the old ones may be hard links."""
    copy = subject.copy(subject.engine())
    for path in [path for path in copy.directory.rglob("*") if path.is_file()]:
        empty(path)
    with subject.session(copy) as session:
        run(session, tokens())


def empty(path: Path) -> None:
    """Put an empty file in the place of another."""
    path.unlink()
    path.touch()


def unknown_dtype(subject: Subject) -> None:
    """``check`` refuses each dtype that is not among the backend's."""
    for dtype in DTYPES:
        if dtype not in subject.backend.dtypes:
            spec = type(subject)(subject.backend, dtype, subject.options, subject.workspace).spec()
            refused(partial(subject.backend.check, spec), f"check of dtype {dtype}", BackendError)


def unknown_option(subject: Subject) -> None:
    """``check`` refuses an option that the backend does not have: a misspelled one would do nothing."""
    refused(lambda: check_unknown_option(subject), "check of an unknown option")


def check_unknown_option(subject: Subject) -> None:
    """Check a spec with an option that no backend has."""
    options = {**subject.options, UNKNOWN_OPTION: 1}
    subject.backend.check(type(subject)(subject.backend, subject.dtype, options, subject.workspace).spec())


def refused(call: Callable[[], object], what: str, kind: type[DittoError] = DittoError) -> None:
    """Raise AssertionError unless a call raises an error of this class."""
    try:
        call()
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__}, expected {kind.__name__}: {error}") from error
    raise AssertionError(f"{what} is accepted, expected {kind.__name__}")

"""Run native work in a child process, so that a segfault, running out of memory or a hang is an error of one call.

The child is a fresh interpreter (``python -m ditto_core.system.isolate REQUEST RESULT``); JSON goes in and comes out
through files without names, never pickle, and whatever the child prints goes to a log. So a kill leaves no file behind.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ditto_core.errors import BuildError, DittoError

TAIL_LINES, TAIL_BYTES = 12, 16 << 10
SIGNALS = {
    signal.SIGKILL: "killed by signal 9 (out of memory?)",
    signal.SIGSEGV: "killed by signal 11 (segmentation fault)",
    signal.SIGABRT: "killed by signal 6 (abort)",
}
PR_SET_PDEATHSIG = 1


def run_isolated(
    target: str,
    kwargs: Mapping[str, Any],
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    failure: type[DittoError] = BuildError,
) -> Any:
    """Call ``module:function`` with JSON keyword arguments in a child process and return its JSON result.

    ``env`` is added to the environment, ``timeout`` is in seconds, ``log`` receives the child's output. A
    :class:`DittoError` that the child raises comes back as the same class and message. Every other end (an exception,
    a signal, a timeout, an exit without a result) raises ``failure``: the cause on the first line, then the last lines
    of the log. The child does not outlive this call, nor this process.
    """
    with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as result, _sink(log) as sink:
        request.write(json.dumps({"target": target, "kwargs": dict(kwargs), "parent": os.getpid()}).encode())
        request.seek(0)
        cause = _run([request.fileno(), result.fileno()], env or {}, timeout, sink)
        text = os.pread(result.fileno(), os.fstat(result.fileno()).st_size, 0)
        if text and not cause:
            return _unpack(json.loads(text), target, sink, failure)
        raise failure(message(target, cause or "ended without a result", sink))


def _sink(log: Path | None) -> IO[bytes]:
    if log is None:
        return tempfile.TemporaryFile("a+b")
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("a+b")


def _run(files: list[int], env: Mapping[str, str], timeout: float | None, log: IO[bytes]) -> str:
    """Run the child to its end and return why it failed, or an empty string."""
    with start(["ditto_core.system.isolate", *map(str, files)], log, env, files) as child:
        try:
            return cause_of(child.wait(timeout))
        except subprocess.TimeoutExpired:
            return f"still running after {timeout:g} s (hang?), killed"
        finally:  # also on Ctrl-C: the child has its own process session and does not get the signal
            kill(child)


def start(
    module: Sequence[str], log: IO[bytes], env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start ``python -m MODULE ARGUMENTS`` with this process's import path; what it prints goes to ``log``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **(env or {})}
    return subprocess.Popen(
        [sys.executable, "-u", "-X", "faulthandler", "-m", *module],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        pass_fds=pass_fds,
    )


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child with what it may have started, and wait for its end."""
    try:
        os.killpg(child.pid, signal.SIGKILL)  # with what the child itself may have started
    except (ProcessLookupError, PermissionError):
        return
    child.wait()


def cause_of(code: int) -> str:
    """Say how a process ended; an empty string for exit code 0."""
    if code >= 0:
        return f"exited with code {code}" if code else ""
    return SIGNALS.get(signal.Signals(-code), f"killed by signal {-code} ({signal.Signals(-code).name})")


def _unpack(result: dict[str, Any], target: str, log: IO[bytes], failure: type[DittoError]) -> Any:
    if "value" in result:
        return result["value"]
    raise error_of(result, target, log, failure)


def described(error: Exception) -> dict[str, str]:
    """Return an error of the child as data, with its traceback in the log unless it was raised on purpose."""
    if not isinstance(error, DittoError):
        traceback.print_exc()
    kind = type(error)
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "message": str(error)}


def error_of(described: Mapping[str, str], target: str, log: IO[bytes], failure: type[DittoError]) -> DittoError:
    """Return the child's error again: the same :class:`DittoError`, or ``failure`` with the log's tail."""
    kind = _ditto_error(described["class"])
    if kind is not None:
        return kind(described["message"])
    return failure(message(target, f"raised {described['class'].rpartition(':')[2]}: {described['message']}", log))


def _ditto_error(name: str) -> type[DittoError] | None:
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] != "ditto_core":
        return None
    found = getattr(importlib.import_module(module), attribute, None)
    return found if isinstance(found, type) and issubclass(found, DittoError) else None


def message(target: str, cause: str, log: IO[bytes]) -> str:
    """Return the cause on the first line, then the last lines of the child's log."""
    size = os.fstat(log.fileno()).st_size
    # The child writes at this file's own position, which a read would move.
    text = os.pread(log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
    tail = "".join(f"\n  | {line}" for line in text.splitlines()[-TAIL_LINES:])
    return f"{target.rpartition(':')[2]} in a child process: {cause}{tail}"


def _serve(request: int, result: int) -> None:
    """Do the child's part: call the target and write its result or its error."""
    with os.fdopen(request) as file:
        order = json.load(file)
    die_with(order["parent"])
    try:
        module, _, name = order["target"].partition(":")
        outcome = {"value": getattr(importlib.import_module(module), name)(**order["kwargs"])}
        text = json.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - whatever it is, it goes back to the parent
        text = json.dumps(described(error))
    with os.fdopen(result, "w") as file:
        file.write(text)


def die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent is killed (Linux; elsewhere the child runs to its end)."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))

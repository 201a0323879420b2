"""Run native work in a child process, so that a segfault, an out-of-memory or a hang is an error and not the end.

The child is a fresh interpreter (``python -m ditto_core.system.isolate REQUEST RESULT``); JSON goes in and comes out
through files, never pickle, and whatever the child prints goes to a log.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ditto_core.errors import BuildError, DittoError
from ditto_core.system.atomic import write_atomic

TAIL_LINES = 12
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
    with tempfile.TemporaryDirectory(prefix="ditto-isolate-") as folder:
        work = Path(folder)
        log = log or work / "log.txt"
        request, result = work / "request.json", work / "result.json"
        request.write_text(json.dumps({"target": target, "kwargs": dict(kwargs), "parent": os.getpid()}))
        cause = _run([str(request), str(result)], env or {}, timeout, log)
        if result.exists() and not cause:
            return _unpack(json.loads(result.read_text()), target, log, failure)
        raise failure(_message(target, cause or "ended without a result", log))


def _run(arguments: list[str], env: Mapping[str, str], timeout: float | None, log: Path) -> str:
    """Run the child to its end and return why it failed, or an empty string."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **env}
    command = [sys.executable, "-u", "-X", "faulthandler", "-m", "ditto_core.system.isolate", *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("ab") as sink,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        ) as child,
    ):
        try:
            return _cause(child.wait(timeout))
        except subprocess.TimeoutExpired:
            return f"still running after {timeout:g} s (hang?), killed"
        finally:  # also on Ctrl-C: the child has its own process session and does not get the signal
            _kill(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)  # with what the child itself may have started
    except (ProcessLookupError, PermissionError):
        return
    child.wait()


def _cause(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}" if code else ""
    return SIGNALS.get(signal.Signals(-code), f"killed by signal {-code} ({signal.Signals(-code).name})")


def _unpack(result: dict[str, Any], target: str, log: Path, failure: type[DittoError]) -> Any:
    if "value" in result:
        return result["value"]
    kind = _ditto_error(result["class"])
    if kind is not None:
        raise kind(result["message"])
    raise failure(_message(target, f"raised {result['class'].rpartition(':')[2]}: {result['message']}", log))


def _ditto_error(name: str) -> type[DittoError] | None:
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] != "ditto_core":
        return None
    found = getattr(importlib.import_module(module), attribute, None)
    return found if isinstance(found, type) and issubclass(found, DittoError) else None


def _message(target: str, cause: str, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log.exists() else []
    tail = "".join(f"\n  | {line}" for line in lines)
    return f"{target.rpartition(':')[2]} in a child process: {cause}{tail}"


def _serve(request: Path, result: Path) -> None:
    """Do the child's part: call the target and write its result or its error."""
    order = json.loads(request.read_text())
    _die_with(order["parent"])
    try:
        module, _, name = order["target"].partition(":")
        outcome = {"value": getattr(importlib.import_module(module), name)(**order["kwargs"])}
        text = json.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - whatever it is, it goes back to the parent
        if not isinstance(error, DittoError):
            traceback.print_exc()
        kind = type(error)
        text = json.dumps({"class": f"{kind.__module__}:{kind.__qualname__}", "message": str(error)})
    write_atomic(result, text)


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent is killed (Linux; elsewhere the child runs to its end)."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))

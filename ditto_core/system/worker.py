"""A child process that answers many requests; what kills it is an error of one request.

The child (``python -m ditto_core.system.worker``) answers until this end of a socket is closed. What goes through the
socket is pickled by these two processes alone; nothing is read from a file.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ditto_core.errors import DittoError, RunError
from ditto_core.system.isolate import cause_of, described, die_with, error_of, kill, message, start

Give = Callable[[Any], None]
Answer = Callable[[Any, Give], None]
"""Takes a question and gives the parts of its answer one by one."""

PART, END, ERROR = "part", "end", "error"


class Worker:
    """A child process that answers by ``module:name``, which it calls without arguments for its :data:`Answer`.

    ``name`` is what a message calls it.
    ``timeout``: seconds that one part of an answer may take. ``failure`` is raised for an exception that is no
    :class:`DittoError`, and when the child dies or is silent for too long: the cause on the first line, then the last
    lines of its log.
    """

    def __init__(self, target: str, name: str, *, timeout: float, failure: type[DittoError] = RunError) -> None:
        self._name, self._timeout, self._failure = name, timeout, failure
        ours, theirs = socket.socketpair()
        # Linux sends the signal when the thread that started the child ends, so only the main thread may ask for it.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed by close()
        with theirs:
            command = ["ditto_core.system.worker", str(theirs.fileno()), str(parent), target]
            self._child = start(command, self._log, pass_fds=[theirs.fileno()])
        self._connection = Connection(ours.detach())

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return not self._connection.closed

    def ask(self, question: Any, take: Give) -> None:
        """Send a question and hand each part of the answer to ``take``. A ``take`` that raises ends the child."""
        try:
            with suppress(ConnectionError):  # it died before: receiving tells of what
                self._connection.send(question)
            while (answer := self._receive())[0] == PART:
                take(answer[1])
        except BaseException:
            self.close()
            raise
        if answer[0] == ERROR:
            error = error_of(answer[1], self._name, self._log, self._failure)
            raise error

    def _receive(self) -> tuple[str, Any]:
        try:
            if not self._connection.poll(self._timeout):
                self._fail(f"no answer for {self._timeout:g} s (hang?), killed")
            answer: tuple[str, Any] = self._connection.recv()
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):  # the socket closes a moment before the process ends
                self._child.wait(self._timeout)
            self._fail(cause_of(self._child.returncode or 0) or "ended without an answer")
        return answer

    def _fail(self, cause: str) -> None:
        raise self._failure(message(self._name, cause, self._log))

    def kill(self) -> None:
        """End the child; a thread that waits for its answer gets the error."""
        kill(self._child)

    def close(self) -> None:
        """End the child and release its log. May be called again."""
        if self.alive:
            self._connection.close()
            kill(self._child)
            self._log.close()


def serve(descriptor: int, parent: int, target: str) -> None:
    """Do the child's part: answer until the other end is closed."""
    if parent:
        die_with(parent)
    with suppress(OSError):  # when memory runs out, the kernel is to take this process and not its parent
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = Connection(descriptor)
    module, _, name = target.partition(":")
    answer: Answer = getattr(importlib.import_module(module), name)()
    with suppress(EOFError, ConnectionError):
        while True:
            question = connection.recv()
            try:
                answer(question, lambda part: connection.send((PART, part)))
                connection.send((END, None))
            except Exception as error:  # noqa: BLE001 - whatever it is, it goes back to the parent
                connection.send((ERROR, described(error)))


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

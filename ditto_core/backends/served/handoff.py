"""A run that another thread drives to its end, one step at a time.

A server generates whole sequences by itself and only calls back. The callback hands each step's tensors over and
waits for the token that it must go on with.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from ditto_core.errors import RunError, first_line

JOIN_SECONDS = 60.0


class Handoff:
    """``step`` is called by the consumer; ``offer`` by the callback, inside the run.

    ``settle`` waits for what the calling thread has begun: before tensors are handed over, and before the run goes on
    and may write to them again. ``name`` is the server's, for messages.
    """

    def __init__(self, settle: Callable[[], None] = lambda: None, name: str = "TensorRT-LLM") -> None:
        self._settle = settle
        self._name = name
        self._offers: queue.Queue[Any] = queue.Queue(1)
        self._orders: queue.Queue[Any] = queue.Queue(1)
        self._stopped = False
        self._waiting = False
        self._thread: threading.Thread | None = None

    def start(self, target: Callable[[], Any]) -> None:
        """Begin the run in a thread of its own."""
        self._thread = threading.Thread(target=self._run, args=(target,), name="ditto-handoff", daemon=True)
        self._thread.start()

    def step(self, order: Any = None) -> Any:
        """Let the run go on with ``order`` (a step's first call has none) and return what it offers next.

        Raises :class:`RunError` when the run fails, or ends.
        """
        if self._waiting:
            self._waiting = False
            self._settle()
            self._orders.put(order)
        found = self._offers.get()
        if isinstance(found, Failure):
            raise RunError(found.message) from found.cause
        self._waiting = True
        return found

    def offer(self, value: Any) -> Any:
        """Hand a step over and return the order to go on with, or None when nobody wants more."""
        if self._stopped:
            return None
        self._settle()
        self._offers.put(value)
        return self._orders.get()

    @property
    def stopped(self) -> bool:
        """Tell whether the consumer wants no more steps."""
        return self._stopped

    def stop(self) -> None:
        """Let the run end: every further offer is answered at once with None."""
        self._stopped = True
        if self._waiting:
            self._waiting = False
            self._orders.put(None)
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _run(self, target: Callable[[], Any]) -> None:
        try:
            target()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer must hear of it
            end = Failure(f"{self._name} failed: {first_line(error)}", error)
        else:
            end = Failure(f"{self._name} ended the sequence before the last step", None)
        if not self._stopped:
            self._offers.put(end)


class Failure:
    """The end of a run."""

    def __init__(self, message: str, cause: BaseException | None) -> None:
        self.message = message
        self.cause = cause

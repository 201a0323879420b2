"""Waiting for a page that forbids ``eval``."""

from __future__ import annotations

import time

PATIENCE = 120_000
"""Milliseconds: a busy machine is slow, and nothing here is timed."""


def until(page, expression: str) -> None:
    """Wait for a JavaScript expression to hold.

    Playwright's ``wait_for_function`` evaluates again inside the page, where a content security policy refuses it:
    it passes only where the expression holds at once.
    """
    ends = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < ends, f"this page never came to {expression}"
        page.wait_for_timeout(20)

"""Ctrl-C: exit status 130 and no traceback, also in the middle of an import."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143

IMPORT = "<frozen importlib._bootstrap>"
"""Name that Python gives the file of its import system in a frame."""


@contextmanager
def orderly() -> Iterator[None]:
    """Leave Ctrl-C to the run of an event loop: `asyncio.Runner` then cancels its work, and lets it clear up.

    It does so only where Python's own handler is set. That raises nothing here, so imports need no care.
    """
    ours = signal.getsignal(signal.SIGINT) is interrupt
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Python's own handler, but not while something is imported."""
    at = frame
    while at is not None:
        if at.f_code.co_filename == IMPORT:
            _end(number, frame)
        at = at.f_back
    signal.default_int_handler(number, frame)


def terminate(_number: int, _frame: FrameType | None) -> None:
    """End at once: nothing is under way yet. As the first process of a container we would otherwise be sent
    a SIGTERM in vain until there is a handler."""
    os._exit(EXIT_TERMINATED)


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)

"""Ctrl-C and the standard streams of a command.

Ctrl-C is exit status 130 and no traceback, also in the middle of an import. Streams are usable as a person, a
service manager or a pipe may leave them: closed, or not in UTF-8.
"""

from __future__ import annotations

import io
import os
import signal
import sys
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


STREAMS = 3
"""Descriptors of input, output and errors: 0, 1 and 2."""


def make_usable() -> None:
    """Make sure that all three streams are open, and that no character is an error.

    A descriptor that is closed (`>&-`) would become that of the next socket or file: what is printed would go
    there, and the event loop ends the process when it finds its own socket below 3. What the terminal's
    encoding has no character for is written as an escape.
    """
    closed = [descriptor for descriptor in range(STREAMS) if not _is_open(descriptor)]
    if closed:
        for descriptor in closed:
            _to_nothing(descriptor)
        # Python has no objects for streams that were closed when it started, so it starts anew.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _to_nothing(descriptor: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)
    os.set_inheritable(descriptor, True)

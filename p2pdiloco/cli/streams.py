"""Standard streams as a person, a service manager or a pipe may leave them: closed, or not in UTF-8."""

from __future__ import annotations

import io
import os
import sys

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

"""Questions to whoever sits at the terminal, if somebody does."""

from __future__ import annotations

import asyncio
import os
import sys

YES = ("y", "yes")


def at_terminal() -> bool:
    """Tell whether somebody can be asked: input and messages are a terminal, and we are in its foreground."""
    try:
        asked = os.isatty(sys.stdin.fileno()) and os.isatty(sys.stderr.fileno())
        return asked and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # there is no input, or it is closed
        return False


async def ask_terminal(question: str) -> bool:
    """Ask at the terminal for yes or no, beside the event loop's other work. The input's end is a no."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    answered: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        if not answered.done():
            answered.set_result(os.read(descriptor, 4096))

    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    loop.add_reader(descriptor, read)
    try:
        return (await answered).decode("ascii", "replace").strip().lower() in YES
    finally:
        loop.remove_reader(descriptor)

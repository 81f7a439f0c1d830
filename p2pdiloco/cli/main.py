"""Entry of `p2pdiloco` and `python -m p2pdiloco`: Ctrl-C is exit status 130 and no traceback, always.

Python's own handler raises KeyboardInterrupt wherever the program is. In the middle of an import of numpy or
torch that ends in a traceback or in an abort, as C++ there lets no exception out. Nothing that would have to
be cleared up is under way then, so the process ends at once. This module imports nothing heavy itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from p2pdiloco.cli.interrupt import EXIT_INTERRUPTED, _end, interrupt, make_usable, terminate


def main() -> None:
    """Entry point of the console script."""
    # A shell that starts us in the background may have us ignore Ctrl-C: then it stays ignored.
    wanted = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if wanted:
        signal.signal(signal.SIGINT, interrupt)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)
    make_usable()
    try:
        status = run(sys.argv[1:])
    except KeyboardInterrupt:  # before the command's body, or after
        status = EXIT_INTERRUPTED
    finally:
        # Nothing is left to do but to end, which takes a while with torch.
        if wanted:
            signal.signal(signal.SIGINT, _end)
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run a command, return the exit status (`cli.group`)."""
    from p2pdiloco.cli.group import run as run_command

    if os.environ.get("HOME") == "":
        os.environ.pop("HOME")  # "~" would be "/": without it, it is what the system knows of the user
    return run_command(arguments)

#!/usr/bin/env python3
"""Draws what a command shows in a terminal as an SVG: docs/pictures/terminal.svg is a node of a real run.

python scripts/pictures.py OUT.svg SECONDS COMMAND…

The command runs in a terminal of 100 columns and 26 lines for so many seconds; what it shows then is drawn,
and it is told to end. For docs/pictures/terminal.svg: two nodes of a new run with the preset `tiny`, then

python scripts/pictures.py docs/pictures/terminal.svg 180 p2pdiloco node LINK --name ben --yes
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS, LINES = 100, 26
LEAST_LINES = 8
"""Least lines of a whole picture; what is shorter shows no live view."""
_ERASED = re.compile(r"(?:\r|\x1b\[2K|\x1b\[1A){3,}")
_OUTSIDE = re.compile(r"@font-face \{\{.*?\n    \}\}\n", flags=re.DOTALL)
"""Fonts from other hosts; a reader's own do."""


def last_frame(written: str) -> str:
    """Find the last whole picture among all that a live view wrote. Raises: ValueError if there is none."""
    frames = [frame.replace("\r\n", "\n") for frame in _ERASED.split(written)[1:-1]]
    whole = [frame for frame in frames if frame.count("\n") >= LEAST_LINES]
    if not whole:
        raise ValueError("the command drew no picture")
    return whole[-1]


def shown(command: list[str], seconds: float) -> str:
    """Run a command: all that it writes into a terminal within some seconds; it has ended then."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(LINES))
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    written = bytearray()
    end = time.monotonic() + seconds
    told, length = False, 0
    while True:
        if not told and time.monotonic() > end:
            os.kill(child, signal.SIGTERM)
            told, length = True, len(written)
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                more = os.read(terminal, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not more:
                break
            written += more
    os.waitpid(child, 0)
    return bytes(written[: length if told else None]).decode(errors="replace")


def svg(frame: str, title: str) -> str:
    """Draw the picture of a terminal."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text.from_ansi(frame), end="", no_wrap=True, crop=True)
    return console.export_svg(
        title=title, code_format=_OUTSIDE.sub("", CONSOLE_SVG_FORMAT), unique_id="terminal"
    )


def main(arguments: list[str]) -> int:
    """Exit status."""
    if len(arguments) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    out, seconds, *command = arguments
    frame = last_frame(shown(command, float(seconds)))
    Path(out).write_text(svg(frame, " ".join(command[:2])), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

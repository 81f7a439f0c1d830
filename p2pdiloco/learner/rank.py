"""Program of a further process of a learner, which rank 0 starts (`learner.ranks.Siblings`).

`python -m p2pdiloco.learner.rank FD RANK COUNT FOLDER`. As in `learner.__main__`, torch is imported
while the watcher runs, which ends the process with rank 0.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from pathlib import Path

from p2pdiloco.errors import P2PDilocoError
from p2pdiloco.learner.channel import LearnerEnd
from p2pdiloco.learner.lifeline import EXIT_FAILED, exit_status, ignore_signals, speak
from p2pdiloco.util import end_with


def main(fd: int, rank: int, count: int, folder: Path) -> int:
    """Follow rank 0 to its end; returns the exit status."""
    ignore_signals()
    speak(sys.stderr.fileno())
    sock = socket.socket(fileno=fd)
    end_with(sock)
    try:
        from p2pdiloco.learner.training_process import follow

        start = LearnerEnd(sock).wait_start()
        if start is not None:
            follow(start, rank, count, folder)
    except P2PDilocoError as error:
        print(f"rank {rank} failed: {error}", file=sys.stderr)
        return exit_status(error)
    except BaseException:  # noqa: BLE001 (the end of the process: reported, not swallowed)
        traceback.print_exc()
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    sys.stderr.flush()
    os._exit(status)

"""Program of a learner's processes.

    python -m p2pdiloco.learner CHANNEL_FD EXCHANGE_FD        the learner, or its rank 0
    python -m p2pdiloco.learner FD RANK COUNT FOLDER          a further rank (`learner.ranks.Siblings`)

Torch is imported only when the watcher thread runs: so a daemon, or rank 0, that dies early takes the process
along. It is imported before `Start` arrives: the process may be started ahead of its work.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from p2pdiloco.errors import P2PDilocoError, UserError
from p2pdiloco.learner.channel import ChannelBroken, Failed, LearnerEnd
from p2pdiloco.learner.lifeline import (
    DRAIN_TIMEOUT_S,
    EXIT_FAILED,
    exit_status,
    ignore_signals,
    speak,
)
from p2pdiloco.util import EXIT_ORPHANED, end_with, yield_memory


def main(fd: int, others: Sequence[str]) -> int:
    """Run a process of a learner to its end; returns the exit status. `others`: arguments behind the first
    one."""
    ignore_signals()
    yield_memory()
    speak(sys.stderr.fileno())
    sock = socket.socket(fileno=fd)
    end_with(sock)
    channel = LearnerEnd(sock)
    name = f"rank {others[0]}" if len(others) > 1 else "learner"
    try:
        _learn(channel, others)
        channel.drain(DRAIN_TIMEOUT_S)
    except ChannelBroken as error:
        print(f"{name} ends: {error}", file=sys.stderr)
        return EXIT_ORPHANED
    except P2PDilocoError as error:
        print(f"{name} failed: {error}", file=sys.stderr)
        hint = error.hint if isinstance(error, UserError) else ""
        return _fail(channel, Failed(str(error)[:4096], hint[:4096]), exit_status(error))
    except BaseException as error:  # noqa: BLE001 (the end of the process: reported, not swallowed)
        traceback.print_exc()
        return _fail(channel, Failed(f"{type(error).__name__}: {error}"[:4096]), EXIT_FAILED)
    return 0


def _learn(channel: LearnerEnd, others: Sequence[str]) -> None:
    from p2pdiloco.learner.training_process import follow, run

    start = channel.wait_start()
    if start is None:
        return
    if len(others) == 1:
        run(channel, start, int(others[0]))
    else:
        rank, count, folder = others
        follow(start, int(rank), int(count), Path(folder))


def _fail(channel: LearnerEnd, failed: Failed, status: int) -> int:
    try:
        channel.emit(failed)
        channel.drain(DRAIN_TIMEOUT_S)
    except ChannelBroken as error:
        print(f"and nobody to tell: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    status = main(int(sys.argv[1]), sys.argv[2:])
    sys.stderr.flush()
    # Everything is saved and said. Taking torch apart piece by piece would cost a leaving node a second.
    os._exit(status)

"""Program of the learner: `python -m p2pdiloco.learner CHANNEL_FD EXCHANGE_FD`.

Torch is imported only when the watcher thread runs: so a daemon that dies early takes the learner along.
It is imported before `Start` arrives: the process may be started ahead of its work.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback

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


def main(channel_fd: int, exchange_fd: int) -> int:
    """Run a learner to its end; returns the exit status."""
    ignore_signals()
    yield_memory()
    speak(sys.stderr.fileno())
    sock = socket.socket(fileno=channel_fd)
    end_with(sock)
    channel = LearnerEnd(sock)
    try:
        _learn(channel, exchange_fd)
        channel.drain(DRAIN_TIMEOUT_S)
    except ChannelBroken as error:
        print(f"learner ends: {error}", file=sys.stderr)
        return EXIT_ORPHANED
    except P2PDilocoError as error:
        print(f"learner failed: {error}", file=sys.stderr)
        hint = error.hint if isinstance(error, UserError) else ""
        return _fail(channel, Failed(str(error)[:4096], hint[:4096]), exit_status(error))
    except BaseException as error:  # noqa: BLE001 (the end of the process: reported, not swallowed)
        traceback.print_exc()
        return _fail(channel, Failed(f"{type(error).__name__}: {error}"[:4096]), EXIT_FAILED)
    return 0


def _learn(channel: LearnerEnd, exchange_fd: int) -> None:
    from p2pdiloco.learner.training_process import run

    start = channel.wait_start()
    if start is not None:
        run(channel, start, exchange_fd)


def _fail(channel: LearnerEnd, failed: Failed, status: int) -> int:
    try:
        channel.emit(failed)
        channel.drain(DRAIN_TIMEOUT_S)
    except ChannelBroken as error:
        print(f"and nobody to tell: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stderr.flush()
    # Everything is saved and said. Taking torch apart piece by piece would cost a leaving node a second.
    os._exit(status)

"""Processes that rank 0 starts beside itself, and with one of which it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

from p2pdiloco.errors import P2PDilocoError
from p2pdiloco.learner.channel import frame
from p2pdiloco.learner.channel_messages import Start
from p2pdiloco.learner.lifeline import (
    EXIT_FAILED,
    EXIT_RANK_KILLED,
    EXIT_TOO_LARGE,
    PassTooLarge,
    RankKilled,
)
from p2pdiloco.learner.parallel.ranks import RankLost, meeting_place

SAY_IT_S = 3.0
"""Seconds that the training thread has to notice by itself that a rank is gone, and to tell the daemon."""
END_S = 5.0


class Siblings:
    """The other processes of this learner; a context, which ends them."""

    def __init__(self, start: Start, count: int) -> None:
        self._start, self.count = start, count
        self._meeting = meeting_place()
        self.folder = Path(self._meeting.name)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lifelines: list[socket.socket] = []
        self._ending = False
        self._lost = threading.Event()
        self._reason = ""
        self._status = EXIT_FAILED

    def __enter__(self) -> Siblings:
        for rank in range(1, self.count):
            self._spawn(rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending = True
        self.met()
        for sock in self._lifelines if error is not None else ():
            sock.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for sock in self._lifelines:
            sock.close()

    def met(self) -> None:
        """Clean up after all ranks have found each other."""
        self._meeting.cleanup()

    def why(self) -> P2PDilocoError | None:
        """Say which rank ended and how, if one did or does at once."""
        self._lost.wait(SAY_IT_S / 2)
        return _ERRORS[self._status](self._reason) if self._reason else None

    def _spawn(self, rank: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            words = [str(theirs.fileno()), str(rank), str(self.count), str(self.folder)]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "p2pdiloco.learner.parallel.rank", *words],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._processes.append(process)
        self._lifelines.append(ours)
        ours.sendall(frame(self._start))
        threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._ending:
            return
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        if code == EXIT_TOO_LARGE:
            how = "a pass does not fit into its memory"
        self._status = _status(self._status, code)
        self._reason = self._reason or f"rank {rank} of this learner ended ({how})"
        self._lost.set()
        # Collectives of some backends wait for ever for one who is gone.
        if not threading.Event().wait(SAY_IT_S) and not self._ending:
            print(self._reason, file=sys.stderr, flush=True)
            os._exit(self._status)


_ERRORS: dict[int, type[P2PDilocoError]] = {
    EXIT_FAILED: RankLost,
    EXIT_TOO_LARGE: PassTooLarge,
    EXIT_RANK_KILLED: RankKilled,
}
"""Error by which this process ends, by its exit status."""


def _status(before: int, code: int) -> int:
    """Find this process's exit status after another rank ended so: what did not fit counts most."""
    if EXIT_TOO_LARGE in (before, code):
        return EXIT_TOO_LARGE
    return EXIT_RANK_KILLED if code == -signal.SIGKILL else before

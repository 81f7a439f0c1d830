"""`python -m p2pdiloco.demo.guard TAG`: nothing of a swarm outlives the command that started it.

The command holds the other end of our standard input and writes the paths of its temporary folders there,
a line each. When it closes, for whatever reason (the command ended, or was killed with -9 and could end
nothing any more), every process that carries the tag in its environment is killed and the folders are
removed. Processes inherit the tag, so daemons' learners and p2pd are found also where their parent is gone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

VARIABLE = "SWARM_TAG"
DONE = "done\n"
COMMAND = "run "
ROUNDS = 20
ROUND_S = 0.25
END_TIMEOUT_S = 10.0


def tagged(tag: str) -> Iterator[psutil.Process]:
    """Running processes, other than this one, that carry the tag."""
    for process in psutil.process_iter():
        try:
            mine = process.pid != os.getpid() and process.environ().get(VARIABLE) == tag
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue  # somebody else's, or gone in this moment


def kill_tagged(tag: str, folders: Sequence[Path]) -> None:
    """Kill what carries the tag until nothing is left, then remove the folders."""
    for _ in range(ROUNDS):
        left = list(tagged(tag))
        if not left:
            break
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=ROUND_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def carry_out(commands: Iterable[Sequence[str]]) -> None:
    """Commands that clear up: each may fail or hang, and none keeps the others from being tried."""
    for words in commands:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(words, capture_output=True, timeout=END_TIMEOUT_S)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Set by Ctrl-C, SIGTERM and a closed terminal, but for those that are ignored (nohup's wish)."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda *_: stop.set())
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Guard:
    """The command's side: hold it as long as processes run, `release` it at the end."""

    def __init__(self) -> None:
        self.tag = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "p2pdiloco.demo.guard", self.tag],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is the command's to handle
        )

    def environment(self) -> dict[str, str]:
        """Variables that every process of the swarm must have in its environment."""
        return {VARIABLE: self.tag}

    def adopt(self, folder: Path) -> None:
        """Have the folder removed if the command ends without a word."""
        self._say(f"{folder}\n")

    def on_end(self, command: Sequence[str]) -> None:
        """Have a command carried out if this one ends without a word, after the processes are gone."""
        self._say(f"{COMMAND}{shlex.join(command)}\n")

    def release(self) -> None:
        """Tell the guard that all has ended: it looks for processes once more, leaves the folders alone, and
        ends."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        self._say(DONE)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _say(self, line: str) -> None:
        """A guard that somebody killed is missed at the end only."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()


def main(tag: str) -> int:
    """Wait for the command's end, then clear up after it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # What follows the last newline is torn: never remove half a path.
    lines = sys.stdin.buffer.read().decode().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    lost = [] if DONE in whole else [line.rstrip("\n") for line in whole]
    kill_tagged(tag, [Path(line) for line in lost if not line.startswith(COMMAND)])
    carry_out(shlex.split(line[len(COMMAND) :]) for line in lost if line.startswith(COMMAND))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

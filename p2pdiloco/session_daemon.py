"""The daemon of a session: started as a process, or found again, asked for its last words, and ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from p2pdiloco.adapters.data_dir import DataDir, own_peer
from p2pdiloco.adapters.p2pd import socket_folder
from p2pdiloco.config.manifest import Manifest, canonical_bytes
from p2pdiloco.config.presets import begun_by
from p2pdiloco.daemon.run_files.known_runs import WaysIn, is_beginning, saved_runs
from p2pdiloco.errors import StorageError, UserError
from p2pdiloco.learner.channel import join_daemon
from p2pdiloco.tasks.registry import load_manifest

POLL_S = 0.05
LEAVE_S = 9.0
"""Seconds that a daemon needs at most to leave, beside the time that writing takes."""
LONELY_S = 300.0
"""Seconds without its program after which a daemon leaves by itself."""
ADOPT_S = 5.0
"""Seconds that a daemon that is there already has to answer: else it does not wait for a program."""
LOG = "session.log"


class SessionDaemon:
    """A node's daemon of which the program is the learner, with a folder of its own.

    `connect` comes first; after `end` nothing follows.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: psutil.Process | None = None
        self.adopted = False
        """Found again: an earlier life of the program left it behind."""

    def connect(self, words: Sequence[str], until: float) -> tuple[socket.socket, int]:
        """Reach the daemon that an earlier life of the program left behind, or start one: the connection, and
        the descriptor of the exchange. `words`: flags of `p2pdiloco node` for a new one.

        Raises:
            UserError: the daemon has ended, or does not answer until then (monotonic clock).
        """
        path = socket_folder(self._folder) / "learner.sock"
        found = self._left_behind(path)
        if found is not None:
            return found
        with DataDir(self._folder, parents=True):
            pass  # free: neither the socket nor the log is another program's
        self._start(path, words)
        while True:
            try:
                return join_daemon(path, max(0.1, until - time.monotonic()))
            except StorageError as error:
                assert self._process is not None
                with suppress(psutil.TimeoutExpired):
                    self._process.wait(POLL_S)
                self.check(until, error)

    def _left_behind(self, path: Path) -> tuple[socket.socket, int] | None:
        try:
            connection, descriptor = join_daemon(path, ADOPT_S)
        except StorageError:
            return None  # nobody is there, or it has a program
        try:
            self._process = psutil.Process(int((self._folder / "lock").read_text()))
        except (OSError, ValueError, psutil.NoSuchProcess):
            connection.close()
            os.close(descriptor)
            return None
        self.adopted = True
        return connection, descriptor

    def _start(self, path: Path, words: Sequence[str]) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            log = os.fdopen(os.open(self._folder / LOG, flags, 0o600), "wb")
        except OSError as error:
            raise StorageError(f"cannot write into {self._folder}: {error.strerror}") from error
        command = [sys.executable, "-P", "-m", "p2pdiloco", "node", "--data-dir", str(self._folder)]
        command += ["--learner-socket", str(path), "--learner-wait-s", str(LONELY_S), "--log", "text", *words]
        with log:
            # A Ctrl-C at the terminal is the program's; it ends the daemon then.
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._started = started  # or it would complain about a child that was not waited for
        self._process = psutil.Process(started.pid)

    def addresses(self) -> tuple[str, ...]:
        """List the addresses of the daemon, the best first."""
        return WaysIn.load(self._folder).own

    def tell_addresses(self, run: str) -> None:
        """Print where others join."""
        for address in self.addresses()[:1]:
            print(f'p2pdiloco: in the run {run}; others join with "{address}"', file=sys.stderr, flush=True)

    def check_run(self, manifest: Manifest, run: str | Path) -> None:
        """Compare the run of a daemon that was found with `run`: a name, an id's beginning, or a run.toml.

        Raises:
            UserError: it is another one; the daemon is left alone.
        """
        found = canonical_bytes(manifest)
        try:
            if isinstance(run, Path):
                told = load_manifest(run)
                fits = found in map(canonical_bytes, (told, begun_by(told, own_peer(self._folder))))
            else:
                ours = [each for each in saved_runs(self._folder).values() if each.signed.manifest == found]
                fits = run == manifest.run.name or any(is_beginning(run, each.id) for each in ours)
            if not fits:
                assert self._process is not None
                raise UserError(
                    f"the daemon of {self._folder} is in the run {manifest.run.name}, which is not {run}",
                    f"end it first (process {self._process.pid}), or give this program another data_dir",
                )
        except UserError:
            self._process = None  # it goes on waiting for its own program
            raise

    def check(self, until: float, error: Exception | None = None) -> None:
        """Look whether the daemon lives, and the run is joined in time.

        Raises:
            UserError: it has ended (its last words, or else `error`), or `until` is over.
        """
        assert self._process is not None
        if not _runs(self._process):
            raise self.broke(error)
        if time.monotonic() >= until:
            raise UserError(
                f"the run could not be joined in time; the daemon said last: {self._last_words()}",
                f"all of it is in {self._folder / LOG}; timeout_s may be larger",
            )

    def broke(self, error: Exception | None) -> UserError:
        """Make the error of a daemon that is ending: its last words, or else what `error` says."""
        if self._process is not None:
            with suppress(psutil.TimeoutExpired):
                self._process.wait(LEAVE_S)
        return UserError(f"the daemon has ended: {self._last_words() or error}", f"see {self._folder / LOG}")

    def _last_words(self) -> str:
        try:
            lines = (self._folder / LOG).read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (said or lines or [""])[-1][:400]

    def terminate(self) -> bool:
        """Tell the daemon to leave. False: there is none any more that this program has to end."""
        if self._process is None:
            return False
        with suppress(psutil.NoSuchProcess):
            self._process.terminate()
        return True

    def end(self, patience_s: float) -> None:
        """Wait for its end, then kill it. Its helpers end by themselves."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(patience_s)
        except psutil.TimeoutExpired:
            with suppress(psutil.NoSuchProcess):
                process.kill()
            process.wait()


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

"""Process p2pd (go-libp2p daemon) of our own: started, watched and ended by us.

The binary comes with hivemind's wheel; hivemind itself is not imported here. p2pd ends by itself when its
last persistent control connection closes, as when our process is killed, and after 30 s without any. Should
one be left nevertheless (stopped, wedged), the next start ends it by its recorded pid.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import os
import shutil
import signal
import stat
import tempfile
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Literal

import psutil

from p2pdiloco.errors import TransportError, UserError
from p2pdiloco.priority import lower_process, patiently
from p2pdiloco.util import Frozen, cancelled

MAX_SOCKET_PATH_BYTES = 100  # sun_path holds 108 bytes on Linux, 104 on macOS
DEFAULT_ENVIRONMENT = {"GOLOG_LOG_LEVEL": "error", "GOMAXPROCS": "1", "GOGC": "400", "GOMEMLIMIT": "192MiB"}
"""Environment of p2pd, unless the person's own has these variables. With more processors Go's scheduler
spends a third more processor time on the same bytes, waking one thread from the other; one carries more than
a Gbit/s. To collect garbage less often saves an eighth; memory that Go manages stays within the limit
nevertheless, as far as it can."""
START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 1.5
RELAY_BUFFER_BYTES = 64 * 1024
"""Bytes of a buffer for each relayed connection, for which p2pd's default is 16 MiB."""
RELAY_DATA_BYTES = 128 * 1024
RELAY_TIME_S = 120
"""Seconds of one relayed connection: enough for a hole to be punched, or for control messages; another
follows. libp2p's own defaults, which p2pd's second relay service (it starts two) has in any case."""
logger = logging.getLogger(__name__)


class P2PDOptions(Frozen, kw_only=True):
    """Options of p2pd beyond its addresses."""

    autonat: bool = True
    """True: tell peers whether they can be dialled from outside. Punch holes."""
    auto_relay: bool = False
    """True: look for a relay when nobody can dial us."""
    relay: bool = True
    """True: be reached, reach others, and let others reach each other through relays. p2pd relays for
    everybody or knows no relays at all; what it relays is bounded (128 KiB and two minutes a connection)."""
    trusted_relays: tuple[str, ...] = ()
    force_reachability: Literal["public", "private"] | None = None
    listen: bool = True
    announce: tuple[str, ...] = ()
    """Multiaddrs to tell others."""
    connections_low: int = 256
    connections_high: int = 512


class P2PDaemon:
    """Supervisor of one p2pd process at a time; `start` may be called again after its death."""

    def __init__(
        self,
        identity_path: Path,
        data_dir: Path,
        options: P2PDOptions | None = None,
    ) -> None:
        self._identity_path = identity_path
        self._listen: list[str] = []
        self.options = options or P2PDOptions()
        """Options of the next start."""
        self._niceness = 0
        self.folder = socket_folder(data_dir)
        self.control_socket = self.folder / "p2pd.sock"
        self._pid_file = self.folder / "p2pd.pid"
        self._client_sockets = 0
        self._process: Process | None = None
        self._output: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of p2pd while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def use(self, options: P2PDOptions) -> None:
        """Start with these options next time."""
        self.options = options

    def new_client_socket(self) -> Path:
        """A path for our own listening socket, never the same one twice: uvloop and hivemind both remove a
        closed socket's path late, when a new one of that name may already be there."""
        self._client_sockets += 1
        return self.folder / f"client{self._client_sockets}.sock"

    async def prepare(self) -> None:
        """Make the private folder of the sockets, and clear away what a killed predecessor left in it.

        Raises: UserError (the folder belongs to somebody else or cannot be made).
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                raise UserError(f"{self.folder} belongs to another user.", "Remove it, or set TMPDIR.")
            self.folder.chmod(0o700)
            await asyncio.to_thread(self._kill_leftover)
            for path in (*self.folder.glob("*.sock"), self._pid_file):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"The folder {self.folder} for sockets cannot be used: {error.strerror}.",
                "Check its owner and permissions.",
            ) from error

    async def start(self, listen: Sequence[str], timeout_s: float = START_TIMEOUT_S) -> None:
        """Start p2pd and wait until it listens on multiaddrs with explicit ports
        (`adapters.multiaddrs.claim_ports`).

        Raises: UserError (cannot listen, no usable binary), TransportError (did not come up).
        """
        self._listen = list(listen)
        await self.prepare()
        environment = {**DEFAULT_ENVIRONMENT, **os.environ, "GOLOG_LOG_FMT": "json"}
        try:
            self._process = await asyncio.create_subprocess_exec(
                binary_path(),
                *self._flags(),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C at the terminal is ours to handle, not p2pd's
            )
        except OSError as error:
            raise UserError(
                f"p2pd, the libp2p daemon of hivemind, cannot be run: {error.strerror}.",
                "Reinstall hivemind for this platform: pip install --force-reinstall hivemind",
            ) from error
        self._pid_file.write_text(str(self._process.pid))
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._output = asyncio.create_task(self._read_output(self._process, ready))
        try:
            async with asyncio.timeout(timeout_s):
                await ready
        except TimeoutError:
            await self.stop()
            raise TransportError(f"p2pd did not start within {timeout_s:g} s") from None
        except BaseException:
            await self.stop()
            raise
        await self.step_back(self._niceness)

    async def step_back(self, niceness: int) -> None:
        """Let p2pd go behind others on this machine (0 to 19), from now on and after every start."""
        self._niceness = niceness
        if niceness and self.pid is not None:
            await patiently(lower_process, self.pid, niceness)

    async def wait_dead(self) -> int:
        """Wait for the process to end; returns its exit status."""
        return await self._process.wait() if self._process is not None else 0

    async def stop(self) -> None:
        """End p2pd and remove everything it left. Under 3 s."""
        await self.end()
        if self._output is not None:
            await cancelled([self._output])
            self._output = None
        self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    async def end(self) -> None:
        """End the process, and nothing else: whoever waits for its death deals with that."""
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    def _flags(self) -> list[str]:
        options = self.options
        flags = [
            f"-listen=/unix{self.control_socket}",
            f"-id={self._identity_path}",
            "-dhtServer=1",  # libp2p's own DHT: finds addresses of peers by id
            "-idleTimeout=30s",
            f"-autonat={int(options.autonat)}",
            f"-relay={int(options.relay)}",
            f"-autoRelay={int(options.auto_relay)}",
            f"-relayService={int(options.relay)}",
            f"-relayBufferSize={RELAY_BUFFER_BYTES}",
            f"-relayDataLimit={RELAY_DATA_BYTES}",
            f"-relayTimeLimit={RELAY_TIME_S}s",
            "-connManager=1",
            f"-connLo={options.connections_low}",
            f"-connHi={options.connections_high}",
        ]
        if options.listen:
            flags.append(f"-hostAddrs={','.join(self._listen)}")
        else:
            flags.append("-noListenAddrs=1")
        if options.announce:
            flags.append(f"-announceAddrs={','.join(options.announce)}")
        if options.trusted_relays:
            flags.append(f"-trustedRelays={','.join(options.trusted_relays)}")
            # Otherwise p2pd looks around for others for minutes before it asks one of these.
            flags.append("-relayDiscovery=0")
        if options.force_reachability is not None:
            flags.append(f"-forceReachability{options.force_reachability.capitalize()}=1")
        return flags

    async def _read_output(self, process: Process, ready: asyncio.Future[None]) -> None:
        assert process.stdout is not None
        last = ""
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line beyond the reader's limit: dropped
                continue
            if not line:
                break
            last = line.decode(errors="replace").rstrip()
            logger.debug("p2pd: %s", last)
            if last.startswith("Peer ID:") and not ready.done():
                ready.set_result(None)
        if not ready.done():
            ready.set_exception(self._start_failure(last))

    def _start_failure(self, last: str) -> Exception:
        if "failed to listen" in last:
            addresses = ", ".join(self._listen)
            return UserError(
                f"Cannot listen on {addresses}: {last[-200:]}.", "Choose another address or port."
            )
        return TransportError(f"p2pd ended while starting: {last[-200:] or 'without a word'}")

    def _kill_leftover(self) -> None:
        """Kill the p2pd of a killed predecessor, if it is still there and really is ours."""
        try:
            pid = int(self._pid_file.read_text())
            process = psutil.Process(pid)
            ours = any(str(self.control_socket) in word for word in process.cmdline())
        except (OSError, ValueError, psutil.Error):
            return
        if ours and pid != self.pid:
            process.send_signal(signal.SIGKILL)
            psutil.wait_procs([process], 3)


def socket_folder(data_dir: Path) -> Path:
    """Find the folder for the sockets of this data folder's node: `run` in it, or, when that path is too
    long, one in the folder for temporary files, or in /tmp when that is too long as well."""
    digest = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:16]
    name = f"p2pdiloco-{os.getuid()}-{digest}"
    for folder in (data_dir.absolute() / "run", Path(tempfile.gettempdir()) / name):
        if len(os.fsencode(folder / "client99999.sock")) <= MAX_SOCKET_PATH_BYTES:
            return folder
    return Path("/tmp") / name


def binary_path() -> str:
    """Path of the p2pd binary in the installed hivemind. Raises: UserError."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.origin is None:
        raise UserError("hivemind is not installed.", "pip install hivemind")
    return str(Path(spec.origin).parent / "hivemind_cli" / "p2pd")

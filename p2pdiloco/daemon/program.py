"""Process of a node or bootstrap: signals, a bug's end, the transport, what is printed first.

`tell_ready` and those after it speak to the service manager that started this process (sd_notify(3)). It
listens at a socket that it names in the environment; without one nothing is said. A datagram is all of the
protocol, so there is no library for it. Nothing there waits or fails: a manager that does not read is told
nothing.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvloop
from msgspec.structs import replace

from p2pdiloco.adapters.data_dir import DataDir
from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.adapters.flow import Limits
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.adapters.multiaddrs import tcp_of
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.config.settings import BootstrapSettings, LogStyle, NodeSettings, rates
from p2pdiloco.config.values import has_home, is_loopback, is_public, those_known
from p2pdiloco.daemon.budgets import is_working
from p2pdiloco.daemon.display import logs
from p2pdiloco.daemon.display.logs import Style, configure_logging, resolve_style
from p2pdiloco.daemon.network.discovery import listen_again, refuse_beside_a_twin
from p2pdiloco.daemon.notice import Invite
from p2pdiloco.daemon.run_files.known_runs import PublishedRun, WaysIn, link_of, note_ways
from p2pdiloco.errors import ConfigError, InvariantViolation, UserError, clean
from p2pdiloco.identity import Identity
from p2pdiloco.ports import TransportHandlers
from p2pdiloco.util import T, Values, loop_s

logger = logging.getLogger("p2pdiloco")
HURRIED, BROKEN = 130, 70


def peers_to_join(settings: NodeSettings | BootstrapSettings, may_fail: bool) -> tuple[str, ...]:
    """List the peers to join through, those behind names too (`adapters.dns`). What is wrong with a name is a
    line of the log."""
    _begin_log(settings.log)
    return peers_behind(settings.join, may_fail)


def run_program(body: Callable[[asyncio.Event], Coroutine[Any, Any, None]], log: LogStyle) -> int:
    """Run the body in an event loop; its event is set when it is to stop. Returns the exit status."""
    _begin_log(log)
    umask = os.umask(0o077)  # what we and our processes write is this user's, unless it is for others

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        asked = 0

        def on_signal() -> None:
            nonlocal asked
            asked += 1
            tell_stopping()
            if asked > 1:
                # The person means it. p2pd and learner end by themselves when we are gone.
                if plain(log) == "json":
                    logger.warning("stopped at once")
                else:
                    sys.stderr.write("stopped at once\n")
                logs.end_at_once(HURRIED)
            stop.set()

        def on_hangup() -> None:
            # Shell and kernel both send it when a terminal closes: a second one means nothing.
            # What is written there from now on is lost.
            tell_stopping()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else it is nohup's wish to go on
            loop.add_signal_handler(signal.SIGHUP, on_hangup)
        loop.set_exception_handler(_fail_loudly)
        alive = asyncio.create_task(keep_alive())
        try:
            await body(stop)
        finally:
            alive.cancel()

    try:
        uvloop.run(main())
    finally:
        os.umask(umask)
    # All is saved and said. Without this, Python looks once more at all that torch made: most of a second
    # of a processor, several where it is busy, in which nobody would end a node that hangs.
    gc.freeze()
    if is_working():
        logs.end_at_once(0)
    return 0


def _begin_log(log: LogStyle) -> None:
    logs.install()
    configure_logging(plain(log))


def plain(log: LogStyle) -> Style:
    """Choose how to log while there is no live view: a person at a terminal must see what is waited for."""
    style = resolve_style(log)
    return "text" if style == "tui" else style


def _fail_loudly(loop: asyncio.AbstractEventLoop, context: Values) -> None:
    """End the daemon for a bug of ours in a callback (a service manager starts it again); log the rest.

    hivemind's tasks complain here about closed connections.
    """
    error = context.get("exception")
    if context.get("bug") or isinstance(error, InvariantViolation) or _is_ours(error):
        loop.default_exception_handler(context)
        logs.end_at_once(BROKEN)
    logger.debug("event loop: %s", context.get("message"), exc_info=context.get("exception"))


def _is_ours(error: BaseException | None) -> bool:
    """Tell whether an error that nobody handled comes out of this package, and is not the network's."""
    if error is None or isinstance(error, asyncio.CancelledError | OSError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[1])
    return any(
        f.filename.startswith(package) and not f.filename.endswith("hivemind_binding.py") for f in frames
    )


async def transport_of(
    settings: NodeSettings | BootstrapSettings, identity: Identity, options: P2PDOptions
) -> HivemindTransport:
    """Make the transport of a program with these settings; not started."""
    ways = WaysIn.load(settings.data_dir)
    return HivemindTransport(
        identity,
        settings.data_dir / "identity.key",
        settings.data_dir,
        listen=await listen_again(ways.port, settings.listen),
        initial_peers=settings.join,
        options=replace(options, announce=tuple(settings.announce)),
        limits=Limits.of(*rates(settings), loop_s),
        remembered=ways.members,
    )


async def begin(
    transport: HivemindTransport,
    handlers: TransportHandlers,
    settings: NodeSettings | BootstrapSettings,
    may_be_alone: bool = False,
) -> None:
    """Start the transport, and keep its port for the next start. `may_be_alone`: as `Meeting.join_initial`.

    Raises:
        UserError: as `HivemindTransport.start`; or another process has this identity.
    """
    own = [address for address in settings.join if address.endswith(f"/p2p/{transport.peer_id}")]
    await refuse_beside_a_twin(transport, [*own, *WaysIn.load(settings.data_dir).own])
    await transport.start(handlers, may_be_alone)
    await asyncio.to_thread(note_ways, settings.data_dir, WaysIn.listening, transport.listening)


def data_folder(settings: NodeSettings | BootstrapSettings) -> DataDir:
    """Name the folder of such a program's data. Those above it are made where nobody named it.

    A user without a home has one there: libraries keep what they fetched or compiled in it.
    """
    folder = settings.data_dir
    is_usual = folder in those_known([type(settings)().data_dir])
    if not has_home():
        os.environ.update(HOME=str(folder.absolute()))
    return DataDir(folder, parents=is_usual)


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Do the work; return its result, or None if we were told to stop first."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task.result()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return None


def print_addresses(addresses: list[str], role: str) -> None:
    """Print hivemind's familiar line on stdout, for people and scripts. Raises: UserError (no address)."""
    if not addresses:
        raise UserError(
            "there is no address on which others could reach this peer", "give --announce ADDRESS"
        )
    visible = " ".join(addresses)
    print(
        f"Running a DHT instance. To connect other peers to this one, use --initial_peers {visible}",
        flush=True,
    )
    ready = {"role": role, "addresses": len(addresses), "address": addresses[0]}
    logger.info("%(role)s ready; addresses: %(addresses)d", ready)
    tell_ready()
    if all(map(is_loopback, addresses)):
        logger.warning(
            "this peer listens on the loopback only, so it cannot be reached from other machines: "
            "--listen /ip4/0.0.0.0/tcp/31337 does, or --announce names the address that is forwarded to it"
        )


def print_join(
    addresses: Sequence[str], runs: Sequence[PublishedRun], invites: Mapping[str, Invite] | None = None
) -> None:
    """Print the ready-made commands for others on stdout, two for each of these runs: by address and id, and
    by link.

    The id makes it sure: by its name, or by nothing, a stranger may list another run beside it. `invites`:
    those that go into the links, by run.
    """
    ways = " --join ".join(_of_each_family(addresses))
    for line in [f" --run {run.id}" for run in runs] or [""]:
        print(f"p2pdiloco node --join {ways}{line}", flush=True)
    for run in runs:
        try:
            print(f"p2pdiloco node {link_of(run, addresses, (invites or {}).get(run.id))}", flush=True)
        except ConfigError as error:  # such as a name of 200 letters: who joins by address can
            logger.warning("there is no link to run %s: %s", run.name, error)


def _of_each_family(addresses: Sequence[str]) -> Sequence[str]:
    """Choose the first address, and beside one of IPv4 or of the IPv6 Internet the first of the other."""
    best = {a[:5]: a for a in reversed(addresses) if tcp_of(a) and (is_public(a) or a.startswith("/ip4/"))}
    return sorted(best.values(), key=addresses.index) if addresses[0] in best.values() else addresses[:1]


SOCKET, WATCHDOG, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
MAX_STATUS = 500


def tell_ready() -> None:
    """Say that others can reach this peer."""
    _tell("READY=1")


def tell_status(words: str) -> None:
    """Say in one line what this process does; `systemctl status` shows it."""
    _tell(f"STATUS={clean(words)[:MAX_STATUS]}")


def tell_stopping() -> None:
    """Say that the end has begun."""
    _tell("STOPPING=1\nSTATUS=leaving: finishing what is in flight, saving")


async def keep_alive() -> None:
    """Say, for ever, that the event loop turns, twice as often as is asked for; return if it is not."""
    period_s = watchdog_s() / 2
    while period_s:
        _tell("WATCHDOG=1")
        await asyncio.sleep(period_s)


def watchdog_s() -> float:
    """Seconds within which the service manager wants to hear of this process; 0: it does not."""
    try:
        is_ours = int(os.environ.get(WATCHDOG_PID) or os.getpid()) == os.getpid()
        return int(os.environ[WATCHDOG]) / 1e6 if is_ours else 0.0
    except (KeyError, ValueError):
        return 0.0


def _tell(message: str) -> None:
    path = os.environ.get(SOCKET, "")
    if not path.startswith(("/", "@")):
        return
    address = "\0" + path[1:] if path[0] == "@" else path
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(message.encode(errors="replace"), address)

"""The long-running programs: `p2pdiloco node` and `p2pdiloco bootstrap`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from p2pdiloco.adapters.data_dir import DataDir
from p2pdiloco.adapters.flow import Limits
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.config.manifest import DataSection
from p2pdiloco.config.settings import BootstrapSettings, LogStyle, NodeSettings, rates
from p2pdiloco.config.signing import load_signed, run_id
from p2pdiloco.core.config import Timing
from p2pdiloco.daemon.frontdoor import FrontDoor
from p2pdiloco.daemon.initial import given_on_disk
from p2pdiloco.daemon.live import LiveView
from p2pdiloco.daemon.logs import RecentLines, Style, configure_logging, resolve_style
from p2pdiloco.daemon.member import Member
from p2pdiloco.daemon.peers_file import load_peers
from p2pdiloco.daemon.presence import publish_runs
from p2pdiloco.daemon.reach import DialBack, Reachability
from p2pdiloco.daemon.runs import Run, find_run, open_run, save_run, sign_run
from p2pdiloco.daemon.view import log_line
from p2pdiloco.errors import ConfigError, InvariantViolation, RemoteError, StorageError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.learner.device import check_device
from p2pdiloco.tensors.vault import Vault

T = TypeVar("T")
logger = logging.getLogger("p2pdiloco")
LINE_EVERY_S = 10.0
VIEW_EVERY_S = 0.5
HURRIED, BROKEN, UNFINISHED = 130, 70, 75
LEAVE_AT_MOST_S = 6.5
"""And as long as the learner's end may take: of a model of some millions of parameters 10 s in all."""


def run_node(settings: NodeSettings) -> int:
    """Run a node until it is told to stop. Returns the exit status."""
    return _run(lambda stop: _node(settings, stop), settings.log)


def run_bootstrap(settings: BootstrapSettings) -> int:
    """Run a bootstrap peer until it is told to stop. Returns the exit status."""
    return _run(lambda stop: _bootstrap(settings, stop), settings.log)


def _run(body: Callable[[asyncio.Event], Coroutine[Any, Any, None]], log: LogStyle) -> int:
    configure_logging(_plain(log))
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        asked = 0

        def on_signal() -> None:
            nonlocal asked
            asked += 1
            if asked > 1:
                # The person means it. p2pd and learner end by themselves when we are gone.
                with contextlib.suppress(OSError):  # a terminal may be gone
                    sys.stderr.write("stopped at once\n")
                os._exit(HURRIED)
            stop.set()

        def on_hangup() -> None:
            # Shell and kernel both send it when a terminal closes: a second one means nothing.
            silence(terminals)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else it is nohup's wish to go on
            loop.add_signal_handler(signal.SIGHUP, on_hangup)
        loop.set_exception_handler(_fail_loudly)
        await body(stop)

    uvloop.run(main())
    return 0


def silence(terminals: Sequence[int]) -> None:
    """Send what is written to those of these descriptors whose terminal is closed to nowhere: every write
    would fail, and leaving has more to do than that."""
    for descriptor in terminals:
        if not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _plain(log: LogStyle) -> Style:
    """How to log while there is no live view: a person at a terminal must see what is waited for."""
    style = resolve_style(log)
    return "text" if style == "tui" else style


def _fail_loudly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A bug of ours in a callback ends the daemon (a service manager starts it again); the rest is logged:
    hivemind's tasks complain here about closed connections."""
    error = context.get("exception")
    if context.get("bug") or isinstance(error, InvariantViolation) or _is_ours(error):
        loop.default_exception_handler(context)
        os._exit(BROKEN)
    logger.debug("event loop: %s", context.get("message"), exc_info=context.get("exception"))


def _is_ours(error: BaseException | None) -> bool:
    """Whether an error that nobody handled comes out of this package, and is not the network's."""
    if error is None or isinstance(error, asyncio.CancelledError | OSError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[1])
    return any(f.filename.startswith(package) and "hivemind_binding" not in f.filename for f in frames)


# --- node --------------------------------------------------------------------------------------------


async def _node(settings: NodeSettings, stop: asyncio.Event) -> None:
    folder = DataDir(settings.data_dir, parents=settings.data_dir == _default_dir(NodeSettings))
    with folder:
        identity = Identity.load_or_create(settings.data_dir / "identity.key")
        recent = RecentLines()
        configure_logging(_plain(settings.log), recent=recent)
        if settings.learner_socket is None:  # a learner would say it, when all others have been found
            check_device(settings.device)
        prepared = _own_run(settings)
        wish = settings.reachability
        force = None if wish == "auto" else wish
        options = P2PDOptions(relay=settings.relay, force_reachability=force)
        transport = _transport(settings, identity, options)
        door, reach = FrontDoor(), Reachability(transport, wish)
        door.dial_back = DialBack(transport)
        await _unless_stopped(transport.start(door), stop)
        await _unless_stopped(reach.check(), stop)
        if stop.is_set():
            await transport.close()
            return
        try:
            print_addresses(transport.addresses(), "node")
            found = prepared or await _unless_stopped(
                find_run(transport, identity, settings.run, settings.data_dir, logger.info), stop
            )
            if found is not None:
                await _membership(settings, identity, transport, door, recent, found, reach, stop)
        finally:
            await transport.close()


async def _membership(
    settings: NodeSettings,
    identity: Identity,
    transport: HivemindTransport,
    door: FrontDoor,
    recent: RecentLines,
    found: tuple[Run, Vault],
    reach: Reachability,
    stop: asyncio.Event,
) -> None:
    run, vault = found
    _check_data(settings, run.manifest.data)
    logger.info("run %s (%s), node %s", run.name, run.id[:12], identity.peer_id)
    for doubt in run.doubts():
        logger.warning("%s", doubt)
    member = Member(run, vault, identity, transport, door, settings, recent, Timing(), reach)
    listing = asyncio.create_task(publish_runs(transport, door.runs))
    showing = asyncio.create_task(_show(member, settings, recent))
    training = asyncio.create_task(member.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({training, stopping, showing, listing}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            logger.info("leaving: finishing what is in flight, saving")
            asyncio.get_running_loop().call_later(LEAVE_AT_MOST_S + member.ends_in_s, _leave_unfinished)
            training.cancel()
            await member.leave()
    finally:
        for task in (stopping, listing, training, showing):
            task.cancel()
        results = await asyncio.gather(training, listing, showing, return_exceptions=True)
        await member.close()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


def _leave_unfinished() -> None:
    logger.error("leaving takes too long: ending now; what was saved before stays")
    os._exit(UNFINISHED)


async def _show(member: Member, settings: NodeSettings, recent: RecentLines) -> None:
    """Live view on a terminal, a plain line now and then elsewhere."""
    loop = asyncio.get_running_loop()
    if resolve_style(settings.log) != "tui":
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            logger.info("%s", log_line(member.report.snapshot(loop.time())))
    configure_logging("tui", recent=recent)
    view = LiveView()
    view.start()
    try:
        while True:
            view.update(member.report.snapshot(loop.time()))
            await asyncio.sleep(VIEW_EVERY_S)
    finally:
        view.update(member.report.snapshot(loop.time()))
        view.stop()
        configure_logging("text", recent=recent)


def _own_run(settings: NodeSettings) -> tuple[Run, Vault] | None:
    """The run that this node owns and starts, from --run-file."""
    if settings.run_file is None:
        return None
    owner = Identity.load_or_create(settings.data_dir / "owner.key")
    prepared = sign_run(settings.run_file, owner)
    _check_data(settings, prepared[0].manifest.data)
    return prepared


def _check_data(settings: NodeSettings, section: DataSection) -> None:
    """Raises: UserError (a learner would not find what it trains on: said before one is started)."""
    if settings.learner_socket is not None:
        return  # the program has its own
    if settings.data is None and section.is_each_nodes_own:
        raise UserError("this run trains on each node's own data, and none are given", "add --data PATH")
    if settings.data is not None and not settings.data.exists():
        raise UserError(f"the data path {settings.data} does not exist", "check --data")


# --- bootstrap ---------------------------------------------------------------------------------------


async def _bootstrap(settings: BootstrapSettings, stop: asyncio.Event) -> None:
    folder = DataDir(settings.data_dir, parents=settings.data_dir == _default_dir(BootstrapSettings))
    with folder:
        identity = Identity.load_or_create(settings.data_dir / "identity.key")
        door = FrontDoor()
        for run in _served_runs(settings, identity):
            door.add_run(run, settings.data_dir)
            logger.info("serving run %s (%s)", run.name, run.id[:12])
        # Its address is well known: it relays from the start, and tells others what it sees of them.
        options = P2PDOptions(relay=settings.relay, force_reachability="public")
        transport = _transport(settings, identity, options)
        door.dial_back = DialBack(transport)
        await _unless_stopped(transport.start(door), stop)
        if stop.is_set():
            await transport.close()
            return
        try:
            print_addresses(transport.addresses(), "bootstrap")
            await _unless_stopped(_serve(transport, door), stop)
        finally:
            await transport.close()


async def _serve(transport: HivemindTransport, door: FrontDoor) -> None:
    async def watch() -> None:
        while True:
            await asyncio.sleep(30)
            logger.info("%d peers are connected", transport.peers_connected())

    async with asyncio.TaskGroup() as group:
        group.create_task(publish_runs(transport, door.runs))
        group.create_task(watch())


def _served_runs(settings: BootstrapSettings, identity: Identity) -> list[Run]:
    """Runs from --run files, signed here unless this owner signed the same before, and saved earlier ones."""
    owner = Identity.load_or_create(settings.data_dir / "owner.key")
    runs: dict[str, Run] = {}
    for path in settings.run:
        run, vault = sign_run(path, owner)
        save_run(settings.data_dir, run, vault)
        for doubt in run.doubts():
            logger.warning("%s: %s", path, doubt)
        runs[run.id] = run
    for path in sorted((settings.data_dir / "runs").glob("*/manifest.signed")):
        signed, manifest = load_signed(path, identity.verify)
        try:
            given = given_on_disk(settings.data_dir, run_id(signed), manifest)
            if manifest.run.initial and given is None:
                logger.warning("%s is not served: its version 0 is not here any more", path)
                continue
            run, _ = open_run(signed, identity, given=given)
        except (RemoteError, ConfigError) as error:
            raise StorageError(f"{path} is not a valid manifest: {error}", "move it away") from error
        runs.setdefault(run.id, run)
    return list(runs.values())


# --- both --------------------------------------------------------------------------------------------


def _transport(
    settings: NodeSettings | BootstrapSettings, identity: Identity, options: P2PDOptions
) -> HivemindTransport:
    return HivemindTransport(
        identity,
        settings.data_dir / "identity.key",
        settings.data_dir,
        listen=settings.listen,
        announce=settings.announce,
        initial_peers=settings.join,
        options=options,
        limits=Limits.of(*rates(settings), asyncio.get_running_loop().time),
        remembered=load_peers(settings.data_dir),
    )


def _default_dir(settings: type[NodeSettings] | type[BootstrapSettings]) -> Path:
    return settings().data_dir.expanduser()


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The work's result; None if we were told to stop first."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return None


def print_addresses(addresses: list[str], role: str) -> None:
    """hivemind's familiar line, and the ready-made command beneath it; on stdout, for people and scripts."""
    if not addresses:
        raise UserError(
            "there is no address on which others could reach this peer", "give --announce ADDRESS"
        )
    visible = " ".join(addresses)
    print(f"Running a DHT instance. To connect other peers to this one, use --initial_peers {visible}")
    print(f"p2pdiloco node --join {addresses[0]}", flush=True)
    logger.info("%s ready, %d addresses", role, len(addresses))

"""Program `p2pdiloco node`: finds its run, is a member of it until told to stop, and leaves."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from p2pdiloco.adapters.data_dir import try_folder
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.config.manifest import DataSection, Manifest
from p2pdiloco.config.presets import begun_by
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.config.values import expanded, parse_web
from p2pdiloco.core.api.config import Timing
from p2pdiloco.daemon.admission import joined_through_before, owns
from p2pdiloco.daemon.budgets import apart
from p2pdiloco.daemon.display.logs import (
    RecentLines,
    ask_terminal,
    at_terminal,
    configure_logging,
    end_at_once,
    resolve_style,
)
from p2pdiloco.daemon.display.terminal import Keys, LiveView, log_fields, log_line, suspend
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.learner_host import try_socket
from p2pdiloco.daemon.member import Approval, Life, Member, OwnPeer
from p2pdiloco.daemon.network.discovery import announce_runs, look_up_again, publish_runs
from p2pdiloco.daemon.network.holes import Holes
from p2pdiloco.daemon.network.reach import DialBack, Reachability
from p2pdiloco.daemon.network.router import Router
from p2pdiloco.daemon.owner.control import NodeControls, owned
from p2pdiloco.daemon.owner.own_member import OwnMember
from p2pdiloco.daemon.program import (
    begin,
    data_folder,
    peers_to_join,
    plain,
    print_addresses,
    print_join,
    run_program,
    tell_status,
    transport_of,
    unless_stopped,
)
from p2pdiloco.daemon.run_files.known_runs import WaysIn, change_ways, goes_on, note_ways, peers_of
from p2pdiloco.daemon.run_files.run import Run, find_run, sign_run
from p2pdiloco.daemon.run_files.served_runs import refuse_to_split, words_of_edits
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity
from p2pdiloco.learner.ranks import check_device
from p2pdiloco.ports import Transport
from p2pdiloco.tasks.registry import load_manifest
from p2pdiloco.tensors.vault import Vault
from p2pdiloco.util import Frozen
from p2pdiloco.web.server import serving
from p2pdiloco.web.sources import NodeSource, StartingSource, Views

logger = logging.getLogger("p2pdiloco")
LINE_EVERY_S = 10.0
VIEW_EVERY_S = 0.5
UNFINISHED = 75
LEAVE_AT_MOST_S = 6.5
"""Time for leaving, beside what the learner's end may take: of a model of some millions of parameters 10 s
in all, where the machine is not starved."""
OWN_TICK_S = 0.05
STARVED = 4.0
"""Factor by which leaving may take longer on a machine whose processors others keep busy."""


def run_node(settings: NodeSettings) -> int:
    """Run a node until it is told to stop. Returns the exit status."""
    may_be_alone = not settings.join or goes_on(settings)
    dialled = replace(settings, join=settings.join or joined_through_before(settings))
    join = peers_to_join(dialled, WaysIn.load(settings.data_dir).lead_back)
    told = _JoinOptions(settings.join, may_be_alone, () if join else dialled.join)
    settings = replace(settings, join=join)
    return run_program(lambda stop: _node(settings, told, stop), settings.log)


class _JoinOptions(Frozen):
    """Options of this start: whom to join through."""

    given: tuple[str, ...]
    """Addresses that were given now; empty: those of the settings are of an earlier start."""
    may_be_alone: bool
    """True: that nobody answers yet is no mistake. Else a person says now whom to join through."""
    unknown: tuple[str, ...]
    """Names of the DNS, where nobody was found behind them yet."""


async def _node(settings: NodeSettings, told: _JoinOptions, stop: asyncio.Event) -> None:
    with data_folder(settings):
        identity = Identity.load_or_create(settings.data_dir / "identity.key")
        try_paths(settings)
        first = StartingSource("node", settings.name, identity.peer_id)
        async with serving(parse_web(settings.web), settings.data_dir, first) as views:
            await _join(settings, told, identity, views, stop)


async def _join(
    settings: NodeSettings, told: _JoinOptions, identity: Identity, views: Views, stop: asyncio.Event
) -> None:
    recent = RecentLines()
    configure_logging(plain(settings.log), recent=recent)
    if settings.learner_socket is None:  # a learner would say it, when all others have been found
        check_device(settings.device)
    asks = at_terminal() and settings.log != "json"
    approval = Approval(replace(settings, join=told.given), _say_of_run, ask_terminal if asks else None)
    file = settings.run_file
    own = _own_manifest(file, settings, identity.peer_id, approval) if file is not None else None
    async with owned(settings, stop) as controls:
        session = _RunSession(identity, approval, recent, views, controls, stop, told)
        run = settings.run
        while True:
            views.enter(StartingSource("node", settings.name, identity.peer_id, controls), controls)
            if await unless_stopped(controls.may_join(), stop) is None or stop.is_set():
                return
            run = await session.once(replace(controls.settings(), run=run), own) or run
            own = None
            if not controls.away.is_set():
                return


@dataclass
class _RunSession:
    """Sessions of this process as a member of its run: mostly one."""

    _identity: Identity
    _approval: Approval
    _recent: RecentLines
    _views: Views
    _controls: NodeControls
    _stop: asyncio.Event
    _told: _JoinOptions

    async def once(self, settings: NodeSettings, own: tuple[Path, Manifest] | None) -> str:
        """Find the run, and be its member until told to stop or to be away. Returns the run's id, if it was
        found. `own`: the run that this node is to start."""
        identity, stop = self._identity, self._stop
        wish = settings.reachability
        force = None if wish == "auto" else wish
        options = P2PDOptions(relay=settings.relay, force_reachability=force)
        transport = await transport_of(settings, identity, options)
        hosts = peers_of(settings.join)
        holes = Holes(transport, frozenset(hosts))
        door, router = FrontDoor(DialBack(transport), holes), Router(transport, settings.port_map)
        reach = Reachability(transport, wish, hosts, router=router)
        peer = OwnPeer(identity, transport, door, reach, router, holes)
        await unless_stopped(begin(transport, door, settings, self._told.may_be_alone), stop)
        await unless_stopped(router.begin(), stop)
        await unless_stopped(reach.check(), stop)
        looking = look_up_again(transport, self._told.unknown)
        try:
            if stop.is_set():
                return ""
            if not settings.join:
                await unless_stopped(router.answer(), stop)  # what is printed leads others here
            print_addresses(transport.addresses(), "node")
            approve, where, begins = self._approval.approve, settings.data_dir, settings.genesis
            await asyncio.to_thread(note_ways, where, WaysIn.reached_at, transport.addresses())
            finding = (
                find_run(transport, identity, settings.run, where, logger.info, hosts, approve, begins)
                if own is None
                else _own_run(settings.data_dir, *own, transport, hosts)
            )
            found = await unless_stopped(finding, stop)
            if found is None:
                return ""
            self._told = replace(self._told, may_be_alone=True)  # after a time away, nobody need be there
            print_join(transport.addresses(), [found[0]])
            await _membership(
                settings, peer, self._recent, found, self._views, self._controls, stop, self._approval
            )
            return found[0].id
        finally:
            looking.cancel()
            await router.end()
            await transport.close()


def _say_of_run(text: str, figures: Mapping[str, object]) -> None:
    logger.info("%s", text, extra={"event": "run", "fields": figures})


async def _membership(
    settings: NodeSettings,
    peer: OwnPeer,
    recent: RecentLines,
    found: tuple[Run, Vault],
    views: Views,
    controls: NodeControls,
    stop: asyncio.Event,
    approval: Approval,
) -> None:
    run, vault = found
    _check_data(settings, run.manifest.data)
    if settings.invite:
        await asyncio.to_thread(change_ways, settings.data_dir, WaysIn.given, settings.invite)
    names = {"run_name": run.name, "run": run.id, "peer": peer.identity.peer_id}
    logger.info("run %(run_name)s (%(run).12s), node %(peer)s", names)
    if owns(settings.data_dir, run.signed.owner):  # nobody else can mend it
        for doubt in run.doubts():
            logger.warning("%s", doubt)
    seats = run.manifest.admission.seats
    if settings.genesis and seats and names["peer"] not in seats:
        words = "this node has no seat at the start of run %(run_name)s: its owner gives it one with "
        logger.warning(f"{words}p2pdiloco seat %(run_name)s %(peer)s", names)
    member = Member(peer, run, vault, settings, recent, Timing())
    await approval.remember(run.id)
    member.report.owned_by(controls)
    controls.attach(OwnMember(member))
    life = Life(member)
    views.enter(NodeSource(member, controls), controls)
    listing = asyncio.create_task(publish_runs(peer.transport, peer.door.runs))
    announcing = asyncio.create_task(announce_runs(peer.transport, peer.door.runs, settings.lan))
    showing = asyncio.create_task(_show(member, settings, recent))
    training = asyncio.create_task(life.run())
    stopping = asyncio.create_task(stop.wait())
    going = asyncio.create_task(controls.away.wait())
    leaving = None
    try:
        ends = {training, stopping, going, showing, listing}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set() or controls.away.is_set():
            logger.info("leaving: finishing what is in flight, saving")
            leaving = asyncio.create_task(_leave_within(OwnTime(LEAVE_AT_MOST_S + life.ends_in_s, stop)))
            training.cancel()
            await life.leave()
    finally:
        for task in (stopping, going, listing, announcing, training, showing):
            task.cancel()
        results = await asyncio.gather(training, listing, announcing, showing, return_exceptions=True)
        await life.close()
        controls.detach()
        if leaving is not None and controls.away.is_set():
            leaving.cancel()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


class OwnTime:
    """Time of ours: on a busy machine everything takes longer, this clock, too, but only so much longer.

    Until somebody waits for our end, that longer time is ours: a learner steps back for others, and one that
    was killed needs the processor to end.
    """

    def __init__(self, limit_s: float, awaited: asyncio.Event) -> None:
        self._left_s, self._at_most_s, self._awaited = limit_s, limit_s * STARVED, awaited

    def is_over(self, passed_s: float) -> bool:
        """Take in that a sleep of `OWN_TICK_S` took so long. True: the limit is reached."""
        if self._awaited.is_set():
            self._left_s -= min(passed_s, OWN_TICK_S)
        self._at_most_s -= passed_s
        return self._left_s <= 0 or self._at_most_s <= 0


async def _leave_within(time: OwnTime) -> None:
    loop, passed_s = asyncio.get_running_loop(), 0.0
    while not time.is_over(passed_s):
        began_s = loop.time()
        await asyncio.sleep(OWN_TICK_S)
        passed_s = loop.time() - began_s
    logger.error("leaving takes too long: ending now; what was saved before stays")
    end_at_once(UNFINISHED)


async def _show(member: Member, settings: NodeSettings, recent: RecentLines) -> None:
    loop = asyncio.get_running_loop()
    if resolve_style(settings.log) != "tui":
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            snapshot = member.report.snapshot(loop.time())
            tell_status(log_line(snapshot))
            logger.info("%s", log_line(snapshot), extra={"event": "progress", "fields": log_fields(snapshot)})
    configure_logging("tui", recent=recent)
    view, keys = LiveView(), Keys()
    view.start()
    keys.start()
    loop.add_signal_handler(signal.SIGTSTP, suspend, view, keys)
    try:
        while True:
            view.update(member.report.snapshot(loop.time()))
            await asyncio.sleep(VIEW_EVERY_S)
            for key in keys.pressed():
                if key == "?":
                    view.explain()
                elif key in "qQ":
                    signal.raise_signal(signal.SIGINT)  # as Ctrl-C does, the second time at once
    finally:
        loop.remove_signal_handler(signal.SIGTSTP)
        keys.stop()
        view.update(member.report.snapshot(loop.time()))
        view.stop()
        configure_logging("text", recent=recent)


def _own_manifest(
    run_file: Path, settings: NodeSettings, me: str, approval: Approval
) -> tuple[Path, Manifest]:
    manifest = begun_by(load_manifest(run_file), me)
    _check_data(settings, manifest.data)
    approval.check(manifest)
    return run_file, manifest


async def _own_run(
    data_dir: Path, run_file: Path, manifest: Manifest, transport: Transport, hosts: Sequence[str]
) -> tuple[Run, Vault]:
    owner = Identity.load_or_create(data_dir / "owner.key")
    await refuse_to_split(transport, hosts, manifest.run.name, owner.peer_id)
    if edits := words_of_edits(manifest, data_dir, owner.peer_id):
        logger.warning("%s: %s", run_file, edits)
    return await apart(partial(sign_run, run_file, owner, manifest))


def try_paths(settings: NodeSettings) -> None:
    """Try the paths of the flags, before hours of work. Raises: UserError, StorageError."""
    if settings.result_dir is not None:
        try_folder(expanded(settings.result_dir, "--result-dir"), "--result-dir")
    if settings.learner_socket is not None:
        try_socket(settings.learner_socket)
    elif settings.data is not None and not settings.data.exists():
        raise UserError(f"the data path {settings.data} does not exist", "check --data")


def _check_data(settings: NodeSettings, section: DataSection) -> None:
    """Check the data path. Raises: UserError (a learner would not find what it trains on: said before it
    starts)."""
    # A program has its own.
    if settings.learner_socket is None and settings.data is None and section.is_each_nodes_own:
        raise UserError("this run trains on each node's own data, and none are given", "add --data PATH")

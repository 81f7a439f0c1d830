"""Discovery: how nodes are found, and find others, by records on the DHT, the local network, and names of the
DNS.

`Presence` keeps our record and looks at the others' (`Names` by which they call themselves); `publish_runs`
keeps the list of runs; `Sharing` exchanges who reads which part of the data. `ask` and `ask_status` put
questions to members. `Twins` detects a second process with this node's identity.

Rules: docs/protocol/links.md, sections 8 and 10.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from msgspec.structs import replace

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.adapters.dials import Attempts, NotNow
from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.adapters.endpoint import report_bug
from p2pdiloco.adapters.multiaddrs import LAN_RUN_DIGITS, Announcer, Nearby, check_lan, look_nearby
from p2pdiloco.config.settings import ANY_ADDRESS, RUN_ID, NodeSettings
from p2pdiloco.config.values import peer_in
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.types import Reach, Wire
from p2pdiloco.core.api.versions import MemberList
from p2pdiloco.core.base import Shared
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import apart
from p2pdiloco.daemon.display.logs import at_terminal
from p2pdiloco.daemon.display.snapshot import StatusReport, counted, decode_status
from p2pdiloco.daemon.run_files.known_runs import WaysIn
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError, UserError
from p2pdiloco.learner.channel import DataShare, Status
from p2pdiloco.ports import PostEvent, Transport
from p2pdiloco.release import WIRE_VERSION
from p2pdiloco.util import BoundedDict, Now, Rests, Say, loop_s

if TYPE_CHECKING:
    from p2pdiloco.daemon.admission import Introductions
    from p2pdiloco.daemon.course import Measurements


logger = logging.getLogger(__name__)

MAX_NAMED = 4096
"""Number of peers that are remembered by name; the one unseen for longest is forgotten first."""
LATELY_S = 86_400.0


class Names(BoundedDict[str, str]):
    """Names by which peers called themselves last, and who was called so lately: an owner may mean one by
    a name."""

    def __init__(self, now: Now = time.monotonic) -> None:
        self._now = now
        self._seen: BoundedDict[tuple[str, str], float] = BoundedDict(MAX_NAMED)
        """Time at which a peer was seen with a name last."""
        super().__init__(MAX_NAMED)

    def __setitem__(self, peer: str, name: str) -> None:
        super().__setitem__(peer, name)
        self._seen[name, peer] = self._now()

    def lately(self, name: str) -> tuple[str, ...]:
        """List the peers that were called so lately, those seen last first."""
        now = self._now()
        seen = ((when_s, peer) for (called, peer), when_s in self._seen.items() if called == name)
        return tuple(peer for when_s, peer in sorted(seen, reverse=True) if now - when_s < LATELY_S)


LIFETIME_S = 45.0
REFRESH_S = 12.0
LOOK_S = 3.0
LOOK_FAST_S = 1.0
CALMER, CALMEST = 1.25, 3.0
"""Factor by which each pause is longer than the last while the same members are listed, up to so many times
`LOOK_S`.

Looks every 3 s were a third of what a node of four sends while no round is under way. Newcomers dial.
"""
MAX_ADDRESSES = 8
MAX_DIALS = 16
UNKNOWN_DIALS, UNKNOWN_DIALS_S = 32, 12.0
"""Authors that we never met who are dialled in so much time: anybody may write a record, and name any
address."""
DIAL_PATIENCE_S = 1.5
REDIAL_HIDDEN_S = 30.0
REST_S, MOST_REST_S = 6.0, 120.0
"""Time for which an author who could not be dialled is left alone, doubled at every failure in a row up to
the second: records of generated keys name anything."""


@dataclass
class OurRecord:
    """Presence record of our own, made of what others know of us."""

    incarnation: int
    _name: str
    _shared: Shared
    _measurements: Measurements
    _keeps_history: bool = False

    @property
    def news(self) -> asyncio.Event:
        """Event that is set when there is something new to say."""
        return self._measurements.news

    def heard(self, peer: str, heldout: wire.HeldoutLoss) -> None:
        """Take in a held-out loss from another's record."""
        self._measurements.heard(peer, heldout)

    def with_addresses(self, addresses: Sequence[str]) -> wire.Presence:
        """Make the record as it is now."""
        return wire.Presence(
            WIRE_VERSION,
            self.incarnation,
            self._name,
            tuple(addresses[:MAX_ADDRESSES]),
            self._shared.reach is Reach.DIRECT,
            self._measurements.own,
            self._keeps_history,
        )


class Presence:
    """Presence records of one run: ours, and the others'."""

    def __init__(
        self,
        transport: Transport,
        run: str,
        ours: OurRecord,
        post: PostEvent,
        keep: Callable[[Sequence[Sequence[str]]], None] = lambda _: None,
        dial_at_once: int = MAX_NAMED,
        guests: Introductions | None = None,
        has_worked: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`keep` is told the addresses of the peers met so far whenever they change. `dial_at_once`:
        number of listed peers that are dialled unasked; of the others the transport only learns the
        addresses. `guests`: who is admitted to the run; None: everybody. `has_worked`: who counts by the
        chain; the core is told of others when there is a connection to them."""
        self._transport = transport
        self._run = run
        self._ours = ours
        self._post = post
        self._keep = keep
        self._dial_at_once = dial_at_once
        self._guests = guests
        self._has_worked = has_worked
        self._attempts = Attempts(UNKNOWN_DIALS, UNKNOWN_DIALS_S)
        self._tried: BoundedDict[str, float] = BoundedDict(MAX_NAMED)
        """Time at which each was dialled last; who waited longest comes first."""
        self._rests: Rests[str] = Rests(REST_S, MOST_REST_S)
        """Rests of those that could not be dialled."""
        self._ours_seen: wire.Presence | None = None
        self._redial: dict[str, float] = {}
        """Time of the next attempt by peers that said they cannot be dialled."""
        self._twins = Twins(ours.incarnation, LIFETIME_S)
        self._connected: BoundedDict[str, tuple[str, ...]] = BoundedDict(MAX_NAMED)
        self._strangers: set[str] = set()
        self._roster = MemberList(())
        """List of those who are reached: one object as long as it is true, since what follows is worked out
        once."""
        self._dials: dict[str, asyncio.Task[None]] = {}
        self.names = Names()
        self.hidden: set[str] = set()
        """Listed peers that cannot be dialled."""

    async def publish(self) -> None:
        """Keep our record on the DHT, for ever."""
        key = wire.members_key(self._run)
        while True:
            record = self._ours.with_addresses(self._transport.addresses())
            news = self._ours.news
            news.clear()
            await self._transport.put_record(key, wire.encode(record), LIFETIME_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await news.wait()

    async def watch(self, settled: Callable[[], bool]) -> None:
        """Look for ever who is there; more often until we are settled, and after every change."""
        calm, roster = 1.0, self._roster
        try:
            while True:
                await self.look()
                calm = min(CALMEST, CALMER * calm) if settled() and self._roster is roster else 1.0
                roster = self._roster
                await asyncio.sleep(calm * LOOK_S if settled() else LOOK_FAST_S)
        finally:
            for dial in self._dials.values():
                dial.cancel()

    async def look(self) -> None:
        """Look once: tell the core, and dial whom we do not know yet. A dead member's record delays nobody.

        Raises:
            UserError: another process has taken our identity over.
        """
        records = await self._records()
        others: list[tuple[str, tuple[str, ...]]] = []
        hidden: set[str] = set()
        for peer, record in records.items():
            if not record.dialable:
                hidden.add(peer)
            if not self._rests.rests(peer) and (record.dialable or self._worth_a_try(peer)):
                others.append((peer, record.addresses))
        self.hidden = set(filter(self._admits, hidden))
        others.sort(key=lambda other: self._tried.get(other[0], 0.0))
        self._meet([other for other in others if self._admits(other[0])])
        for peer, addresses in others:
            if not self._admits(peer) and self._connected.get(peer) != addresses:
                self._start_dial(peer, addresses)
        awaited = [dial for peer, dial in self._dials.items() if peer not in hidden]
        if awaited:
            await asyncio.wait(awaited, timeout=DIAL_PATIENCE_S)
        members = self._members(records)
        # Whom we cannot reach yet the core need not try: a failed dial is held against the next ones. Those
        # that nobody can dial come to us.
        # Of a name that nobody who counts has heard of there is nothing to tell: keys cost nothing.
        there = {self._transport.peer_id, *self._connected, *self._transport.connected()}
        reached = tuple(
            sorted(
                (peer, incarnation)
                for peer, incarnation in members
                if (peer not in self._dials or peer in hidden) and (peer in there or self._has_worked(peer))
            )
        )
        news = reached != self._roster.members
        if news:
            self._roster = MemberList(reached)
        self._post(ev.PresenceSeen(self._roster, len(members) - len(reached)))
        if news:  # one write at a time, however many are met at once
            await asyncio.to_thread(self._keep, [*self._connected.values()])

    async def _records(self) -> dict[str, wire.Presence]:
        """Look up the others' records, without those of banned authors and those that we cannot make out."""
        found: dict[str, wire.Presence] = {}
        for peer, value in sorted((await self._transport.get_records(wire.members_key(self._run))).items()):
            if self._guests is not None and self._guests.is_banned(peer):
                continue
            try:
                record = wire.decode(value, wire.Presence)
            except RemoteError as error:
                logger.debug("presence record of %s is not readable: %s", peer, error)
                continue
            if record.wire_version != WIRE_VERSION:
                if peer not in self._strangers and len(self._strangers) < MAX_NAMED:
                    self._strangers.add(peer)
                    logger.warning(
                        "%(peer)s speaks protocol version %(wire_version)d, not %(our_wire_version)d",
                        {
                            "peer": peer,
                            "wire_version": record.wire_version,
                            "our_wire_version": WIRE_VERSION,
                        },
                    )
            elif peer == self._transport.peer_id:
                self._twins.look(record.incarnation, record.name, loop_s())
                self._ours_seen = record
            else:
                found[peer] = record
        return found

    def _members(self, records: dict[str, wire.Presence]) -> list[tuple[str, int]]:
        """List the authors that the run has admitted. Anybody may write a record: of others it only says
        where to dial."""
        members = []
        for peer, record in records.items():
            if not self._admits(peer):
                continue
            members.append((peer, record.incarnation))
            self.names[peer] = record.name
            if record.heldout is not None:
                self._ours.heard(peer, record.heldout)
        if self._ours_seen is not None:
            members.append((self._transport.peer_id, self._ours_seen.incarnation))
            self.names[self._transport.peer_id] = self._ours_seen.name
        return members

    def _admits(self, peer: str) -> bool:
        return self._guests is None or self._guests.admits(peer)

    def _worth_a_try(self, peer: str) -> bool:
        """Tell whether to dial a peer that says it cannot be dialled: now and then.

        It may be our neighbour at home, or be reached through a relay, and then by a hole.
        """
        now = loop_s()
        if peer in self._connected or now < self._redial.get(peer, 0.0):
            return False
        self._redial.pop(peer, None)
        while len(self._redial) >= MAX_NAMED:
            oldest = next(iter(self._redial))
            if self._redial[oldest] > now:
                return False  # more of them than we try in this time
            del self._redial[oldest]
        self._redial[peer] = now + REDIAL_HIDDEN_S
        return True

    def _meet(self, others: list[tuple[str, tuple[str, ...]]]) -> None:
        """Dial some, learn the addresses of the rest.

        Each node has some of its own choice, the same at every look, so that together they know everybody.
        """
        if len(others) > self._dial_at_once:
            others.sort(
                key=lambda other: hashlib.sha256((self._transport.peer_id + other[0]).encode()).digest()
            )
        for place, (peer, addresses) in enumerate(others):
            if self._connected.get(peer) == addresses:
                continue
            if place < self._dial_at_once:
                self._start_dial(peer, addresses)
            else:
                self._transport.learn(peer, addresses)

    def _start_dial(self, peer: str, addresses: tuple[str, ...]) -> None:
        if peer in self._dials or len(self._dials) >= MAX_DIALS:
            return
        now = loop_s()
        if peer in self._connected or self._attempts.take(now):
            self._tried[peer] = now
            self._dials[peer] = asyncio.create_task(self._dial(peer, addresses), name=f"dial-{peer[-6:]}")

    async def _dial(self, peer: str, addresses: tuple[str, ...]) -> None:
        try:
            await self._transport.connect(peer, addresses)
            if self._guests is not None and not self._admits(peer) and await self._guests.meet(peer) is None:
                self._rests.lengthen(peer)  # then it is tried again
                return
            self._rests.pop(peer, None)
            self._connected[peer] = addresses
        except NotNow:
            pass  # it is not the peer's fault
        except PeerUnreachable as error:
            logger.debug("cannot dial %s: %s", peer, error)
            self._rests.lengthen(peer)
        finally:
            del self._dials[peer]


ASK_TIMEOUT_S, STATUS_TIMEOUT_S = 5.0, 3.0
T = TypeVar("T")


async def publish_runs(transport: Transport, runs: Callable[[], Sequence[wire.RunSummary]]) -> None:
    """Keep our list of runs on the DHT, for ever."""
    while True:
        value = wire.encode(wire.RunList(tuple(runs())[: wire.MAX_RUNS]))
        await transport.put_record(wire.RUNS_KEY, value, LIFETIME_S)
        await asyncio.sleep(REFRESH_S)


def _ignored(_peer: str, _why: str) -> None:
    """Tell nobody."""


async def presences(
    transport: Transport, run: str, refused: Callable[[str, str], None] = _ignored
) -> dict[str, wire.Presence]:
    """Peer id -> presence record, of whatever protocol version. `refused` is told of those that cannot be
    read, and why."""
    records = {}
    for peer, value in (await transport.get_records(wire.members_key(run))).items():
        try:
            records[peer] = wire.decode(value, wire.Presence)
        except RemoteError as error:
            refused(peer, f"its presence record is not readable: {error}"[:120])
    return records


async def listed_members(
    transport: Transport, run: str, refused: Callable[[str, str], None] = _ignored
) -> dict[str, tuple[str, ...]]:
    """Peer id -> addresses, of those with a presence record that we understand; newest start first.
    `refused` is told of others, and why."""
    records = await presences(transport, run, refused)
    for peer, record in list(records.items()):
        if record.wire_version != WIRE_VERSION:
            refused(peer, f"speaks protocol version {record.wire_version}, not {WIRE_VERSION}")
            del records[peer]
    newest = sorted(records, key=lambda peer: -records[peer].incarnation)
    return {peer: records[peer].addresses for peer in newest}


async def ask_status(transport: Transport, peer: str, run: str) -> tuple[StatusReport, int]:
    """Ask a member for its report; returns it with its size in bytes.

    Raises: PeerUnreachable, RemoteError (refused, or not a report).
    """
    began = time.monotonic()
    reply = await transport.send(peer, wire.QUERY + wire.encode(wire.StatusQuery(run)), STATUS_TIMEOUT_S)
    report = decode_status(reply)
    if report.run_id != run:
        raise RemoteError("bad-status", "about another run")
    if report.answered_by != peer:
        raise RemoteError("bad-status", "in the name of another")  # one would else be several witnesses
    logger.debug("%s answered in %.3f s", peer, time.monotonic() - began)
    return report, len(reply)


async def ask(transport: Transport, peer: str, query: Wire, answer: type[T]) -> T | None:
    """Ask a peer; None: it does not answer this."""
    try:
        return wire.decode(await transport.send(peer, wire.QUERY + wire.encode(query), ASK_TIMEOUT_S), answer)
    except (TransportError, RemoteError):
        return None


lan_logger = logging.getLogger("p2pdiloco")
LOOK_EVERY_S = 5.0


async def announce_runs(
    transport: Transport, runs: Callable[[], Sequence[wire.RunSummary]], wanted: bool
) -> None:
    """Announce this peer and its runs in the local network until cancelled, if that is wanted (--lan). A
    network that does not let us is said once.

    It tells everybody in the network, of a café too, that this machine takes part in a run, and in which.
    """
    if not wanted:
        return
    announcer = Announcer(transport.peer_id, transport.addresses())
    try:
        while True:
            try:
                await announcer.announce([summary.run for summary in runs()])
            except Exception as error:  # noqa: BLE001 - the library's own errors have no common base
                lan_logger.warning("this node cannot be announced in the local network: %r", error)
                await asyncio.Event().wait()
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        await announcer.close()


def with_nearby(settings: NodeSettings, say: Say) -> NodeSettings:
    """Fill in peers of the local network, with --lan, or where a person at a terminal names nobody to join.

    What is found is a claim of strangers: the manifest says what is true, and without a person at a terminal
    only a run that is named by its id is joined.

    Raises: UserError (the library is not here; several runs are found, or none is named and nobody is asked).
    """
    if settings.lan:
        check_lan()
    if settings.join or settings.genesis or settings.run_file is not None:
        return settings
    if not settings.lan and (not at_terminal() or WaysIn.load(settings.data_dir).lead_back):
        return settings
    if settings.lan and not RUN_ID.fullmatch(settings.run) and (settings.yes or not at_terminal()):
        raise UserError(
            "--lan finds what strangers of this network announce, and nobody is asked whether to join it",
            "name the run by its id: --run ID",
        )
    try:
        found = look_nearby()
    except UserError:
        if settings.lan:
            raise
        return settings  # nobody asked for it
    return _joined(settings, found, say)


def _joined(settings: NodeSettings, found: Sequence[Nearby], say: Say) -> NodeSettings:
    named = RUN_ID.fullmatch(settings.run)
    wanted = settings.run[:LAN_RUN_DIGITS] if named else ""
    fits = [near for near in found if any(run.startswith(wanted) for run in near.runs)]
    runs = sorted({run for near in fits for run in near.runs if run.startswith(wanted)})
    if not fits:
        say("no run was found in this network")
        return settings
    if len(runs) > 1 and not settings.run:
        raise UserError(
            f"there are {len(runs)} runs in this network: {', '.join(runs)}", "choose one: --run ID"
        )
    peers = counted(len(fits), "peer")
    say(f"found in this network: {peers} of {counted(len(runs), 'run')}, {', '.join(runs)}")
    join = tuple(address for near in fits for address in near.addresses)
    return replace(settings, join=join, run=settings.run or runs[0])


PAUSE_S = 30.0


def look_up_again(transport: Transport, names: Sequence[str]) -> asyncio.Task[None]:
    """Start to look these names of the DNS up now and then, and to dial whom they list, until one is reached.
    Returns the task, to be cancelled at the end.

    A machine that starts its services may have no network yet, and the name server may be away for hours.
    """
    task = asyncio.create_task(_look_up(transport, names))
    task.add_done_callback(_report_end)
    return task


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        report_bug("looking up of names", error)


async def _look_up(transport: Transport, names: Sequence[str]) -> None:
    reached = not names
    while not reached:
        await asyncio.sleep(PAUSE_S)
        try:
            found = await apart(partial(peers_behind, names))
        except UserError as error:  # it was logged at the start
            logger.debug("%s", error)
            continue
        others = [address for address in found if peer_in(address) != transport.peer_id]
        dials = (transport.connect(peer_in(address), [address]) for address in others)
        results = await asyncio.gather(*dials, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, TransportError):
                raise result
        reached = not others or None in results
        if reached:
            logger.info("%s: found now", " ".join(names))


HINT = "give each node a --data-dir of its own: a copy of another node's folder is that node"
MIN_TURNS = 3
"""Number of times that another's record has to come in the place of ours, over a record's lifetime at
least."""
STANDS_FOR = 2.0
"""Lifetimes of a record after which another's stands in the place of ours because it is renewed. Of two
clocks that are seconds apart the DHT believes the faster one, and there are no turns."""
FORGOTTEN_AFTER = 20.0
"""Lifetimes after which a turn is forgotten: whoever ran beside us before that may have been gone long
since."""


LOOKS, TWINS_PAUSE_S = 4, 1.0
"""Looks at the start, which all must find it: p2pd of a node that was killed answers for a moment longer."""
ANSWER_S = 1.0


async def refuse_beside_a_twin(transport: Transport, addresses: Sequence[str]) -> None:
    """Look whether our identity answers at one of these addresses already. Only before we listen ourselves.

    They are those where the folder was last, and where it is told to join: a copy of the folder that can
    reach the original ends at once. Else both go on for a while (`Twins`).

    Raises:
        UserError: it does, so another process has it.
    """
    me = transport.peer_id
    places = {place for text in addresses if (place := multiaddrs.endpoint_of(text)) is not None}
    for look in range(LOOKS):
        if look:
            await asyncio.sleep(TWINS_PAUSE_S)
        tries = [transport.answers_at(me, host, port, ANSWER_S) for host, port in sorted(places)]
        answers = await asyncio.gather(*tries)
        places = {place for place, answered in zip(sorted(places), answers, strict=True) if answered}
        if not places:
            return
    host, port = min(places)
    raise UserError(
        f"another node runs with this node's identity, at {host} port {port}: this one ends", HINT
    )


class Twins:
    """Detection of another process with this node's identity, as its data folder was copied, and both run.

    Others take the two for lives of one node. They listen to the one that began last, if to either: the one
    that they do not hear trains alone and cannot know it. Both keep one record on the DHT, in turns, and so
    find out: the earlier one ends, or the one whose record is never seen.
    """

    def __init__(self, incarnation: int, lifetime_s: float) -> None:
        """`lifetime_s`: lifetime of a record that is not renewed. One of an earlier life of ours is gone
        by then."""
        self._incarnation = incarnation
        self._lifetime_s = lifetime_s
        self._ours = False
        """True: the record seen last was ours, so what is there now was written after it."""
        self._turns = 0
        self._first_s = self._last_s = 0.0
        self._stands_since_s: float | None = None

    def look(self, incarnation: int, name: str, now: float) -> None:
        """Judge the record that is there now.

        Raises:
            UserError: another process of this identity is here in our place.
        """
        if incarnation == self._incarnation:
            self._ours, self._stands_since_s = True, None
            return
        called = f"another node{f' ({name})' if name else ''} runs with this node's identity"
        if self._stands_since_s is None:
            self._stands_since_s = now
        if now - self._stands_since_s > STANDS_FOR * self._lifetime_s:
            raise UserError(f"{called}, and others see that one: this one ends", HINT)
        if not self._turn(now):
            return
        if incarnation > self._incarnation:
            raise UserError(f"{called} and began later: this one ends", HINT)
        self._turns = 0
        logger.warning("%s, and ends when it notices; %s", called, HINT)

    def _turn(self, now: float) -> bool:
        """Count another's record, perhaps in the place of ours; return whether it was so often enough."""
        if not self._ours:
            return False
        self._ours = False
        if now - self._last_s > FORGOTTEN_AFTER * self._lifetime_s:
            self._turns = 0
        self._turns += 1
        self._last_s = now
        if self._turns == 1:
            self._first_s = now
        return self._turns >= MIN_TURNS and now - self._first_s >= self._lifetime_s


TRIES, PORT_PAUSE_S = 4, 0.5
"""Attempts to take it: p2pd of a node that was killed has it for a moment longer."""


async def listen_again(port: int, wished: Sequence[str]) -> Sequence[str]:
    """Find out where to listen: as wished, or if any port will do, at the last one, if there is one and it is
    free. 0.0.0.0 is IPv6, too (`multiaddrs.of_both_families`).

    So addresses which people have stay true.
    """
    is_any, wished = tuple(wished) == ANY_ADDRESS, multiaddrs.of_both_families(wished)
    if not is_any or not port:
        return wished
    again = [address.replace("/tcp/0", f"/tcp/{port}") for address in wished]
    for _ in range(TRIES):
        try:
            multiaddrs.claim_ports(again)
            return again
        except UserError:
            await asyncio.sleep(PORT_PAUSE_S)
    logger.warning(
        "port %(port)d, which this peer had, is taken: addresses that others have do not hold any more",
        {"port": port},
    )
    return wished


SHARES_LIFETIME_S = 60.0
RENEW_S = 20.0
FIRST_S, SETTLED_S, SLOWER = 5.0, 20.0, 1.25
"""Pause between two looks at the records, and least pause between two changes of ours: at first, later, and
by what factor it grows each time once our learner is there.

Of four nodes, looking every 5 s for ever cost each of them more than half of what heartbeats do, on a link
that may have 1 Mbit/s. Whoever sees a shard begun 40 s late (20 s until it is told, 20 s until it is looked
up) at worst repeats that much.
"""
AGAIN_S = 1.0
"""First pause before a record that could not be told is told again; it doubles up to the usual pause."""
COMPLAIN_AFTER = 3
"""Failures in a row until a person hears of it."""
NOT_TOLD = "data-shards-not-told"
"""Name of such failures among the refusals of a report."""
LOOK_S_PER_READER = 0.25
LOOK_AT_MOST_S = 60.0
"""Pause between looks for every reader, up to `LOOK_AT_MOST_S`: a look costs about 300 bytes for each."""
MAX_READERS = 2048


class ReadingLearner(Protocol):
    """Learner, as far as it matters here (`daemon.learner_link`)."""

    status: Status | None

    def share_data(self, share: DataShare) -> None:
        """Tell the learner what of its data is begun, and by whom else it is read."""


class Sharing:
    """Exchange of records of who reads which part of the data, which learners must know of each other.

    Every member has a record under the run's key: which data its learner reads, the epoch, and a bit for
    every shard that was begun, by anybody as far as it knows (`learner.samples`). It is renewed when it
    changes, and before it expires; a member that is gone is forgotten with its record. Members that read
    other data are none of our learner's business. Anybody may write a record: in an open run it is read once
    its author has a mark.
    """

    def __init__(
        self,
        transport: Transport,
        run: str,
        learner: ReadingLearner,
        counts: Callable[[str], bool] = lambda _peer: True,
    ) -> None:
        """`counts`: tells whether to listen to a peer; others' records are passed over."""
        self._counts = counts
        self._transport = transport
        self._key = wire.reading_key(run)
        self._learner = learner
        self._told: DataShare | None = None
        self._written: wire.Reading | None = None
        self._renew_s = 0.0
        self._failed = 0
        """Number of times in a row that nobody could be told, though there are others."""
        self.failures = 0
        """Number of all such failures."""

    async def publish(self) -> None:
        """Keep our record on the DHT, for ever."""
        pause_s = FIRST_S
        while True:
            if await self.tell() or not self._failed:
                await asyncio.sleep(pause_s)
                pause_s = self._later_s(pause_s)
            else:
                await asyncio.sleep(min(AGAIN_S * 2 ** min(self._failed - 1, 10), pause_s))

    async def tell(self) -> bool:
        """Renew our record, if there is a reason. False: nobody else has it, and it is to be told again."""
        ours, now = self._ours(), loop_s()
        if ours is None or (ours == self._written and now < self._renew_s):
            return True
        self._written, self._renew_s = ours, now + RENEW_S
        told = await self._transport.put_record(self._key, wire.encode(ours), SHARES_LIFETIME_S)
        if not told:
            self._written = None
        self._count(told)
        return told

    def _count(self, told: bool) -> None:
        if told:
            if self._failed >= COMPLAIN_AFTER:
                logger.info("the others are told again which data this node has begun")
            self._failed = 0
        elif self._transport.peers_connected():  # alone there is nobody to be told
            self._failed += 1
            self.failures += 1
            if self._failed == COMPLAIN_AFTER:
                words = (
                    "which data this node has begun could not be told %(times)d times: others may read it too"
                )
                logger.warning(words, {"times": self._failed})

    async def watch(self) -> None:
        """Look for ever what the others read, and tell the learner."""
        pause_s = FIRST_S
        while True:
            readers = await self.look()
            await asyncio.sleep(min(LOOK_AT_MOST_S, max(pause_s, LOOK_S_PER_READER * readers)))
            pause_s = self._later_s(pause_s)

    def _later_s(self, pause_s: float) -> float:
        """Lengthen the pause once the learner is there: others are to hear soon of one that begins late,
        and it of them."""
        return min(SETTLED_S, SLOWER * pause_s) if self._learner.status is not None else FIRST_S

    async def look(self) -> int:
        """Look once; return how many records there were."""
        records: dict[str, wire.Reading] = {}
        found = sorted((await self._transport.get_records(self._key)).items())
        for peer, value in [pair for pair in found if self._reads(pair[0])][:MAX_READERS]:
            try:
                records[peer] = wire.decode(value, wire.Reading)
            except RemoteError as error:
                logger.debug("what %s says that it reads is not readable: %s", peer, error)
        ours = self._ours()
        # Before our learner has begun we do not know its data: most of the others' is the best guess.
        names = Counter(sorted(record.data for record in records.values()))
        data = ours.data if ours else max(names, key=lambda name: names[name], default="")
        share = agreed(data, self._transport.peer_id, ours, records)
        if share is not None and share != self._told:
            self._told = share
            self._learner.share_data(share)
        return len(records)

    def _reads(self, peer: str) -> bool:
        return peer == self._transport.peer_id or self._counts(peer)

    def _ours(self) -> wire.Reading | None:
        share = self._learner.status.share if self._learner.status else None
        return wire.Reading(share.data, share.epoch, share.taken) if share else None


def agreed(
    data: str, me: str, ours: wire.Reading | None, records: Mapping[str, wire.Reading]
) -> DataShare | None:
    """Work out what to tell the learner of `me`, which says `ours`, from all records. None: nobody reads its
    data.

    A record is no more than its writer's word. A later epoch counts when most of the others are in it, two at
    least; with a single other reader the next one does. Of the shards of our epoch every word counts: whoever
    began one may be the only one that knows.
    """
    bytes_of = {len(ours.taken)} if ours is not None else {len(record.taken) for record in records.values()}
    same = {
        peer: record
        for peer, record in records.items()
        if record.data == data and len(record.taken) in bytes_of
    }
    others = [record for peer, record in same.items() if peer != me]
    known = [*others, ours] if ours is not None else others
    if not known:
        return None
    now = ours.epoch if ours is not None else 0
    reached = sorted((record.epoch for record in others), reverse=True)[len(others) // 2] if others else now
    epoch = max(now, reached if len(others) > 1 else min(reached, now + 1))
    size = max(len(record.taken) for record in known)
    taken = united([bytes(size), *(record.taken for record in known if record.epoch == epoch)])
    return DataShare(data, epoch, taken, tuple(same))


def united(sets: list[bytes]) -> bytes:
    """Unite sets of bits of the same length (others are left out): the bits that are in any."""
    length = max(map(len, sets), default=0)
    bits = 0
    for one in sets:
        bits |= int.from_bytes(one, "big") if len(one) == length else 0
    return bits.to_bytes(length, "big")

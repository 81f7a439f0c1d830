"""Presence records and the list of runs on the DHT: how nodes are found, and find others.

Rules: docs/protocol/membership.md, section 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.types import Reach
from p2pdiloco.core.api.versions import Roster
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.finding.attempts import Attempts
from p2pdiloco.daemon.finding.names import MAX_NAMED, Names
from p2pdiloco.daemon.finding.twins import Twins
from p2pdiloco.errors import PeerUnreachable, RemoteError
from p2pdiloco.ports import Transport
from p2pdiloco.release import WIRE_VERSION
from p2pdiloco.util import BoundedDict

logger = logging.getLogger(__name__)
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


async def publish_runs(transport: Transport, runs: Callable[[], Sequence[wire.RunSummary]]) -> None:
    """Keep our list of runs on the DHT, for ever."""
    while True:
        value = wire.encode(wire.RunList(tuple(runs())[: wire.MAX_RUNS]))
        await transport.put_record(wire.RUNS_KEY, value, LIFETIME_S)
        await asyncio.sleep(REFRESH_S)


class KnowsReach(Protocol):
    """Source of how others can reach us (`core.shared.Shared`)."""

    reach: Reach


class KnowsHeldout(Protocol):
    """Source of what was measured of the run (`daemon.learner.evaluating.Measurements`)."""

    news: asyncio.Event

    @property
    def own(self) -> wire.HeldoutLoss | None:
        """Newest held-out loss of our own; None: we have measured none."""

    def heard(self, peer: str, heldout: wire.HeldoutLoss) -> None:
        """Take in what a peer says that it has measured."""


class Guests(Protocol):
    """Judge of who is admitted to the run (`daemon.admission.introductions.Introductions`)."""

    def admits(self, peer: str) -> bool:
        """Tell whether a peer is admitted, as far as we know."""

    def is_banned(self, peer: str) -> bool:
        """Tell whether a peer is banned."""

    async def meet(self, peer: str) -> object | None:
        """Introduce each other; None: it does not answer."""


class OurRecord:
    """Presence record of our own, made of what others know of us."""

    def __init__(
        self,
        incarnation: int,
        name: str,
        reaches: KnowsReach,
        heldout: KnowsHeldout,
        keeps_history: bool = False,
    ) -> None:
        self.incarnation = incarnation
        self._keeps_history = keeps_history
        self._name = name
        self._reaches = reaches
        self._heldout = heldout

    @property
    def news(self) -> asyncio.Event:
        """Event that is set when there is something new to say."""
        return self._heldout.news

    def heard(self, peer: str, heldout: wire.HeldoutLoss) -> None:
        """Take in a held-out loss from another's record."""
        self._heldout.heard(peer, heldout)

    def with_addresses(self, addresses: Sequence[str]) -> wire.Presence:
        """Make the record as it is now."""
        return wire.Presence(
            WIRE_VERSION,
            self.incarnation,
            self._name,
            tuple(addresses[:MAX_ADDRESSES]),
            self._reaches.reach is Reach.DIRECT,
            self._heldout.own,
            self._keeps_history,
        )


class Presence:
    """Presence records of one run: ours, and the others'."""

    def __init__(
        self,
        transport: Transport,
        run: str,
        ours: OurRecord,
        post: Callable[[ev.Event], None],
        keep: Callable[[Sequence[Sequence[str]]], None] = lambda _: None,
        dial_at_once: int = MAX_NAMED,
        guests: Guests | None = None,
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
        self._rests: BoundedDict[str, tuple[float, float]] = BoundedDict(MAX_NAMED)
        """Time until which each that could not be dialled is left alone, and length of that pause."""
        self._ours_seen: wire.Presence | None = None
        self._redial: dict[str, float] = {}
        """Time of the next attempt by peers that said they cannot be dialled."""
        self._twins = Twins(ours.incarnation, LIFETIME_S)
        self._connected: BoundedDict[str, tuple[str, ...]] = BoundedDict(MAX_NAMED)
        self._strangers: set[str] = set()
        self._roster = Roster(())
        """Roster of those who are reached: one object as long as it is true, since what follows from it is
        worked out once."""
        self._dials: dict[str, asyncio.Task[None]] = {}
        self.names = Names()

    async def publish(self) -> None:
        """Keep our record on the DHT, for ever."""
        key = wire.members_key(self._run)
        while True:
            record = self._ours.with_addresses(self._transport.addresses())
            news = self._ours.news
            news.clear()
            await self._transport.put_record(key, wire.encode(record), LIFETIME_S)
            with contextlib.suppress(TimeoutError):
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
        now = asyncio.get_running_loop().time()
        for peer, record in records.items():
            if not record.dialable:
                hidden.add(peer)
            rests_until_s, _ = self._rests.get(peer, (0.0, 0.0))
            if now >= rests_until_s and (record.dialable or self._worth_a_try(peer)):
                others.append((peer, record.addresses))
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
        if reached != self._roster.members:
            self._roster = Roster(reached)
        self._post(ev.PresenceSeen(self._roster, len(members) - len(reached)))

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
                self._twins.look(record.incarnation, record.name, asyncio.get_running_loop().time())
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
        now = asyncio.get_running_loop().time()
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
        now = asyncio.get_running_loop().time()
        if peer in self._connected or self._attempts.take(now):
            self._tried[peer] = now
            self._dials[peer] = asyncio.create_task(self._dial(peer, addresses), name=f"dial-{peer[-6:]}")

    async def _dial(self, peer: str, addresses: tuple[str, ...]) -> None:
        try:
            await self._transport.connect(peer, addresses)
            if self._guests is not None and not self._admits(peer) and await self._guests.meet(peer) is None:
                self._rest(peer)  # then it is tried again
                return
            self._rests.pop(peer, None)
            self._connected[peer] = addresses
            self._keep(list(self._connected.values()))
        except PeerUnreachable as error:
            logger.debug("cannot dial %s: %s", peer, error)
            self._rest(peer)
        finally:
            del self._dials[peer]

    def _rest(self, peer: str) -> None:
        _, before_s = self._rests.get(peer, (0.0, REST_S / 2))
        pause_s = min(2 * before_s, MOST_REST_S)
        self._rests[peer] = asyncio.get_running_loop().time() + pause_s, pause_s

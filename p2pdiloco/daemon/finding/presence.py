"""Presence records and the list of runs on the DHT: how nodes are found, and find others."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from p2pdiloco.bounded import BoundedDict
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.grouping import Roster
from p2pdiloco.core.api.reach import Reach
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.finding.twins import Twins
from p2pdiloco.errors import PeerUnreachable, RemoteError
from p2pdiloco.ports import Transport
from p2pdiloco.release import WIRE_VERSION

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
DIAL_PATIENCE_S = 1.5
REDIAL_HIDDEN_S = 30.0
MAX_NAMED = 4096
"""Number of peers that are remembered by name; the one unseen for longest is forgotten first."""


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


class OurRecord:
    """Presence record of our own, made of what others know of us."""

    def __init__(self, incarnation: int, name: str, reaches: KnowsReach, heldout: KnowsHeldout) -> None:
        self.incarnation = incarnation
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
    ) -> None:
        """`keep` is told the addresses of the peers met so far whenever they change. `dial_at_once`:
        number of listed peers that are dialled unasked; of the others the transport only learns the
        addresses."""
        self._transport = transport
        self._run = run
        self._ours = ours
        self._post = post
        self._keep = keep
        self._dial_at_once = dial_at_once
        self._redial: dict[str, float] = {}
        """Time of the next attempt by peers that said they cannot be dialled."""
        self._twins = Twins(ours.incarnation, LIFETIME_S)
        self._connected: BoundedDict[str, tuple[str, ...]] = BoundedDict(MAX_NAMED)
        self._strangers: set[str] = set()
        self._roster = Roster(())
        """Roster of those who are reached: one object as long as it is true, since what follows from it is
        worked out once."""
        self._dials: dict[str, asyncio.Task[None]] = {}
        self.names: BoundedDict[str, str] = BoundedDict(MAX_NAMED)

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
        members: list[tuple[str, int]] = []
        others: list[tuple[str, tuple[str, ...]]] = []
        hidden: set[str] = set()
        for peer, value in sorted((await self._transport.get_records(wire.members_key(self._run))).items()):
            try:
                record = wire.decode(value, wire.Presence)
            except RemoteError as error:
                logger.debug("presence record of %s is not readable: %s", peer, error)
                continue
            if record.wire_version != WIRE_VERSION:
                if peer not in self._strangers and len(self._strangers) < MAX_NAMED:
                    self._strangers.add(peer)
                    logger.warning(
                        "%s speaks protocol version %d, not %d", peer, record.wire_version, WIRE_VERSION
                    )
                continue
            if peer == self._transport.peer_id:
                self._twins.look(record.incarnation, record.name, asyncio.get_running_loop().time())
            members.append((peer, record.incarnation))
            self.names[peer] = record.name
            if record.heldout is not None and peer != self._transport.peer_id:
                self._ours.heard(peer, record.heldout)
            if not record.dialable:
                hidden.add(peer)
            if peer != self._transport.peer_id and (record.dialable or self._worth_a_try(peer)):
                others.append((peer, record.addresses))
        self._meet(others)
        awaited = [dial for peer, dial in self._dials.items() if peer not in hidden]
        if awaited:
            await asyncio.wait(awaited, timeout=DIAL_PATIENCE_S)
        # Whom we cannot reach yet the core need not try: a failed dial is held against the next ones. Those
        # that nobody can dial come to us.
        reached = tuple(sorted(m for m in members if m[0] not in self._dials or m[0] in hidden))
        if reached != self._roster.members:
            self._roster = Roster(reached)
        self._post(ev.PresenceSeen(self._roster, len(members) - len(reached)))

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
        if peer not in self._dials and len(self._dials) < MAX_DIALS:
            self._dials[peer] = asyncio.create_task(self._dial(peer, addresses), name=f"dial-{peer[-6:]}")

    async def _dial(self, peer: str, addresses: tuple[str, ...]) -> None:
        try:
            await self._transport.connect(peer, addresses)
            self._connected[peer] = addresses
            self._keep(list(self._connected.values()))
        except PeerUnreachable as error:
            logger.debug("cannot dial %s: %s", peer, error)
        finally:
            del self._dials[peer]

"""Transport on libp2p: our own supervised p2pd, hivemind's DHT in our loop, our own bulk framing.

A dead p2pd is replaced in place: same identity, same ports, same DHT records, the peers that we knew are
dialled again. Meanwhile calls fail at once with `PeerUnreachable`. `Meeting` keeps the peers to join through,
those known from before, and who of them is connected.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from p2pdiloco.adapters import framing, multiaddrs
from p2pdiloco.adapters import hivemind_binding as binding
from p2pdiloco.adapters.dials import NotNow, StrangersDials
from p2pdiloco.adapters.endpoint import MAX_RECORD_BYTES, Endpoint, report_end
from p2pdiloco.adapters.flow import Limits
from p2pdiloco.adapters.hivemind_binding import MAX_KEYS, Attachment, ClockSkew, RecordTable
from p2pdiloco.adapters.multiaddrs import AddressBook
from p2pdiloco.adapters.p2pd import P2PDaemon, P2PDOptions
from p2pdiloco.adapters.streams import RequestAllowance
from p2pdiloco.errors import NobodyReached, PeerUnreachable, RemoteError, TransportError, UserError, invariant
from p2pdiloco.identity import Identity
from p2pdiloco.ports import PeerConnections, TransportHandlers
from p2pdiloco.util import BoundedDict, cancelled

DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/0",)
DHT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 2.0
MAINTENANCE_S = 5.0
RESTART_BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
HEALTHY_S = 60.0
"""Seconds after which a p2pd that dies has died of something new: the back-off begins again."""
MAX_PINGS_A_ROUND = 8
PORT_ATTEMPTS = 3
logger = logging.getLogger(__name__)


class HivemindTransport(Endpoint):
    """Transport on libp2p; implements `ports.Transport`."""

    def __init__(
        self,
        identity: Identity,
        identity_path: Path,
        data_dir: Path,
        listen: Sequence[str] = DEFAULT_LISTEN,
        initial_peers: Sequence[str] = (),
        options: P2PDOptions | None = None,
        limits: Limits | None = None,
        remembered: Sequence[str] = (),
    ) -> None:
        """Addresses are multiaddrs; initial_peers end in /p2p/ID; port 0 picks a free one at start.

        `remembered` are like initial_peers, but it is no error when none of them is there any more.

        Raises: UserError (an address is malformed; names it).
        """
        super().__init__(identity.peer_id, limits)
        options = options or P2PDOptions()
        for text in (*listen, *options.announce):
            multiaddrs.parse(text)
        self._identity = identity
        self._listen = list(listen)
        self._relays = list(initial_peers)
        if options.force_reachability == "private" and options.relay:
            options = replace(options, auto_relay=True)
        options = _with_relays(options, self._relays)
        self._daemon = P2PDaemon(identity_path, data_dir, options)
        self._outside: list[str] = []
        """Addresses of others at which we can be dialled: forwarded ports."""
        self._forwarded: list[str] = []
        """Addresses at which a router says that it forwards a port to us."""
        self._hidden: asyncio.Event | None = None
        """Event that is set when p2pd is back, while it is started anew because we asked for it; else
        None."""
        self._attachment: binding.Attachment | None = None
        self._records: RecordTable | None = None
        dials = StrangersDials([*options.announce, *initial_peers])
        self._meeting = Meeting(identity.peer_id, initial_peers, remembered, dials, self._is_stranger)
        self._expires: BoundedDict[str, float] = BoundedDict(MAX_KEYS)
        self._observed: list[str] = []
        self._own: dict[str, list[str]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._record_calls = RequestAllowance(lambda excess: self._count(excess.value), self._disconnect)
        """Allowance of calls of the DHT."""
        self._dropping: set[asyncio.Task[None]] = set()

    @property
    def listening(self) -> tuple[str, ...]:
        """Addresses on which it listens; with their ports, once it has started."""
        return tuple(self._listen)

    @property
    def helps_with_holes(self) -> bool:
        """True: it listens by UDP, too, on the same ports."""
        return self._daemon.options.force_reachability == "public"

    @property
    def p2pd_pid(self) -> int | None:
        """Process id of p2pd while it runs."""
        return self._daemon.pid

    def named(self, addresses: Iterable[str]) -> None:
        """As `Meeting.named`."""
        self._meeting.named(addresses)

    async def step_back(self, niceness: int) -> None:
        await self._daemon.step_back(niceness)

    async def start(self, handlers: TransportHandlers, may_be_alone: bool = False) -> None:
        """`may_be_alone`: as `Meeting.join_initial`."""
        binding.quiet_logs()
        self._handlers = handlers
        try:
            await self._daemon.prepare()
            await self._first_bring_up()
            await self._meeting.join_initial(self._require(), self._records, may_be_alone)
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._maintain())]
        for task in self._tasks:
            task.add_done_callback(partial(report_end, "transport's background task"))

    async def close(self) -> None:
        await cancelled(self._tasks)
        await self._tear_down()
        await self._daemon.stop()

    def addresses(self) -> list[str]:
        listen = self._listen if self._daemon.options.listen else []
        first = [*self._daemon.options.announce, *self._forwarded, *self._outside]
        return multiaddrs.reachable_order(listen, first, self._observed, self.peer_id, self._own)

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """The addresses are kept for reconnecting."""
        dialable = dialable_addresses(peer, addresses)
        if not dialable:
            raise PeerUnreachable(f"no usable address of {peer}")
        self._meeting.book.heard_of(peer, dialable)  # for whoever names an address that says nothing yet
        await self._meeting.dial(self._require, peer, dialable)
        self._meeting.book.met(peer, dialable)
        self._meeting.met(peer)

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        dialable = dialable_addresses(peer, addresses)
        if dialable:
            self._meeting.book.heard_of(peer, dialable)

    def peers_connected(self) -> int:
        """At most 5 s old."""
        return len(self._meeting.connected)

    def connected(self) -> list[str]:
        """At most 5 s old."""
        return sorted(self._meeting.connected)

    def direct(self) -> set[str]:
        """At most 5 s old."""
        return self._meeting.direct

    async def link(self, peer: str) -> PeerConnections | None:
        try:
            ends = (await self._require().peers(CONTROL_TIMEOUT_S)).get(peer)
        except PeerUnreachable:
            return None
        if ends is None:
            return None
        udp = tuple(end for end in ends if end.startswith("/ip4/") and end.endswith("/quic-v1"))
        return PeerConnections(multiaddrs.direct_ips(ends), udp)

    async def answers_at(self, peer: str, ip: str, port: int, timeout_s: float) -> bool:
        return await multiaddrs.peer_answers(peer, ip, port, timeout_s)

    def found_outside(self, addresses: Sequence[str]) -> None:
        self._outside = list(addresses)

    def forwarded_at(self, addresses: Sequence[str]) -> None:
        """Take in at which addresses a router forwards what comes."""
        self._forwarded = list(addresses)

    @property
    def hidden(self) -> bool:
        """True: others cannot dial us."""
        return self._daemon.options.force_reachability == "private"

    async def dial_anew(self, peer: str, addresses: Sequence[str]) -> None:
        dialable = dialable_addresses(peer, addresses)
        if not dialable:
            raise PeerUnreachable(f"no usable address of {peer}")
        link = await self.link(peer)
        if link is not None and not link.ips:
            await self._disconnected(peer)
            self._meeting.connected.discard(peer)
        await self._meeting.dial(self._require, peer, dialable)
        self._meeting.met(peer)
        link = await self.link(peer)
        if link is None or not link.ips:
            raise PeerUnreachable(f"{peer}: through a relay only")
        self._meeting.direct.add(peer)

    async def hide(self) -> None:
        """p2pd must be started anew for it; 10 s at most."""
        self._outside = []
        options = self._daemon.options
        if options.force_reachability is not None or not self._relays:
            return
        private = replace(options, force_reachability="private", auto_relay=options.relay)
        self._daemon.use(_with_relays(private, self._relays))
        self._hidden = hidden_now = asyncio.Event()
        await self._daemon.end()
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await hidden_now.wait()
        except TimeoutError:
            if self._up():
                return  # it only dials peers that do not answer
            logger.warning("p2pd has not come back within %(waited_s)g s", {"waited_s": DIAL_TIMEOUT_S})

    async def meet(self, peer: str) -> float:
        """Enter a connected peer into the DHT's routing table, whatever its clock says; returns by how many
        seconds that is ahead of ours.

        Raises: PeerUnreachable.
        """
        self._require()
        assert self._records is not None
        async with asyncio.timeout(DHT_TIMEOUT_S):
            await self._records.ping(peer)
            return await self._records.clock_ahead_s(peer)

    async def put_record(self, key: str, value: bytes, lifetime_s: float) -> bool:
        """Never shortens the life of our earlier record under key."""
        invariant(len(value) <= MAX_RECORD_BYTES, f"record of {len(value)} bytes")
        records = self._records
        if records is None:
            return False
        # The DHT takes only what expires strictly later than what it has.
        expires = max(time.time() + lifetime_s, self._expires.get(key, 0.0) + 0.001)
        self._expires[key] = expires
        try:
            async with asyncio.timeout(DHT_TIMEOUT_S):
                return await records.put(key, value, expires)
        except TimeoutError:
            return False

    async def get_records(self, key: str) -> dict[str, bytes]:
        """What we hold ourselves when the DHT does not answer."""
        records = self._records
        if records is None:
            return {}
        if not self._up():
            return records.get_here(key)
        try:
            async with asyncio.timeout(DHT_TIMEOUT_S):
                return await records.get(key)
        except TimeoutError:
            return records.get_here(key)

    async def _serve_message(self, sender: str, data: bytes) -> bytes:
        self._meeting.met(sender)
        return await super()._serve_message(sender, data)

    async def _serve_records(self, sender: str) -> None:
        """Wait until a call of the DHT may be answered. Raises: Busy."""
        if self._handlers is None or not self._handlers.is_member(sender):
            try:
                await self._record_calls.turn(sender, False)
            except RemoteError as error:
                raise self._offence(sender, error) from None

    def _drop(self, peer: str) -> None:
        task = asyncio.create_task(self._disconnected(peer))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _disconnected(self, peer: str) -> None:
        with suppress(PeerUnreachable):  # p2pd is gone, and the connection with it
            await self._require().disconnect(peer, CONTROL_TIMEOUT_S)

    async def _call(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        try:
            await self._meeting.reach(self._require, peer, timeout_s)
            return await self._require().call(peer, data, timeout_s)
        except RemoteError as error:
            raise self._offence(peer, error) from error.__cause__

    async def _open(self, peer: str, timeout_s: float) -> tuple[framing.ByteReader, framing.ByteWriter]:
        await self._meeting.reach(self._require, peer, timeout_s)
        return await self._require().open_stream(peer, timeout_s)

    def _is_stranger(self, peer: str) -> bool:
        handlers = self._handlers
        if handlers is None or (member := handlers.is_member(peer)) is None:
            return True
        return not member and handlers.is_stranger(peer)

    def _up(self) -> bool:
        return self._attachment is not None and not self._attachment.lost

    def _require(self) -> binding.Attachment:
        if self._attachment is None or self._attachment.lost:
            raise PeerUnreachable("p2pd is not running")
        return self._attachment

    async def _first_bring_up(self) -> None:
        wished = self._listen
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self._listen = multiaddrs.claim_ports(wished)
            try:
                await self._bring_up()
                return
            except TransportError as error:
                await self._daemon.stop()
                raise UserError(
                    f"The libp2p daemon did not start: {error}.",
                    "Look for what keeps programs from starting here: memory, permissions, security policy.",
                ) from error
            except UserError:
                # A free port that we had picked may have been taken in the meantime: pick again.
                await self._daemon.stop()
                if self._listen == wished or attempt == PORT_ATTEMPTS:
                    raise

    async def _bring_up(self) -> None:
        daemon = self._daemon
        self._meeting.by_udp = self.hidden
        await daemon.start([*self._listen, *self._udp()])
        self._attachment = await binding.Attachment.open(
            daemon.control_socket,
            daemon.new_client_socket(),
            self._serve_message,
            self._serve_stream,
            self._serve_records,
        )
        invariant(self._attachment.peer_id == self.peer_id, "p2pd runs with another identity than ours")
        try:
            self._records = await RecordTable.create(self._attachment, self._identity, self._records)
            await self._look_at_addresses(self._attachment)
        except TransportError:
            await self._tear_down()  # else it counts as up, and nobody starts it again
            raise

    def _udp(self) -> list[str]:
        """Addresses to listen on for holes. Where a hidden node listens nobody need know; a bootstrap has the
        port that it has of TCP, if it is free."""
        if self.hidden:
            return [f"{multiaddrs.ANY_IP4}udp/0/quic-v1"]
        if not self.helps_with_holes:
            return []
        wanted = [text for text in multiaddrs.with_quic(self._listen) if text not in self._listen]
        try:
            return multiaddrs.claim_ports(wanted)
        except UserError as error:
            logger.warning("no holes are punched by this peer's help: %s", error)
            return []

    async def _tear_down(self) -> None:
        attachment, self._attachment = self._attachment, None
        self._meeting.connected_to({})
        self._kept.clear()
        if self._records is not None:
            self._records.close()
        if attachment is not None:
            await attachment.close()

    async def _supervise(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            if self._up():
                await self._wait_lost()
                if self._hidden is None:
                    logger.warning("p2pd is gone; starting it again")
            if time.monotonic() - began > HEALTHY_S:
                failures = 0
            await self._tear_down()
            await self._daemon.stop()
            await asyncio.sleep(RESTART_BACKOFF_S[min(failures, len(RESTART_BACKOFF_S) - 1)])
            failures += 1
            try:
                await self._bring_up()
                if self._hidden is None:
                    self.restarts += 1
                    self.restarted.set()
                await self._meeting.rejoin(self._require(), self._records)
                if self._hidden is not None:
                    self._hidden.set()
                    self._hidden = None
            except (UserError, TransportError) as error:
                logger.warning("p2pd could not be started again: %s", error)

    async def _wait_lost(self) -> None:
        attachment = self._require()
        ends = {asyncio.create_task(attachment.wait_lost()), asyncio.create_task(self._daemon.wait_dead())}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()

    async def _maintain(self) -> None:
        """Keep the count of peers and our addresses fresh, and heal what a partition tore."""
        while True:
            try:
                await self._maintain_once()
            except TransportError as error:
                logger.debug("maintenance: %s", error)
            await asyncio.sleep(MAINTENANCE_S)

    async def _look_at_addresses(self, attachment: binding.Attachment) -> None:
        self._own = await asyncio.to_thread(multiaddrs.own_addresses)
        everywhere = (
            () if self._daemon.options.listen else (multiaddrs.ANY_IP4, multiaddrs.ANY_IP6)
        )  # it dials from there all the same
        self._meeting.dials.listening([*self._listen, *everywhere], self._own)
        observed = await attachment.observed_addresses(CONTROL_TIMEOUT_S)
        self._observed = [at for at in observed if "/quic" not in at or multiaddrs.relayed(at)]

    async def _maintain_once(self) -> None:
        attachment, records = self._require(), self._records
        self._meeting.connected_to(await attachment.peers(CONTROL_TIMEOUT_S))
        await self._look_at_addresses(attachment)
        if not self._meeting.connected:
            await self._meeting.rejoin(self._require(), self._records)
            return
        await self._meeting.look_for_lost(attachment)
        if records is not None:
            # Both sides of a cut link forget each other in the DHT; a ping brings them together again.
            strangers = [peer for peer in self._meeting.connected if not records.knows(peer)]
            await asyncio.gather(*(records.ping(peer) for peer in strangers[:MAX_PINGS_A_ROUND]))


def _with_relays(options: P2PDOptions, initial_peers: Sequence[str]) -> P2PDOptions:
    """Options with relays: they are looked for among the initial peers; p2pd's own default is IPFS's public
    ones. Each is named once: p2pd waits for as many relays as it is told addresses of."""
    if not options.auto_relay or options.trusted_relays:
        return options
    relays = {multiaddrs.split_peer(text)[1]: text for text in reversed(multiaddrs.with_quic(initial_peers))}
    return replace(options, trusted_relays=tuple(relays.values()), auto_relay=bool(relays))


DIAL_TIMEOUT_S = 10.0
MAX_DIALS = 16
FEW_PEERS = 3
"""Number of connections below which peers from earlier are dialled too."""
OURS_ONLY = (
    "every address to join through is this node's own, so it joins nobody; if its data folder is a copy of "
    "another node's, give it an empty one"
)
DIALLED_BEFORE = "it could not be dialled a moment ago"
PEER_ID = re.compile(r"12D3KooW\w{38}(\w{6})")
MAX_REASON = 160


class Meeting:
    """Peers that a transport knows, and those that it is connected to.

    Args:
        initial_peers, remembered: multiaddrs that end in /p2p/ID. It is no error when of `remembered` none is
            there any more.
        dials: which of a stranger's addresses are dialled.
        is_stranger: whether the run knows nothing of a peer.

    Rules: docs/protocol/links.md, section 9.
    """

    def __init__(
        self,
        me: str,
        initial_peers: Sequence[str],
        remembered: Sequence[str],
        dials: StrangersDials,
        is_stranger: Callable[[str], bool],
    ) -> None:
        self.dials = dials
        self._is_stranger = is_stranger
        self._me = me
        self._initial: dict[str, list[str]] = {}
        """Addresses of the initial peers, by peer."""
        self.named(initial_peers)
        self._is_told_of_us_only = bool(initial_peers) and not self._initial
        self.book = AddressBook()
        for address, peer in (multiaddrs.split_peer(text) for text in remembered):
            if peer != me:
                self.book.met(peer, [*self.book.addresses_of(peer), address])
        self.connected: set[str] = set()
        """Ids of connected peers, as the transport last said."""
        self.direct: set[str] = set()
        """Those of them to which a connection leads that is through no relay."""
        self.by_udp = False
        """True: initial peers are dialled by UDP, too, and are to see where this node sends from."""

    def named(self, addresses: Iterable[str]) -> None:
        """Take addresses that a person named as those of initial peers, who are dialled wherever they are."""
        for address, peer in map(multiaddrs.split_peer, addresses):
            if peer != self._me:
                self._initial.setdefault(peer, []).append(address)

    def _to_join(self) -> list[tuple[str, list[str]]]:
        """List the initial peers, and where to dial each."""
        quic = multiaddrs.with_quic if self.by_udp else list
        return [(peer, quic(addresses)) for peer, addresses in self._initial.items()]

    def met(self, peer: str) -> None:
        """Note that a peer is connected."""
        self.connected.add(peer)

    def connected_to(self, ends: Mapping[str, Iterable[str]]) -> None:
        """Take in who is connected, by which ends, and that no other is."""
        self.connected = set(ends)
        self.direct = {peer for peer, its in ends.items() if multiaddrs.direct_ips(its)}
        for peer in self._initial:
            self.dials.told(multiaddrs.direct_ips(ends.get(peer, ())))

    async def dial(
        self,
        attachment: Callable[[], Attachment],
        peer: str,
        addresses: Sequence[str],
        timeout_s: float = DIAL_TIMEOUT_S,
    ) -> None:
        """Dial a peer at addresses that anybody may have named. Raises: PeerUnreachable."""
        put_off = False
        if self._is_stranger(peer) and peer not in self._initial:
            if peer in self.connected:
                addresses = ()
            else:
                addresses, put_off = await self.dials.choose(addresses, self.connected, timeout_s)
        try:
            await attachment().connect(peer, addresses, timeout_s)
        except PeerUnreachable as error:
            if put_off:
                raise NotNow(str(error)) from error
            raise

    async def join_initial(
        self, attachment: Attachment, records: RecordTable | None, may_be_alone: bool = False
    ) -> None:
        """Reach at least one initial peer. `may_be_alone`: nobody is no error.

        Raises: UserError (none; names them and says why).
        """
        if self._is_told_of_us_only:
            logger.warning("%s", OURS_ONLY)
        if not self._initial:
            await self.rejoin(attachment, records)
            return
        dials = [attachment.connect(*peer, DIAL_TIMEOUT_S) for peer in self._to_join()]
        results = await asyncio.gather(*dials, return_exceptions=True)
        reached = [peer for peer, result in zip(self._initial, results, strict=True) if result is None]
        named = ", ".join(
            f"{address}/p2p/{peer}" for peer, found in self._initial.items() for address in found
        )
        if not reached:
            await self.rejoin(attachment, records)
            if self.connected:
                logger.warning("none of the initial peers can be reached: joined through a remembered one")
                return
            why = why_unreached(results, [address for found in self._initial.values() for address in found])
            if may_be_alone:
                logger.warning("none of the initial peers can be reached yet: %s (%s)", named, why)
                return
            raise NobodyReached(
                f"None of the initial peers can be reached: {named} ({why}).",
                "Check the addresses, that a node runs there, and that no firewall is between.",
            )
        try:
            answered = await records.join(reached) if records is not None else []
        except ClockSkew as error:
            raise UserError(
                f"This machine's clock differs from the peers' by more than 3 s: {error}.",
                "Synchronise the clock (for example: timedatectl set-ntp true), then start again.",
            ) from error
        if not answered and may_be_alone:
            logger.warning("the initial peers can be reached, and none of them answers yet: %s", named)
        elif not answered:
            raise NobodyReached(
                f"The initial peers can be reached, but none of them answers as a DHT peer: {named}.",
                "Do the addresses belong to p2pdiloco nodes or bootstrap peers?",
            )
        self.connected.update(reached)

    async def rejoin(self, attachment: Attachment, records: RecordTable | None) -> None:
        """Dial the peers that we knew, best effort, and enter their routing tables."""
        reached = await self._dial_all(attachment, [*self._to_join(), *self.book.latest(MAX_DIALS)])
        if reached and records is not None:
            try:
                await records.join(reached)
            except ClockSkew as error:
                logger.warning("clock skew: %s", error)

    async def look_for_lost(self, attachment: Attachment) -> None:
        """Dial peers that we are not connected to any more and must not lose.

        They are the initial peers (a bootstrap that came back knows nobody, and nobody else would tell it of
        us) and, while we know hardly anybody, those met before. Without it a swarm and a newcomer could stay
        two swarms for ever.
        """
        known = self._to_join()
        if len(self.connected) < FEW_PEERS:
            known += self.book.latest(MAX_DIALS)
        await self._dial_all(attachment, [each for each in known if each[0] not in self.connected])

    async def _dial_all(self, attachment: Attachment, known: Sequence[tuple[str, list[str]]]) -> list[str]:
        """Dial peers at their addresses, all at once, best effort; return who was reached."""
        wanted: dict[str, list[str]] = {}
        for peer, addresses in known:
            wanted.setdefault(peer, []).extend(addresses)
        peers = list(wanted)[: 2 * MAX_DIALS]
        random.shuffle(peers)  # strangers share a budget
        dials = [self.dial(lambda: attachment, peer, wanted[peer]) for peer in peers]
        results = await asyncio.gather(*dials, return_exceptions=True)
        reached = [peer for peer, result in zip(peers, results, strict=True) if result is None]
        self.connected.update(reached)
        return reached

    async def reach(self, attachment: Callable[[], Attachment], peer: str, timeout_s: float) -> None:
        """Connect to a peer of which we only heard: p2pd dials by itself whom it was connected to, and cannot
        know others.

        Raises:
            PeerUnreachable: nobody answers there.
        """
        addresses = [] if peer in self.connected else self.book.addresses_of(peer)
        if addresses:
            await self.dial(attachment, peer, addresses, min(timeout_s, DIAL_TIMEOUT_S))
            self.connected.add(peer)


def dialable_addresses(peer: str, addresses: Sequence[str]) -> list[str]:
    """Addresses as a peer gave them, without its own id at the end; malformed ones are left out."""
    found = []
    for text in addresses[: multiaddrs.MAX_ADDRESSES]:
        try:
            parts = multiaddrs.parse(text)
        except UserError:
            continue
        if parts[-1] == ("p2p", peer):
            parts = parts[:-1]
        if parts:
            found.append(multiaddrs.join(parts))
    return found


def why_unreached(results: Sequence[BaseException | None], addresses: Sequence[str]) -> str:
    """Say in a few words why none of these addresses could be reached."""
    texts = " ".join(str(result) for result in results)
    names = [
        host for kind, host in (multiaddrs.parse(text)[0] for text in addresses) if kind.startswith("dns")
    ]
    if "no good addresses" in texts and names:  # p2pd's word for it
        return f"no address is known for the host name {' or '.join(dict.fromkeys(names))}"
    for sign, meaning in (
        ("connection refused", "connection refused"),
        ("peer id mismatch", "another peer id answers there"),
        ("no route", "no route to host"),
        ("network is unreachable", "no network of this machine leads there"),
        ("no answer within", "no answer"),
        ("i/o timeout", "no answer"),
        ("no reply from", "no answer"),
        ("no such host", "unknown host name"),
        ("dial backoff", DIALLED_BEFORE),
    ):
        if sign in texts:
            return meaning
    words = PEER_ID.sub(r"…\1", texts)  # the end of a text of p2pd says most
    return words if len(words) <= MAX_REASON else f"…{words[-MAX_REASON:].lstrip('…')}"

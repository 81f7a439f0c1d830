"""Transport on libp2p: our own supervised p2pd, hivemind's DHT in our loop, our own bulk framing.

A dead p2pd is replaced in place: same identity, same ports, same DHT records, the peers that we knew are
dialled again. Meanwhile calls fail at once with `PeerUnreachable`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from p2pdiloco.adapters.net import dial_back, framing, multiaddrs
from p2pdiloco.adapters.net import hivemind_binding as binding
from p2pdiloco.adapters.net.address_book import AddressBook
from p2pdiloco.adapters.net.endpoint import MAX_RECORD_BYTES, Endpoint, report_bug
from p2pdiloco.adapters.net.flow import Limits
from p2pdiloco.adapters.net.p2pd import P2PDaemon, P2PDOptions
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError, UserError, invariant
from p2pdiloco.identity import Identity
from p2pdiloco.ports import Link, TransportHandlers

DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/0",)
DIAL_TIMEOUT_S = 10.0
DHT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 2.0
MAINTENANCE_S = 5.0
RESTART_BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
HEALTHY_S = 60.0
"""Seconds after which a p2pd that dies has died of something new: the back-off begins again."""
MAX_DIALS = 16
MAX_PINGS_A_ROUND = 8
FEW_PEERS = 3
"""Number of connections below which peers from earlier are dialled too."""
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
        self._initial = [multiaddrs.split_peer(text) for text in initial_peers]
        self._initial = [(address, peer) for address, peer in self._initial if peer != identity.peer_id]
        self._relays = list(initial_peers)
        if options.force_reachability == "private" and options.relay:
            options = msgspec.structs.replace(options, auto_relay=True)
        options = _with_relays(options, self._relays)
        self._daemon = P2PDaemon(identity_path, data_dir, options)
        self._outside: list[str] = []
        """Addresses of others at which we can be dialled: forwarded ports."""
        self._hidden: asyncio.Event | None = None
        """Event that is set when p2pd is back, while it is started anew because we asked for it; else
        None."""
        self._attachment: binding.Attachment | None = None
        self._records: binding.RecordTable | None = None
        self._book = AddressBook()
        for address, peer in (multiaddrs.split_peer(text) for text in remembered):
            if peer != identity.peer_id:
                self._book.met(peer, [*self._book.addresses_of(peer), address])
        self._expires: OrderedDict[str, float] = OrderedDict()
        self._observed: list[str] = []
        self._connected: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def p2pd_pid(self) -> int | None:
        """Process id of p2pd while it runs."""
        return self._daemon.pid

    async def step_back(self, niceness: int) -> None:
        """See `P2PDaemon.step_back`."""
        await self._daemon.step_back(niceness)

    async def start(self, handlers: TransportHandlers) -> None:
        """See `ports.Transport.start`."""
        binding.quiet_logs()
        self._handlers = handlers
        try:
            await self._daemon.prepare()
            await self._first_bring_up()
            await self._join_initial()
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._maintain())]
        for task in self._tasks:
            task.add_done_callback(_report_end)

    async def close(self) -> None:
        """See `ports.Transport.close`."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._tear_down()
        await self._daemon.stop()

    def addresses(self) -> list[str]:
        """See `ports.Transport.addresses`."""
        listen = self._listen if self._daemon.options.listen else []
        first = [*self._daemon.options.announce, *self._outside]
        return multiaddrs.reachable_order(listen, first, self._observed, self.peer_id)

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """See `ports.Transport.connect`. The addresses are kept for reconnecting."""
        dialable = _dialable(peer, addresses)
        if not dialable:
            raise PeerUnreachable(f"no usable address of {peer}")
        self._book.met(peer, dialable)
        await self._require().connect(peer, dialable, DIAL_TIMEOUT_S)
        self._connected.add(peer)

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """See `ports.Transport.learn`."""
        dialable = _dialable(peer, addresses)
        if dialable:
            self._book.heard_of(peer, dialable)

    def peers_connected(self) -> int:
        """See `ports.Transport.peers_connected`; at most 5 s old."""
        return len(self._connected)

    def connected(self) -> list[str]:
        """See `ports.Transport.connected`; at most 5 s old."""
        return sorted(self._connected)

    async def link(self, peer: str) -> Link | None:
        """See `ports.Transport.link`."""
        try:
            ends = (await self._require().peers(CONTROL_TIMEOUT_S)).get(peer)
        except PeerUnreachable:
            return None
        return None if ends is None else Link(multiaddrs.direct_ips(ends))

    async def answers_at(self, peer: str, ip: str, port: int, timeout_s: float) -> bool:
        """See `ports.Transport.answers_at`."""
        return await dial_back.answers(peer, ip, port, timeout_s)

    def found_outside(self, addresses: Sequence[str]) -> None:
        """See `ports.Transport.found_outside`."""
        self._outside = list(addresses)

    async def hide(self) -> None:
        """See `ports.Transport.hide`. p2pd must be started anew for it; 10 s at most."""
        self._outside = []
        options = self._daemon.options
        if not options.relay or options.force_reachability is not None or not self._relays:
            return
        private = msgspec.structs.replace(options, force_reachability="private", auto_relay=True)
        self._daemon.options = _with_relays(private, self._relays)
        self._hidden = hidden_now = asyncio.Event()
        await self._daemon.end()
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await hidden_now.wait()
        except TimeoutError:
            logger.warning("p2pd has not come back within %g s", DIAL_TIMEOUT_S)

    async def put_record(self, key: str, value: bytes, lifetime_s: float) -> bool:
        """See `ports.Transport.put_record`. Never shortens the life of our earlier record under key."""
        invariant(len(value) <= MAX_RECORD_BYTES, f"record of {len(value)} bytes")
        records = self._records
        if records is None:
            return False
        # The DHT takes only what expires strictly later than what it has.
        expires = max(time.time() + lifetime_s, self._expires.get(key, 0.0) + 0.001)
        self._expires[key] = expires
        self._expires.move_to_end(key)
        if len(self._expires) > binding.MAX_KEYS:
            self._expires.popitem(last=False)
        try:
            async with asyncio.timeout(DHT_TIMEOUT_S):
                return await records.put(key, value, expires)
        except TimeoutError:
            return False

    async def get_records(self, key: str) -> dict[str, bytes]:
        """See `ports.Transport.get_records`. What we hold ourselves when the DHT does not answer."""
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
        self._connected.add(sender)
        return await super()._serve_message(sender, data)

    async def _call(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        try:
            await self._reach(peer, timeout_s)
            return await self._require().call(peer, data, timeout_s)
        except RemoteError as error:
            raise self._offence(peer, error) from error.__cause__

    async def _open(self, peer: str, timeout_s: float) -> tuple[framing.ByteReader, framing.ByteWriter]:
        await self._reach(peer, timeout_s)
        return await self._require().open_stream(peer, timeout_s)

    async def _reach(self, peer: str, timeout_s: float) -> None:
        """Connect to a peer of which we only heard: p2pd dials by itself whom it was connected to, and cannot
        know others.

        Raises:
            PeerUnreachable: nobody answers there.
        """
        addresses = [] if peer in self._connected else self._book.addresses_of(peer)
        if addresses:
            await self._require().connect(peer, addresses, min(timeout_s, DIAL_TIMEOUT_S))
            self._connected.add(peer)

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
        """Start p2pd, our connection to it, and the DHT on top. Raises: UserError, TransportError."""
        daemon = self._daemon
        await daemon.start(self._listen)
        self._attachment = await binding.Attachment.open(
            daemon.control_socket, daemon.new_client_socket(), self._serve_message, self._serve_stream
        )
        invariant(self._attachment.peer_id == self.peer_id, "p2pd runs with another identity than ours")
        self._records = await binding.RecordTable.create(self._attachment, self._identity, self._records)
        self._observed = await self._attachment.observed_addresses(CONTROL_TIMEOUT_S)

    async def _tear_down(self) -> None:
        attachment, self._attachment = self._attachment, None
        self._connected = set()
        self._kept.clear()
        if self._records is not None:
            self._records.close()
        if attachment is not None:
            await attachment.close()

    async def _join_initial(self) -> None:
        """Reach at least one initial peer. Raises: UserError (none; names them and says why)."""
        if not self._initial:
            await self._rejoin()
            return
        attachment = self._require()
        by_peer: dict[str, list[str]] = {}
        for address, peer in self._initial:
            by_peer.setdefault(peer, []).append(address)
        peers = list(by_peer)
        dials = [attachment.connect(peer, by_peer[peer], DIAL_TIMEOUT_S) for peer in peers]
        results = await asyncio.gather(*dials, return_exceptions=True)
        reached = [peer for peer, result in zip(peers, results, strict=True) if result is None]
        named = ", ".join(f"{address}/p2p/{peer}" for address, peer in self._initial)
        if not reached:
            await self._rejoin()
            if self._connected:
                logger.warning("none of the initial peers can be reached: joined through a remembered one")
                return
            raise UserError(
                f"None of the initial peers can be reached: {named} ({_why(results)}).",
                "Check the addresses, that a node runs there, and that no firewall is between.",
            )
        try:
            answered = await self._records.join(reached) if self._records is not None else []
        except binding.ClockSkew as error:
            raise UserError(
                f"This machine's clock differs from the peers' by more than 3 s: {error}.",
                "Synchronise the clock (for example: timedatectl set-ntp true), then start again.",
            ) from error
        if not answered:
            raise UserError(
                f"The initial peers can be reached, but none of them answers as a DHT peer: {named}.",
                "Do the addresses belong to p2pdiloco nodes or bootstrap peers?",
            )
        self._connected.update(reached)

    async def _supervise(self) -> None:
        """Replace p2pd whenever it dies."""
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
                self.restarts += self._hidden is None
                await self._rejoin()
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

    async def _rejoin(self) -> None:
        """Dial the peers that we knew, best effort, and enter their routing tables."""
        records = self._records
        wanted: dict[str, list[str]] = {}
        for address, peer in self._initial:
            wanted.setdefault(peer, []).append(address)
        for peer, addresses in self._book.latest(MAX_DIALS):
            wanted.setdefault(peer, []).extend(addresses)
        reached = await self._dial_all(wanted)
        if reached and records is not None:
            try:
                await records.join(reached)
            except binding.ClockSkew as error:
                logger.warning("clock skew: %s", error)

    async def _dial_all(self, wanted: dict[str, list[str]]) -> list[str]:
        """Dial these addresses at once, best effort; returns who was reached."""
        attachment = self._require()
        peers = list(wanted)[: 2 * MAX_DIALS]
        dials = [attachment.connect(peer, wanted[peer], DIAL_TIMEOUT_S) for peer in peers]
        results = await asyncio.gather(*dials, return_exceptions=True)
        reached = [peer for peer, result in zip(peers, results, strict=True) if result is None]
        self._connected.update(reached)
        return reached

    async def _look_for_lost(self) -> None:
        """Dial peers that we are not connected to any more and must not lose.

        They are the initial peers (a bootstrap that came back knows nobody, and nobody else would tell it of
        us) and, while we know hardly anybody, those met before. Without it a swarm and a newcomer could stay
        two swarms for ever.
        """
        wanted: dict[str, list[str]] = {}
        for address, peer in self._initial:
            if peer not in self._connected:
                wanted.setdefault(peer, []).append(address)
        if len(self._connected) < FEW_PEERS:
            for peer, addresses in self._book.latest(MAX_DIALS):
                if peer not in self._connected:
                    wanted.setdefault(peer, []).extend(addresses)
        if wanted:
            await self._dial_all(wanted)

    async def _maintain(self) -> None:
        """Keep the count of peers and our addresses fresh, and heal what a partition tore."""
        while True:
            try:
                await self._maintain_once()
            except TransportError as error:
                logger.debug("maintenance: %s", error)
            await asyncio.sleep(MAINTENANCE_S)

    async def _maintain_once(self) -> None:
        attachment, records = self._require(), self._records
        self._connected = set(await attachment.peers(CONTROL_TIMEOUT_S))
        self._observed = await attachment.observed_addresses(CONTROL_TIMEOUT_S)
        if not self._connected:
            await self._rejoin()
            return
        await self._look_for_lost()
        if records is not None:
            # Both sides of a cut link forget each other in the DHT; a ping brings them together again.
            strangers = [peer for peer in self._connected if not records.knows(peer)]
            await asyncio.gather(*(records.ping(peer) for peer in strangers[:MAX_PINGS_A_ROUND]))


def _with_relays(options: P2PDOptions, initial_peers: Sequence[str]) -> P2PDOptions:
    """Options with relays: they are looked for among the initial peers; p2pd's own default is IPFS's public
    ones."""
    if not options.auto_relay or options.trusted_relays:
        return options
    return msgspec.structs.replace(
        options, trusted_relays=tuple(initial_peers), auto_relay=bool(initial_peers)
    )


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        report_bug("transport's background task", error)


def _dialable(peer: str, addresses: Sequence[str]) -> list[str]:
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


def _why(results: Sequence[BaseException | None]) -> str:
    texts = " ".join(str(result) for result in results)
    for sign, meaning in (
        ("connection refused", "connection refused"),
        ("peer id mismatch", "another peer id answers there"),
        ("no route", "no route to host"),
        ("no answer within", "no answer"),
        ("i/o timeout", "no answer"),
        ("no such host", "unknown host name"),
    ):
        if sign in texts:
            return meaning
    return texts[-160:]

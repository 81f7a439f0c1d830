"""Attacks with records of the DHT: members that are not there, and runs that are not the one meant."""

from __future__ import annotations

import asyncio
import hashlib
import time

import p2pdiloco.adapters.hivemind_bare  # noqa: F401  # isort: skip (before hivemind)
from hivemind.dht.routing import DHTID
from hivemind.proto import dht_pb2

from attacks.stranger import LIFETIME_S, Attack, Work
from p2pdiloco.adapters import endpoint
from p2pdiloco.adapters.hivemind_binding import peer_id_of
from p2pdiloco.config.manifest import SignedManifest, encode_signed
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.identity import Identity
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco.release import WIRE_VERSION

GHOSTS = 300
AT_ONCE = 25
RECORDS_S = 5.0


class Ghosts(Attack):
    """Presence records of generated keys, of nobody."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._key = DHTID.generate(source=wire.members_key(work.run))

    async def attack(self) -> None:
        """See `Attack`."""
        for _ in range(0, GHOSTS, AT_ONCE):
            ghosts = [Identity.generate() for _ in range(AT_ONCE)]
            for peer in [*self._stranger.work.members, self._stranger.work.join.rpartition("/p2p/")[2]]:
                await self._store(peer, ghosts)
        await asyncio.Event().wait()

    async def _store(self, peer: str, ghosts: list[Identity]) -> None:
        """Have a peer store these records, as one of the DHT's peers is asked to."""
        records = self._stranger.transport._records
        assert records is not None
        protocol = records._node.protocol
        expires = time.time() + endpoint.MAX_LIFETIME_S
        dumps, subkeys, values = protocol.serializer.dumps, [], []
        for ghost in ghosts:
            record = wire.Presence(WIRE_VERSION, 1, "ghost", ("/ip4/127.0.0.1/tcp/9/p2p/" + ghost.peer_id,))
            subkey, value = dumps(ghost.peer_id), dumps(wire.encode(record))
            subkeys.append(subkey)
            values.append(endpoint.signed_value(ghost, self._key.to_bytes(), subkey, value, expires))
        request = dht_pb2.StoreRequest(
            keys=[self._key.to_bytes()] * len(ghosts),
            subkeys=subkeys,
            values=values,
            expiration_time=[expires] * len(ghosts),
            in_cache=[False] * len(ghosts),
            peer=protocol.node_info,
        )
        try:
            async with asyncio.timeout(5.0):
                reply = await protocol.get_stub(peer_id_of(peer)).rpc_store(request)
            stored = sum(bool(ok) for ok in reply.store_ok)
            self._stranger.done["records taken"] += stored
            self._stranger.done["records refused"] += len(ghosts) - stored
        except Exception as error:  # noqa: BLE001 - hivemind raises what it likes
            self._stranger.done[f"store: {type(error).__name__}"] += len(ghosts)


class OtherRuns(Attack):
    """A second run of the same name, and the true one's id with a manifest that cannot be read."""

    async def attack(self) -> None:
        """See `Attack`."""
        stranger, run = self._stranger, self._stranger.work.run
        other = hashlib.sha256(b"another run").hexdigest()
        name = stranger.work.run_name
        stranger.lists = tuple(wire.RunSummary(each, name, stranger.id) for each in (run, other))
        stranger.gives = self._give
        while True:
            record = wire.encode(wire.RunList(stranger.lists))
            await stranger.transport.put_record(wire.RUNS_KEY, record, LIFETIME_S)
            await stranger.be_listed()
            await asyncio.sleep(RECORDS_S)

    def _give(self, _peer: str, pull: wire.Pull) -> PullSource | Refusal:
        if not isinstance(pull, wire.PullManifest):
            return wire.refuse(PullRefusal.BUSY)
        self._stranger.done["manifests given"] += 1
        text = b'[run]\nname = "\xff\xfe"\n'
        unsigned = SignedManifest(text, self._stranger.id, bytes(32), self._stranger.identity.sign(text))
        return PullSource(encode_signed(unsigned), (), lambda: None)

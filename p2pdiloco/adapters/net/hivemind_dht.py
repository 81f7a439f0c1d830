"""Binding to hivemind's DHT, made safe.

What is different from plain hivemind 1.1.12, and why (measured): a refused record no longer shortens the life
of the good one; dictionaries are bounded.
"""

from __future__ import annotations

import p2pdiloco.adapters.net.hivemind_bare  # noqa: F401  # isort: skip (before hivemind)

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from hivemind.dht.crypto import DHTRecord
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import RecordValidatorBase
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import TimedStorage

from p2pdiloco.adapters.net import dht_records
from p2pdiloco.adapters.net.hivemind_binding import FAILURES, Attachment, peer_id_of
from p2pdiloco.core.api.types import Crypto
from p2pdiloco.errors import PeerUnreachable
from p2pdiloco.hashing import content_digest
from p2pdiloco.util import BoundedDict

MAX_KEYS = 4096
MAX_ACCEPTED = 8192
MAX_SUBKEYS = 1024
MAX_DICTIONARY_BYTES = 1024 * 1024
"""Most bytes of a dictionary of the DHT. A reply of 4 MiB or more breaks hivemind's RPC for good; this keeps
far below."""


class RecordTable:
    """DHT of hivemind in our own loop, holding signed records only."""

    def __init__(self, node: DHTNode, crypto: Crypto, owner: str) -> None:
        self._node = node
        self._crypto = crypto
        self._owner = owner

    @classmethod
    async def create(
        cls, attachment: Attachment, crypto: Crypto, predecessor: RecordTable | None = None
    ) -> RecordTable:
        """Make a table on this attachment, with the node id and the records of its predecessor, if any.

        Raises:
            PeerUnreachable: p2pd is gone.
        """
        storage = _Storage(maxsize=MAX_KEYS)
        node_id = None
        if predecessor is not None:
            node_id = predecessor._node.node_id
            storage = predecessor._node.protocol.storage
        try:
            node = await DHTNode.create(
                p2p=attachment.p2p,
                node_id=node_id,
                record_validator=_Validator(crypto),
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
                cache_refresh_before_expiry=0,
            )
        except FAILURES as error:
            raise PeerUnreachable(f"cannot talk to p2pd: {error}") from error
        node.protocol.storage = storage
        return cls(node, crypto, attachment.peer_id)

    async def join(self, peers: Sequence[str]) -> list[str]:
        """Ping peers and look for our neighbours through them; returns those that answered.

        Raises:
            ClockSkew: nobody answered who agrees with us about the time.
        """
        pings = [
            self._node.protocol.call_ping(peer_id_of(peer), validate=True, strict=True) for peer in peers
        ]
        results = await asyncio.gather(*pings, return_exceptions=True)
        answered = [
            p
            for p, r in zip(peers, results, strict=True)
            if r is not None and not isinstance(r, BaseException)
        ]
        skewed = [r for r in results if isinstance(r, ValidationError) and "local time" in str(r)]
        if skewed and not answered:
            raise ClockSkew(str(skewed[0]))
        if answered:
            await self._node.find_nearest_nodes([self._node.node_id])
        return answered

    def knows(self, peer: str) -> bool:
        """Tell whether the peer is in the routing table."""
        return self._node.protocol.routing_table.get(peer_id=peer_id_of(peer)) is not None

    async def ping(self, peer: str) -> None:
        """Put the peer into the routing table if it answers."""
        await self._node.protocol.call_ping(peer_id_of(peer))

    async def clock_ahead_s(self, peer: str) -> float:
        """Measure by how many seconds the clock of a peer is ahead of ours; half the round trip is not known.

        Raises: PeerUnreachable.
        """
        sent_s = time.time()
        try:
            reply = await self._node.protocol.get_stub(peer_id_of(peer)).rpc_ping(dht_pb2.PingRequest())
        except FAILURES as error:
            raise PeerUnreachable(f"it does not say what time it is: {error}") from error
        return float(reply.dht_time) - (sent_s + time.time()) / 2

    async def put(self, key: str, value: bytes, expires: float) -> bool:
        """Store our record here and with the nearest peers; returns whether any of those took it."""
        self._put_here(key, value, expires)
        stored = await self._node.store(key, value, expires, subkey=self._owner, exclude_self=True)
        return bool(stored)

    async def get(self, key: str) -> dict[str, bytes]:
        """Look up the live records under key that we and the nearest peers have."""
        found = await self._node.get(key, latest=True)
        self._bound(key)
        if found is None or not isinstance(found.value, dict):
            return {}
        now = time.time()
        return {owner: item.value for owner, item in found.value.items() if item.expiration_time > now}

    def get_here(self, key: str) -> dict[str, bytes]:
        """List the live records under key that we hold ourselves."""
        found = self._node.protocol.storage.get(DHTID.generate(source=key))
        if found is None or not isinstance(found.value, DictionaryDHTValue):
            return {}
        loads = self._node.protocol.serializer.loads
        return {owner: loads(dht_records.stripped(value)) for owner, (value, _) in found.value.items()}

    def close(self) -> None:
        """Stop background work."""
        self._node.is_alive = False

    def _put_here(self, key: str, value: bytes, expires: float) -> None:
        key_id = DHTID.generate(source=key)
        dumps = self._node.protocol.serializer.dumps
        signed = dht_records.signed_value(
            self._crypto, key_id.to_bytes(), dumps(self._owner), dumps(value), expires
        )
        self._node.protocol.storage.store_subkey(key_id, self._owner, signed, expires)

    def _bound(self, key: str) -> None:
        """Drop our own dictionary under key if it is too large: a look-up merges what it finds into it, past
        all bounds."""
        storage = self._node.protocol.storage
        key_id = DHTID.generate(source=key)
        found = storage.get(key_id)
        if found is not None and isinstance(found.value, DictionaryDHTValue) and _too_large(found.value):
            del storage[key_id]


class ClockSkew(Exception):
    """Error: this machine's clock differs from the peers' by more than 3 s."""


class _Validator(RecordValidatorBase):  # type: ignore[misc]
    """Validator of signed records (`dht_records`)."""

    def __init__(self, crypto: Crypto) -> None:
        self._crypto = crypto
        self._accepted: BoundedDict[bytes, None] = BoundedDict(MAX_ACCEPTED)
        """Digests of records that were acceptable: every look-up brings the same ones again, from each peer
        that is asked, and a signature takes far longer than a digest."""

    def validate(self, record: DHTRecord) -> bool:
        parts = record.key, record.subkey, record.value, record.expiration_time
        digest = content_digest(dht_records.signed_message(*parts))
        if digest in self._accepted:
            return True
        accepted = dht_records.acceptable(self._crypto, *parts, time.time())
        if accepted:
            self._accepted[digest] = None
        return accepted

    def sign_value(self, record: DHTRecord) -> bytes:
        return dht_records.signed_value(
            self._crypto, record.key, record.subkey, record.value, record.expiration_time
        )

    def strip_value(self, record: DHTRecord) -> bytes:
        return dht_records.stripped(record.value)


class _Storage(DHTLocalStorage):  # type: ignore[misc]
    """Storage bounded in the size of every dictionary; the number of keys is bounded by `maxsize`."""

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        current = self.get(key)
        if current is not None and isinstance(current.value, DictionaryDHTValue):
            held = current.value
            if held.get(subkey) is None and _too_large(held, len(value)):
                return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))


def _too_large(dictionary: DictionaryDHTValue, more_bytes: int = 0) -> bool:
    sizes = [len(item.value) for _, item in dictionary.items()]
    return len(sizes) >= MAX_SUBKEYS or sum(sizes) + more_bytes > MAX_DICTIONARY_BYTES


_original_store = TimedStorage.store


def _store(self: Any, key: Any, value: Any, expiration_time: float) -> bool:
    """Store a value only if it lives longer. hivemind records the expiration of a value that it then refuses,
    and so the good one dies early."""
    current = self.data.get(key)
    if current is not None and current.expiration_time >= expiration_time:
        return False
    return bool(_original_store(self, key, value, expiration_time))


TimedStorage.store = _store

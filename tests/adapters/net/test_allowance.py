"""What strangers ask: a newcomer is never held back, who asks too much waits, and who goes on is put out."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from conftest import Swarm
from deadlines import within_s
from net_helpers import until

from p2pdiloco.adapters import endpoint, hivemind_binding, streams
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.adapters.streams import (
    LATE_S,
    MOST_LATE,
    MOST_REFUSED,
    MOST_WAIT_S,
    OTHERS_AT_ONCE,
    OTHERS_PER_S,
    PEER_AT_ONCE,
    PEER_PER_S,
    POOL_SHARES,
    STREAMS_OF_MEMBERS,
    STREAMS_OF_OTHERS,
    Busy,
    Excess,
    Places,
    RequestAllowance,
    StreamRefusal,
)
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError
from p2pdiloco.identity import Identity
from p2pdiloco_lab.bulk_world.bulk_plan import in_virtual_time

WAITING = int(MOST_WAIT_S * PEER_PER_S)


class Asked:
    """An allowance, and what came of each request."""

    def __init__(self) -> None:
        self.counted: Counter[Excess] = Counter()
        self.disconnected: list[str] = []
        self.allowance = RequestAllowance(self.count, self.disconnected.append)
        self.refused: Counter[str] = Counter()

    def count(self, excess: Excess) -> None:
        self.counted[excess] += 1

    async def ask(self, peer: str, stranger: bool = True) -> bool:
        try:
            await self.allowance.turn(peer, stranger)
        except Busy as error:
            self.refused[error.counted] += 1
            return False
        return True

    async def at_once(self, peer: str, requests: int, stranger: bool = True) -> int:
        """Number of so many requests, all made at this moment, that were answered."""
        return sum(await asyncio.gather(*(self.ask(peer, stranger) for _ in range(requests))))


def took_s(run: Coroutine[Any, Any, None]) -> float:
    """Virtual time that this takes."""

    async def timed() -> float:
        await run
        return asyncio.get_running_loop().time()

    return in_virtual_time(timed())


def test_a_newcomers_first_minute_fits_many_times() -> None:
    async def run(asked: Asked) -> None:
        for second in range(60):
            for _ in range(40 if second == 0 else 3):
                assert await asked.ask("newcomer")
            await asyncio.sleep(1.0)

    asked = Asked()
    in_virtual_time(run(asked))
    assert not asked.counted and not asked.disconnected


def test_who_asks_one_thing_after_the_other_is_slowed_down_and_not_refused() -> None:
    async def run(asked: Asked) -> None:
        for _ in range(PEER_AT_ONCE + 40):
            assert await asked.ask("peer")

    asked = Asked()
    assert took_s(run(asked)) == pytest.approx(40 / PEER_PER_S)
    assert asked.counted == {Excess.HELD_BACK: 40} and not asked.disconnected


def test_a_flood_is_refused_late_and_disconnected() -> None:
    async def run(asked: Asked) -> None:
        assert (
            await asked.at_once("peer", PEER_AT_ONCE + WAITING + MOST_REFUSED - 1) == PEER_AT_ONCE + WAITING
        )
        assert not asked.disconnected
        assert not await asked.at_once("peer", 0)

    async def goes_on(asked: Asked) -> None:
        await run(asked)
        assert await asked.at_once("peer", WAITING + PEER_AT_ONCE + MOST_REFUSED) < WAITING + PEER_AT_ONCE
        assert asked.disconnected == ["peer"]

    asked = Asked()
    assert took_s(run(asked)) == pytest.approx(LATE_S)
    assert asked.refused == {Excess.OF_ONE_PEER.value: MOST_REFUSED - 1}
    in_virtual_time(goes_on(Asked()))


def test_so_many_refusals_are_held_back_and_no_more() -> None:
    async def run() -> None:
        asked = Asked()
        floods = [
            asyncio.create_task(asked.at_once(f"peer {i}", PEER_AT_ONCE + WAITING + 40, stranger=False))
            for i in range(3)
        ]
        await asyncio.sleep(MOST_WAIT_S + 0.1)
        assert sum(asked.refused.values()) == 3 * 40 - MOST_LATE, "the others were told at once"
        await asyncio.gather(*floods)
        assert sum(asked.refused.values()) == 3 * 40

    in_virtual_time(run())


def test_all_strangers_together_have_one_allowance_and_who_was_invited_is_none() -> None:
    async def run() -> None:
        asked = Asked()
        each = 32
        peers = OTHERS_AT_ONCE // each + int(MOST_WAIT_S * OTHERS_PER_S) // each
        floods = [asyncio.create_task(asked.at_once(f"stranger {i}", each)) for i in range(peers)]
        await asyncio.sleep(0)
        began_s = asyncio.get_running_loop().time()
        assert await asked.at_once("invited", each, stranger=False) == each
        assert asyncio.get_running_loop().time() == began_s, "nothing of it waited"
        assert not await asked.ask("one more"), "though it never asked before"
        assert asked.refused == {Excess.OF_OTHERS.value: 1} and not asked.disconnected
        assert sum(await asyncio.gather(*floods)) == peers * each

    in_virtual_time(run())


def test_what_is_given_back_counts_no_more() -> None:
    async def run(asked: Asked) -> None:
        for _ in range(4 * PEER_AT_ONCE):
            assert await asked.ask("peer", stranger=False)
            asked.allowance.give_back("peer")

    asked = Asked()
    assert took_s(run(asked)) == 0.0 and not asked.counted


async def failures(asks: list[Coroutine[Any, Any, Any]]) -> Counter[str]:
    """Make these requests at once; reasons of those that failed."""
    found: Counter[str] = Counter()
    for result in await asyncio.gather(*asks, return_exceptions=True):
        if isinstance(result, RemoteError):
            found[result.reason] += 1
        elif isinstance(result, BaseException):
            assert isinstance(result, TransportError), result
            found["cut"] += 1
    return found


@pytest.fixture
def hardly_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests a peer, then one a minute, of which none waits; refusals come late by a little."""
    for name, value in {"PEER_AT_ONCE": 4, "PEER_PER_S": 1 / 60, "MOST_WAIT_S": 1.0, "LATE_S": 0.05}.items():
        monkeypatch.setattr(streams, name, value)
    monkeypatch.setattr(streams, "MOST_REFUSED", 12)


@pytest.mark.parametrize("kind", ["messages", "pulls"])
async def test_a_flooding_peer_is_refused_and_disconnected_and_an_honest_one_is_served(
    swarm: Swarm, hardly_any: None, kind: str
) -> None:
    b, flooding, honest, member = [await swarm.add() for _ in range(4)]
    at_b = swarm.handlers_of(b)
    at_b.members, at_b.payload = {member.peer_id}, [b"payload"]

    def ask(peer: Any) -> Coroutine[Any, Any, Any]:
        if kind == "messages":
            return peer.send(b.peer_id, b"hello", 5.0)  # type: ignore[no-any-return]
        return peer.pull(b.peer_id, b"x", 100, 5.0)  # type: ignore[no-any-return]

    assert await failures([ask(flooding) for _ in range(4)]) == {}
    assert set(await failures([ask(flooding) for _ in range(8)])) == {"busy"}
    await until(lambda: b.refusals == {Excess.OF_ONE_PEER.value: 8})
    assert await failures([ask(honest) for _ in range(4)]) == {}
    assert await failures([ask(member) for _ in range(30)]) == {}
    left = asyncio.create_task(without_a_link(b, flooding.peer_id))
    assert await failures([ask(flooding) for _ in range(8)])
    await until(lambda: b.refusals.get(Excess.DISCONNECTED.value) == 1)
    await asyncio.wait_for(left, within_s(15))
    assert set(await failures([ask(honest)])) == {"busy"}, "it had its four"
    assert await failures([ask(member)]) == {}


async def without_a_link(transport: Any, peer: str) -> None:
    """Until p2pd says that they are not connected. That peer soon is again: it began with this transport."""
    while isinstance(transport, HivemindTransport):
        if await transport.link(peer) is None:
            return
        await asyncio.sleep(0)  # p2pd is asked without a pause, as the moment may be shorter than one


@pytest.mark.parametrize("swarm", [pytest.param("hivemind", marks=pytest.mark.net)], indirect=True)
async def test_calls_of_the_dht_are_requests_too_and_cancelled_ones_are_forgotten(
    swarm: Swarm, hardly_any: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await swarm.add()
    b: Any = await swarm.add()
    a_handlers = swarm.handlers_of(a)
    a_handlers.members = {b.peer_id}
    for _ in range(30):
        assert await b.get_records("key") == {}
    assert not a.refusals, "a member's are not counted"
    a_handlers.members = set()
    for _ in range(20):
        await b._records.ping(a.peer_id)
    assert a.refusals[Excess.OF_ONE_PEER.value] >= 12 and Excess.DISCONNECTED.value in a.refusals
    control = a._attachment._control  # type: ignore[attr-defined]
    await until(lambda: not control._handler_tasks)
    monkeypatch.setattr(streams, "LATE_S", 600.0)
    given_up = asyncio.create_task(b._records.ping(a.peer_id))
    await until(lambda: control._handler_tasks)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await until(lambda: not control._handler_tasks, "it is forgotten, which hivemind does not do by itself")


async def test_a_call_that_is_cancelled_before_its_answer_begins_is_forgotten_too() -> None:
    """Both messages wait to be read when p2pd, or this process, was busy for a moment."""
    from hivemind.proto import p2pd_pb2

    from p2pdiloco.adapters.hivemind_binding import _Control

    control, reader = _Control(None, None, _initialized_with_create=True), asyncio.StreamReader()
    asked = p2pd_pb2.CallUnaryRequest(peer=b"peer", proto="x", data=b"")
    for more in ({"requestHandling": asked}, {"cancel": p2pd_pb2.Cancel()}):
        message = p2pd_pb2.PersistentConnectionResponse(callId=b"1" * 16, **more).SerializeToString()
        reader.feed_data(bytes([len(message)]) + message)
    reader.feed_eof()
    await control._read_from_persistent_conn(reader)
    assert len(control._handler_tasks) == 1
    await until(lambda: not control._handler_tasks, "it is forgotten")


class Counting:
    """Crypto that counts what it verifies."""

    def __init__(self, identity: Identity) -> None:
        self.identity, self.verified = identity, 0

    def verify(self, signer: str, message: bytes, signature: bytes) -> bool:
        self.verified += 1
        return self.identity.verify(signer, message, signature)


def test_a_records_signature_is_verified_once_and_another_records_anew() -> None:
    from hivemind.dht.crypto import DHTRecord
    from hivemind.utils.serializer import MSGPackSerializer

    author = Identity.generate()
    crypto: Any = Counting(author)
    validator = hivemind_binding._Validator(crypto)
    dumps = MSGPackSerializer.dumps
    subkey, value, expires = dumps(author.peer_id), dumps(b"value"), time.time() + 60
    signed = endpoint.signed_value(author, b"k" * 20, subkey, value, expires)
    record = DHTRecord(b"k" * 20, subkey, signed, expires)
    assert all(validator.validate(record) for _ in range(5)) and crypto.verified == 1
    for changed in (
        DHTRecord(b"j" * 20, subkey, signed, expires),
        DHTRecord(b"k" * 20, dumps(Identity.generate().peer_id), signed, expires),
        DHTRecord(b"k" * 20, subkey, signed, expires + 1),
        DHTRecord(b"k" * 20, subkey, signed[:-1] + bytes([signed[-1] ^ 1]), expires),
    ):
        assert not validator.validate(changed) and not validator.validate(changed)
    assert crypto.verified == 9, "what was refused is looked at again"


async def test_a_peer_that_cannot_be_dialled_is_not_among_those_met(swarm: Swarm) -> None:
    if swarm.kind == "memory":
        return
    a: Any = await swarm.add()
    ghost = Identity.generate().peer_id
    with pytest.raises(PeerUnreachable):
        await a.connect(ghost, ("/ip4/127.0.0.1/tcp/9",))
    b = await swarm.add()
    await a.connect(b.peer_id, b.addresses())  # type: ignore[attr-defined]
    assert [peer for peer, _ in a._meeting.book.latest(1)] == [b.peer_id]


# Places for incoming streams: members', others', and one peer's share.


class Door:
    """Streams that stay until the test ends."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.gave_way = 0
        self.places = Places(self._count)
        self._stack = stack

    def _count(self) -> None:
        self.gave_way += 1

    async def come(self, peer: str, member: bool) -> StreamRefusal | asyncio.Task[None]:
        inside: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def stay() -> None:
            try:
                with self.places.taken(peer, member):
                    inside.set_result(None)
                    await asyncio.Event().wait()
            except Busy as error:
                inside.set_exception(error)

        async def end(task: asyncio.Task[None]) -> None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        task = asyncio.create_task(stay())
        self._stack.push_async_callback(end, task)
        try:
            await inside
        except Busy as error:
            assert error.reason == "busy"
            return StreamRefusal(error.counted)
        return task


async def test_others_take_no_place_of_a_member() -> None:
    async with AsyncExitStack() as stack:
        door = Door(stack)
        for i in range(STREAMS_OF_OTHERS):
            assert isinstance(await door.come(f"stranger {i}", False), asyncio.Task)
        assert await door.come("one more", False) is StreamRefusal.OTHERS_FULL
        for i in range(STREAMS_OF_MEMBERS):
            assert isinstance(await door.come(f"member {i % 8}", True), asyncio.Task)
        assert await door.come("member 0", True) is StreamRefusal.MEMBERS_FULL
        assert door.gave_way == 0, "nobody has more than a share"
    assert len(door.places) == 0


@pytest.mark.parametrize(("member", "most"), [(True, STREAMS_OF_MEMBERS), (False, STREAMS_OF_OTHERS)])
async def test_who_has_more_than_a_share_gives_way(member: bool, most: int) -> None:
    share = most // POOL_SHARES
    async with AsyncExitStack() as stack:
        door = Door(stack)
        greedy = [await door.come("greedy", member) for _ in range(most - share)]
        assert await door.come("greedy", member) is StreamRefusal.ONE_PEERS_SHARE
        for i in range(share):
            await door.come(f"other {i}", member)
        for i in range(most - share - share):
            assert isinstance(await door.come(f"late {i % 2}", member), asyncio.Task)
            assert door.gave_way == i + 1
            newest = greedy.pop()
            assert isinstance(newest, asyncio.Task)
            await until(newest.cancelled)
        assert isinstance(await door.come("latest", member), StreamRefusal), "a share is its own"
        assert len(door.places) == most

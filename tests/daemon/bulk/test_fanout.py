"""A large update is uploaded about twice by its holder, whatever the number of members, and all get it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from daemon_kit import Neighbourhood, until
from deadlines import within_s
from fanout_kit import PAYLOAD, SMALL, Members, Peer, update

from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk import updates
from p2pdiloco.daemon.bulk import updates as arriving_updates
from p2pdiloco.errors import TransportError
from p2pdiloco.identity import Identity
from p2pdiloco.ports import PullSource, Refusal


@pytest.fixture
async def started() -> AsyncIterator[Callable[[bytes], Any]]:
    made: list[Members] = []

    async def start(payload: bytes = PAYLOAD, number: int = 8) -> Members:
        members = Members(payload, number)
        made.append(members)
        for peer in members.all:
            await peer.transport.start(peer)  # type: ignore[arg-type]
        return members

    yield start
    for members in made:
        for peer in members.all:
            await peer.transport.close()


async def test_sixteen_members_and_the_holder_uploads_it_twice(started: Any) -> None:
    members = await started(PAYLOAD, 16)
    giving: list[int] = []

    given = members.holder.meters.uplink.given
    given.begin, given.end = (lambda: giving.append(1)), (lambda: giving.append(-1))
    await members.fetch_all()
    members.check()
    assert len(giving) >= 4 and sum(giving) == 0, "the uplink is measured meanwhile"
    assert max(members.uploads(peer) for peer in members.all) <= 2.2
    assert members.holder.transfers.fanout.sent_elsewhere == 13
    assert sum(peer.transfers.gathering.from_others for peer in members.others) == 13
    assert sum(peer.transfers.bytes_in for peer in members.others) == 15 * len(PAYLOAD), "nothing came twice"
    counted = members.holder.transfers.counters()
    assert counted["updates_passed_on_bytes"] == len(PAYLOAD) * members.uploads(members.holder)


def test_a_piece_is_worth_a_stream() -> None:
    clock = [0.0]
    size = 64 * arriving_updates.LEAST_BYTES
    arriving = arriving_updates.Arriving(1, lambda: clock[0])
    version, part = update(PAYLOAD), arriving_updates.Unfinished(bytes(32), size)
    eighth = size // arriving_updates.PIECES
    arriving.begun(version, part)
    clock[0], part.have_bytes = 0.01, 4 * eighth  # as fast as this, the rest is here at once
    assert not arriving._enough(asking())
    clock[0] = arriving_updates.PIECE_S
    assert arriving._enough(asking())
    clock[0], part.have_bytes = 10.0, eighth - 1  # as slow as this, an eighth is worth it
    assert not arriving._enough(asking())
    part.have_bytes = eighth
    assert arriving._enough(asking())
    clock[0], part.have_bytes = 10.001, size
    assert arriving._enough(asking())


async def test_who_comes_later_is_sent_elsewhere_too(started: Any) -> None:
    members = await started()
    for peer in members.others:
        await peer.fetch()
    members.check()
    assert members.uploads(members.holder) == 2.0
    assert members.holder.transfers.bytes_pushed == 0, "at others' pace: it says nothing about our uplink"


async def test_a_part_is_passed_on_while_the_rest_is_on_its_way(started: Any) -> None:
    members = await started()
    first, second = members.others[:2]
    half = len(PAYLOAD) // 2
    arriving = first.transfers.fanout.arriving(0, 1)
    fetch = arriving_updates.Unfinished(members.holder.version.header.update_digest, len(PAYLOAD))
    fetch.payload[:] = PAYLOAD
    fetch.have_bytes = half
    arriving.begun(members.holder.version, fetch)
    members.holder.answers = lambda pull: elsewhere(members, first.name)
    fetching = asyncio.create_task(second.fetch())
    await until(lambda: second.transfers.bytes_in == half, "half of it, from a peer that has no more")
    assert not fetching.done()
    fetch.have_bytes = len(PAYLOAD)
    arriving.grew()
    await fetching
    members.check(second)
    assert members.uploads(first) == 1.0


def elsewhere(members: Members, *names: str) -> Any:
    digest = members.holder.version.header.digest()
    return Refusal(wire.encode(wire.Elsewhere(digest, 5000, names)))


def twice(members: Members, *names: str) -> None:
    """The holder names these until somebody insists."""
    members.holder.answers = lambda pull: None if pull.insist else elsewhere(members, *names)


@pytest.mark.parametrize("members", [4, 16])
async def test_small_updates_are_passed_on_as_a_whole(members: int, started: Any) -> None:
    around = await started(SMALL, members)
    await around.fetch_all()
    around.check()
    assert max(around.uploads(peer) for peer in around.all) == updates.SMALL_DEGREE
    assert sum(peer.transfers.bytes_in for peer in around.others) == (members - 1) * len(SMALL)
    if members == 4:
        assert all(len(peer.asked) == 0 for peer in around.others), "no second request for anybody"


async def test_tiny_updates_come_from_the_holder(started: Any) -> None:
    members = await started(PAYLOAD[: updates.TINY_BYTES - 1])
    await members.fetch_all()
    members.check()
    assert members.uploads(members.holder) == 7.0
    assert all(len(peer.asked) == 0 for peer in members.others)


async def test_who_is_named_and_has_nothing_costs_one_try(started: Any) -> None:
    members = await started()
    asker = members.others[0]
    twice(members, "p2", "p3", "nobody")
    await members.fetch_all(asker)
    members.check(asker)
    assert [len(peer.asked) for peer in members.others[:3]] == [0, 1, 1]
    assert [pull.insist for _, pull in members.holder.asked] == [False, True]
    assert "nobody" in asker.transfers.gathering._failed, "and is not asked again soon"


@pytest.mark.parametrize("what", ["wrong bytes", "another version", "too long", "noise"])
async def test_a_liar_that_was_named_costs_one_try(what: str, started: Any) -> None:
    members = await started()
    asker, liar = members.others[:2]
    twice(members, liar.name)
    shown = update(SMALL) if what == "another version" else members.holder.version
    header = b"noise" if what == "noise" else wire.encode(wire.UpdateHeader(shown, 0, 0))
    size = len(PAYLOAD) + (what == "too long")
    liar.answers = lambda pull: PullSource(header, (bytes(size),), lambda: None)
    await members.fetch_all(asker)
    members.check(asker)
    assert len(liar.asked) == 1 and liar.name in asker.transfers.gathering._failed
    assert asker.transfers.gathering.from_others == 0


async def test_a_named_peer_that_dies_costs_nothing_twice(started: Any) -> None:
    members = await started()
    asker, named = members.others[:2]
    twice(members, named.name)
    given = members.holder.version
    half = len(PAYLOAD) // 2

    def half_then_die(pull: wire.PullUpdate) -> Any:
        if pull.have_bytes:
            members.hub.kill(named.name)
            return None
        header = wire.encode(wire.UpdateHeader(given, 0, len(PAYLOAD)))
        return PullSource(header, (PAYLOAD[:half],), lambda: None)

    named.answers = half_then_die
    await members.fetch_all(asker)
    members.check(asker)
    assert asker.transfers.bytes_in == len(PAYLOAD) and members.uploads(members.holder) == 0.5


async def test_a_named_peer_that_gives_empty_pieces_is_asked_once(started: Any) -> None:
    members = await started()
    asker, liar = members.others[:2]
    twice(members, liar.name)
    header = wire.encode(wire.UpdateHeader(members.holder.version, 0, len(PAYLOAD)))
    liar.answers = lambda pull: PullSource(header, (b"",), lambda: None)
    await members.fetch_all(asker)
    members.check(asker)
    assert len(liar.asked) == 1 and liar.name in asker.transfers.gathering._failed


async def test_a_wrong_signature_from_a_named_peer_is_not_the_holders(started: Any) -> None:
    members = await started()
    asker, liar = members.others[:2]
    twice(members, liar.name)
    right = members.holder.version
    forged = msgspec.structs.replace(right, signature=b"forged")
    asker.chain.signed = lambda version: version.signature == right.signature
    header = wire.encode(wire.UpdateHeader(forged, 0, 0))
    liar.answers = lambda pull: PullSource(header, (PAYLOAD,), lambda: None)
    await members.fetch_all(asker)
    members.check(asker)
    assert asker.version == right and liar.name in asker.transfers.gathering._failed


def test_a_beginning_of_another_size_is_dropped_and_nobody_is_blamed() -> None:
    version = update(SMALL)
    part = arriving_updates.Unfinished(version.header.update_digest, 1000)
    part.have_bytes = 10
    fetch = updates.Fetch(asking(), 5000, part, nobody())
    with pytest.raises(TransportError):
        fetch.begin(wire.encode(wire.UpdateHeader(version, 10, 2000)), 1990)
    assert fetch.unfinished is None


async def test_patience_with_named_peers_is_bounded(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "MAX_PATIENCE_S", 0.1)
    monkeypatch.setattr(updates, "LEAST_STALL_S", 0.05)
    members = await started()
    asker, named = members.others[:2]
    twice(members, named.name)
    named.transfers.fanout.arriving(0, 1)  # nothing of it ever comes
    await members.fetch_all(asker)
    members.check(asker)
    assert [pull.insist for _, pull in members.holder.asked] == [False, True]
    assert named.name in asker.transfers.gathering._failed


@pytest.mark.parametrize("slow", [True, False])
async def test_who_is_slow_is_waited_for_and_who_stalls_is_not(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "LEAST_STALL_S", 0.0)
    asked, here = [], 0
    whole: Any = updates.Fetch(asking(), 1, None, nobody())
    whole.unfinished = arriving_updates.Unfinished(bytes(32), 0)

    async def pull(peer: str, request: wire.PullUpdate) -> Any:
        nonlocal here
        asked.append(peer)
        if peer == "holder":
            return whole if request.insist else wire.Elsewhere(bytes(32), 3000, ("named",))
        if here:
            return whole
        here += slow
        await asyncio.Event().wait()

    async def check(fetch: Any) -> None: ...

    now = asyncio.get_running_loop().time
    gathers = updates.Gathering(Pulls(pull, lambda: here), now)
    assert await gathers.fetch("holder", asking(), check, nobody()) is whole
    assert asked == ["holder", "named", "named" if slow else "holder"]
    assert gathers.from_others == slow and ("named" in gathers._failed) != slow


async def test_who_had_only_what_others_left_of_the_time_is_not_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert updates.LEAST_STALL_S > arriving_updates.WAIT_S, '"later" must come in time'
    monkeypatch.setattr(updates, "LEAST_STALL_S", 0.05)
    now, asked = asyncio.get_running_loop().time(), []
    whole: Any = updates.Fetch(asking(), 1, None, nobody())
    whole.unfinished = arriving_updates.Unfinished(bytes(32), 0)

    async def pull(peer: str, request: wire.PullUpdate) -> Any:
        nonlocal now
        asked.append(peer)
        if peer == "holder":
            return whole if request.insist else wire.Elsewhere(bytes(32), 0, ("a", "b"))
        if len(asked) == 2:
            now += 0.03
            raise wire.PullRefused(PullRefusal.LATER)
        await asyncio.Event().wait()

    async def check(fetch: Any) -> None: ...

    gathers = updates.Gathering(Pulls(pull), lambda: now)
    assert await gathers.fetch("holder", asking(), check, nobody()) is whole
    assert len(set(asked)) == 3 and not any(peer in gathers._failed for peer in "ab")


async def test_a_round_trip_counts_in_the_choice_of_peers_and_the_wait_of_a_peer_does_not() -> None:
    now, size = 100.0, 1 << 20
    found = update(PAYLOAD)
    ways = {
        "far": (0.5, 0.0, 0),
        "near": (0.0, 0.0, 0),
        "below": (0.0, 3.0, 3000),
        "liar": (0.5, 0.0, 600_000),  # no more than the wait for its answer is believed
    }

    async def pull(peer: str, request: wire.PullUpdate) -> Any:
        """Pull as if all had the same bandwidth: a mebibyte in half a second."""
        nonlocal now
        round_trip_s, waits_s, says_ms = ways[peer]
        now += round_trip_s + waits_s
        fetch = updates.Fetch(request, size, None, nobody())
        fetch.begin(wire.encode(wire.UpdateHeader(found, 0, size, says_ms)), size)
        fetch.began_s = now
        now += 0.5
        fetch.write(0, memoryview(PAYLOAD))
        return fetch

    gathers = updates.Gathering(Pulls(pull), lambda: now)
    for peer in ways:
        await gathers._ask(peer, asking(), nobody())
    rates = {peer: gathers._rates.of(peer, 0.0) / size for peer in ways}
    assert rates == pytest.approx({"far": 1.0, "near": 2.0, "below": 2.0, "liar": 2.0})
    for number in range(8):
        request = wire.PullUpdate("run", 0, number)
        assert gathers._ordered(tuple(ways), set(), request)[-1] == "far"


async def test_requests_to_named_peers_are_bounded(started: Any) -> None:
    members = await started()
    asker, named = members.others[:2]
    twice(members, named.name)
    named.answers = lambda pull: updates.refuse(PullRefusal.LATER)
    await members.fetch_all(asker)
    members.check(asker)
    assert len(named.asked) == updates.MAX_PULLS


async def test_members_follow_a_chain_whose_updates_fan_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "TINY_BYTES", 1)
    async with Neighbourhood(tmp_path, seats=("one", "two", "three", "four", "five")) as around:
        members = [await around.member("one", genesis=True)]
        members += [await around.member(name) for name in ("two", "three", "four", "five")]
        for _ in range(3):
            await around.round(*members)
        heads = lambda: {member.head() for member in members}  # noqa: E731
        await until(lambda: len(heads()) == 1, "equal heads")
        assert members[0].number() >= 3
        assert sum(member.transfers.gathering.from_others for member in members) > 0
        assert not [line for member in members for line in member.refused() if "digest" in line]


async def test_who_cannot_pass_it_on_is_not_named(started: Any) -> None:
    members = await started()
    for peer in members.others:
        peer.chain.may_serve = False
    await members.fetch_all()
    members.check()
    assert members.uploads(members.holder) == 7.0


async def test_a_holder_that_gives_a_part_or_goes_on_naming_others_has_failed(started: Any) -> None:
    members = await started()
    asker = members.others[0]
    members.holder.answers = lambda pull: elsewhere(members, "p2")
    await asker.fetch()
    header = wire.encode(wire.UpdateHeader(members.holder.version, 0, len(PAYLOAD)))
    members.holder.answers = lambda pull: PullSource(header, (PAYLOAD[:1000],), lambda: None)
    await asker.fetch()
    assert asker.failures == ["busy", "garbage"] and asker.payload is None


class Pulls:
    """Stands for `updates.Pulling`."""

    me = "me"

    def __init__(
        self, pull: Callable[[str, wire.PullUpdate], Any], here: Callable[[], int] = lambda: 0
    ) -> None:
        self._pull, self._here = pull, here

    async def pull(self, peer: str, request: wire.PullUpdate, _watcher: Any) -> Any:
        return await self._pull(peer, request)

    def have_bytes(self, _fragment: int) -> int:
        return self._here()


def nobody() -> arriving_updates.Arriving:
    return arriving_updates.Arriving(1, lambda: 0.0)


def asking(fragment: int = 0, **more: Any) -> wire.PullUpdate:
    return wire.PullUpdate("run", fragment, 1, relays=True, **more)


# Fan-out over libp2p: four members, one holder.

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@pytest.mark.net
async def test_the_third_member_gets_an_update_from_the_others(tmp_path: Path) -> None:
    peers: list[Peer] = []
    try:
        for number in range(4):
            path = tmp_path / f"{number}" / "identity.key"
            initial = peers[0].transport.addresses()[:1] if peers else []  # type: ignore[attr-defined]
            identity = Identity.load_or_create(path)
            transport = HivemindTransport(identity, path, path.parent, LOOPBACK, initial_peers=initial)
            peers.append(Peer(transport, None if peers else PAYLOAD))
            await transport.start(peers[-1])  # type: ignore[arg-type]
        for one in peers:
            for other in peers:
                if one is not other:
                    addresses = other.transport.addresses()  # type: ignore[attr-defined]
                    one.transport.learn(other.name, addresses)  # type: ignore[attr-defined]
        holder, *others = peers
        async with asyncio.timeout(within_s(60)):
            await asyncio.gather(*(peer.fetch(holder.name) for peer in others))
        assert [peer.payload == PAYLOAD for peer in others] == [True] * 3
        assert holder.transfers.bytes_out <= 2.2 * len(PAYLOAD)
        assert sum(peer.transfers.bytes_in for peer in others) == 3 * len(PAYLOAD)
        assert sum(peer.transfers.gathering.from_others for peer in others) == 1
    finally:
        for peer in peers:
            await peer.transport.close()  # type: ignore[attr-defined]

"""The daemon's parts by themselves: outbound queues, tickets, update log, presence, resume note."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from daemon_kit import peer_on, signed_run, until, version
from presence_kit import our_record

from p2pdiloco import WIRE_VERSION
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.messages import Message, OfficeQuery, Progress
from p2pdiloco.core.api.types import WHOLE_RUN, Head, Reach, Stamp
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.pending import Unmerged
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.driver import IN_FLIGHT, MAX_QUEUED, Outbound
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network.discovery import REDIAL_HIDDEN_S, Presence, publish_runs
from p2pdiloco.daemon.payloads import Tickets, UpdateLog
from p2pdiloco.daemon.run_files.saved_state import FILE, Resume, write_resume
from p2pdiloco.errors import InvariantViolation, PeerUnreachable, RemoteError
from p2pdiloco.identity import Identity
from p2pdiloco_lab.memory_net import MemoryNetwork, MemoryTransport


def progress(step: int) -> Progress:
    heads = ((step, Head(step, bytes(32), 0, 0)),)
    return Progress(1, 0.1, step, 0, 0.0, None, True, True, True, heads, (), False, Reach.DIRECT, 0, True)


def query(term: int) -> OfficeQuery:
    return OfficeQuery(WHOLE_RUN, 0, term)


class Wire:
    """A transport whose sends wait for the test."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.gate = asyncio.Event()
        self.error: Exception | None = None
        self.under_way = 0

    async def send(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        self.under_way += 1
        try:
            await self.gate.wait()
        finally:
            self.under_way -= 1
        if self.error is not None:
            raise self.error
        self.sent.append((peer, data))
        return b""


def outbound(transport: Wire, post: Callable[[ev.SendFailed], None] = lambda event: None) -> Outbound:
    def encode(message: Message) -> bytes:
        return repr(message).encode()

    return Outbound(transport, encode, post)  # type: ignore[arg-type]


async def test_a_waiting_heartbeat_is_replaced_by_the_next() -> None:
    transport = Wire()
    out = outbound(transport)
    for number in range(IN_FLIGHT):
        out.send("a", query(number))
    await until(lambda: transport.under_way == IN_FLIGHT, "all senders are busy")
    for step in range(100):
        out.send("a", progress(step))
    out.send("a", query(99))
    transport.gate.set()
    await out.flush(5.0)
    texts = [data.decode() for _, data in transport.sent]
    beats = [text for text in texts if text.startswith("Progress")]
    assert len(beats) == 1 and "inner_step=99" in beats[0]
    assert beats[0].count("Head(") == 100, "with the news of those that it replaced"
    assert len(texts) == IN_FLIGHT + 2
    assert not out._queues and not out._senders  # nothing is remembered of a peer without messages


async def test_a_full_queue_drops_its_oldest_and_other_peers_do_not_notice() -> None:
    transport = Wire()
    out = outbound(transport)
    for number in range(IN_FLIGHT):
        out.send("slow", query(number))
    await until(lambda: transport.under_way == IN_FLIGHT, "all senders are busy")
    for number in range(MAX_QUEUED + 10):
        out.send("slow", query(1000 + number))
    out.send("quick", query(1))
    assert out.dropped == 10 and len(out._queues["slow"]) == MAX_QUEUED
    transport.gate.set()
    await out.flush(5.0)
    slow = [data.decode() for peer, data in transport.sent if peer == "slow"]
    assert "above_term=1009)" not in "".join(slow) and "above_term=1010)" in "".join(slow)
    assert [peer for peer, _ in transport.sent].count("quick") == 1


async def test_failures_become_events_and_refusals_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    transport = Wire()
    transport.gate.set()
    seen: list[Any] = []
    out = outbound(transport, seen.append)
    transport.error = PeerUnreachable("gone")
    out.send("a", query(1))
    await until(lambda: seen, "the failure")
    transport.error = RemoteError("busy")
    out.send("b", query(1))
    await until(lambda: "b refused a message: busy" in caplog.text, "the refusal")
    assert seen == [ev.SendFailed("a")] and out.bytes_sent == 0


async def test_closing_drops_what_is_left() -> None:
    transport = Wire()
    out = outbound(transport)
    out.send("a", query(1))
    await until(lambda: transport.under_way, "it is being sent")
    out.close()
    await until(lambda: not out._tasks, "the senders to end")
    assert not transport.sent


# --- tickets, update log -------------------------------------------------------------------------------


def test_a_ticket_opens_until_it_is_released_and_never_again() -> None:
    tickets = Tickets()
    first, second = tickets.put(b"abc"), tickets.put(bytearray(5))
    assert first != second and tickets.get(first) == b"abc" and tickets.held_bytes == 8
    tickets.release(first)
    tickets.release(first)
    assert len(tickets) == 1 and tickets.held_bytes == 5
    with pytest.raises(InvariantViolation):
        tickets.get(first)
    assert tickets.put(b"x") not in (first, second)


def chain(first: int, last: int, parent: bytes, term: int = 1) -> list[SignedVersion]:
    made: list[SignedVersion] = []
    for number in range(first, last + 1):
        made.append(version(number, parent, term))
        parent = made[-1].header.digest()
    return made


def test_the_update_log_keeps_the_newest_of_one_branch() -> None:
    log = UpdateLog(4)
    old = chain(1, 9, bytes(32))
    for each in old:
        log.add(each, b"%d" % each.header.number)
    assert [n for n in range(20) if log.get(0, n)] == [6, 7, 8, 9]
    # Another branch from version 7 on: what the left one had after it leads nowhere.
    for each in chain(8, 10, old[6].header.digest(), term=5):
        log.add(each, b"new")
    assert [n for n in range(20) if log.get(0, n)] == [7, 8, 9, 10]
    assert [log.get(0, n)[1] for n in (7, 8, 9)] == [b"7", b"new", b"new"]  # type: ignore[index]
    # A child of a version that it never had: nothing older can be replayed up to it.
    log.add(version(11, b"?" * 32), b"alien")
    assert [n for n in range(20) if log.get(0, n)] == [11]
    log.clear(0)
    assert log.get(0, 11) is None and log.get(7, 1) is None


# --- presence --------------------------------------------------------------------------------------------


async def test_presence_reads_what_it_can_and_ignores_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, hub = signed_run(tmp_path), MemoryNetwork()
    transports = {name: await peer_on(hub) for name in ("me", "new", "old", "odd")}
    key, addresses = wire.members_key(run.id), ("/memory/p2p/x",)
    records = {
        "new": wire.encode(wire.Presence(WIRE_VERSION, 7, "newcomer", addresses)),
        "old": wire.encode(wire.Presence(WIRE_VERSION + 1, 7, "stranger", addresses)),
        "odd": b"\xc1 not a record",
    }
    for name, record in records.items():
        await transports[name].put_record(key, record, 60.0)
    seen: list[ev.PresenceSeen] = []
    presence = Presence(transports["me"], run.id, our_record(), seen.append)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        await presence.look()
        await presence.look()
    assert seen[0].members.members == ((transports["new"].peer_id, 7),)
    assert seen[1].members is seen[0].members  # as long as nothing changes
    assert presence.names == {transports["new"].peer_id: "newcomer"}
    assert caplog.text.count(f"speaks protocol version {WIRE_VERSION + 1}") == 1  # said once


class Book(MemoryTransport):
    """Notes who is dialled and of whom is learned."""

    def __init__(self, hub: MemoryNetwork, peer: str) -> None:
        super().__init__(hub, peer)
        self.dialled: list[str] = []
        self.learned: dict[str, tuple[str, ...]] = {}

    async def connect(self, peer: str, addresses: Any) -> None:
        self.dialled.append(peer)

    def learn(self, peer: str, addresses: Any) -> None:
        self.learned[peer] = addresses


async def test_in_a_run_larger_than_a_group_only_some_are_dialled_and_all_are_listed(tmp_path: Path) -> None:
    run, hub = signed_run(tmp_path), MemoryNetwork()
    me = Book(hub, Identity.generate().peer_id)
    await me.start(FrontDoor())
    addresses = ("/memory/p2p/x",)
    record = wire.encode(wire.Presence(WIRE_VERSION, 7, "", addresses))
    others = [await peer_on(hub) for _ in range(9)]
    for transport in others:
        await transport.put_record(wire.members_key(run.id), record, 60.0)
    peers = [transport.peer_id for transport in others]
    seen: list[ev.PresenceSeen] = []
    presence = Presence(me, run.id, our_record(), seen.append, dial_at_once=4)  # type: ignore[arg-type]
    for _ in range(3):
        await presence.look()
    assert len(me.dialled) == len(set(me.dialled)) == 4  # the same ones at every look
    assert set(me.learned) == set(peers) - set(me.dialled) and set(me.learned.values()) == {addresses}
    assert len(seen[-1].members) == 9 and seen[-1].unreached == 0


async def test_those_that_cannot_be_dialled_are_tried_now_and_then_however_many_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presence = Presence(Book(MemoryNetwork(), "me"), "run", our_record(), lambda event: None)
    now, most = 0.0, 3
    monkeypatch.setattr("p2pdiloco.daemon.network.discovery.MAX_NAMED", most)
    monkeypatch.setattr(asyncio.get_running_loop().__class__, "time", lambda _: now)
    assert [presence._worth_a_try(f"p{i}") for i in range(5)] == [True] * most + [False] * 2
    assert not presence._worth_a_try("p0"), "soon enough"
    now = REDIAL_HIDDEN_S
    assert [presence._worth_a_try(f"q{i}") for i in range(5)] == [True] * most + [False] * 2
    assert set(presence._redial) == {"q0", "q1", "q2"}, "those that went away give their places up"


async def test_our_own_record_and_our_runs_are_published(tmp_path: Path) -> None:
    run, hub = signed_run(tmp_path), MemoryNetwork()
    me, other = await peer_on(hub), await peer_on(hub)
    presence = Presence(me, run.id, our_record(42), lambda event: None)
    tasks = [
        asyncio.create_task(presence.publish()),
        asyncio.create_task(publish_runs(me, lambda: [run.summary()])),
    ]
    try:
        await until(lambda: len(other._records) == 2, "both records at the other peer")
        record = (await other.get_records(wire.members_key(run.id)))[me.peer_id]
        assert wire.decode(record, wire.Presence) == wire.Presence(
            WIRE_VERSION, 42, "me", tuple(me.addresses())
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- the resume note -------------------------------------------------------------------------------------

LEFT = Unmerged((Stamp(1, 4),), Stamp(1, 5), True, (Stamp(1, 3), Stamp(1, 5)))


def core_that_takes(taken: list[Unmerged]) -> Any:
    def take_up(left: Unmerged) -> str:
        taken.append(left)
        return "rest"

    own = SimpleNamespace(take_up=take_up)
    return SimpleNamespace(fragments=[SimpleNamespace(index=i, own=own) for i in range(2)])


async def test_a_note_is_read_back_as_it_was_until_a_learner_has_it(tmp_path: Path) -> None:
    taken: list[Unmerged] = []
    write_resume(tmp_path, {1: LEFT})
    note = Resume(tmp_path, core_that_takes(taken))
    for _ in range(2):
        assert note.modes() == ("none", "rest")
    await note.use_up()
    assert Resume(tmp_path, core_that_takes(taken)).modes() == ("none", "none")
    assert taken == [LEFT, LEFT]


@pytest.mark.parametrize("content", [None, b"", b"not json", b'{"0": [[1, 4], null]}', b"\xff\xfe"])
def test_without_a_sound_note_nothing_is_taken(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    note = Resume(tmp_path, core_that_takes([]))
    assert note.modes() == ("none", "none")
    asyncio.run(note.use_up())
    assert [file.name for file in tmp_path.iterdir()] == ([] if content is None else [FILE + ".corrupt"])


def test_a_note_that_cannot_be_written_is_said_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_resume(tmp_path / "missing", {0: LEFT})
    assert "not saved" in caplog.text
    assert list(tmp_path.iterdir()) == []

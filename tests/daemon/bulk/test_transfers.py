"""Streams that p2pd's death cancels in the middle leave nothing behind: no waiting inbox, no pinned state."""

from __future__ import annotations

import asyncio
import errno
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from chain_kit import PaperChain, Welcome
from daemon_kit import version

from p2pdiloco.adapters.framing import encode_refusal, refused_by_peer
from p2pdiloco.adapters.spool import Spool
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import FetchFailure, PullRefusal, Unheard, Verdict, VersionFault
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk import pushes as arrivals_module
from p2pdiloco.daemon.bulk.pushes import (
    FORGET_S,
    MAX_PEERS,
    MAX_UNFINISHED,
    Landing,
    PushesIn,
    Rates,
    failure_of,
)
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.daemon.bulk.updates import KEEP_S, NotAsSigned, Unfinished, UnfinishedUpdates
from p2pdiloco.daemon.network.link import LinkMeters
from p2pdiloco.daemon.payloads import OutOfBudget, Tickets
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError
from p2pdiloco.hashing import content_digest
from p2pdiloco.ports import PullSink, Refusal


class StuckCompute:
    """A worker that is busy until it is let go."""

    def __init__(self, result: Any = None) -> None:
        self.free = asyncio.Event()
        self.vault = SimpleNamespace(layouts=[None], check_payload=None)
        self.pin = None
        self._result = result

    async def run(self, *_: Any) -> Any:
        await self.free.wait()
        return self._result


def transfers(compute: StuckCompute, posted: list[ev.Event]) -> Transfers:
    transport: Any = SimpleNamespace(peer_id="me")
    paper: Any = compute
    return Transfers(PaperChain(), transport, paper, Tickets(), posted.append, LinkMeters(transport))


async def cancelled(work: Any) -> None:
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_contribution_cut_while_it_is_judged_is_reported_as_cut() -> None:
    posted: list[ev.Event] = []
    header = SimpleNamespace(fragment=0, codec="int8", payload_digest=bytes(32))
    await cancelled(transfers(StuckCompute(), posted).pushes_in.payload_arrived(7, header, Landing(4, None)))  # type: ignore[arg-type]
    assert posted == [ev.PayloadBroken(7, Verdict.CUT)]


async def test_a_state_that_nobody_waits_for_any_more_is_unpinned() -> None:
    released = asyncio.Event()
    pin = SimpleNamespace(buffers=[], release=released.set)
    compute = StuckCompute((None, pin))
    served = transfers(compute, [])
    await cancelled(served.on_pull("peer", wire.PullState("run", 0, 0)))
    assert not released.is_set() and served.donating.pins == 1, "the worker is still at it"
    compute.free.set()
    await released.wait()
    assert served.donating.pins == 0


# After a cut only the missing bytes travel again: updates, states, contributions.

PAYLOAD = bytes(range(250)) * 40
DIGEST = content_digest(PAYLOAD)


def update_version() -> Any:
    import msgspec

    made = version(1, bytes(32))
    header = msgspec.structs.replace(made.header, update_digest=DIGEST, state_digest=b"s" * 32)
    return msgspec.structs.replace(made, header=header)


class DirectCompute:
    """Jobs run at once."""

    def __init__(self) -> None:
        self.vault = SimpleNamespace(layouts=[None], check_payload=lambda *_: None)

    async def run(self, job: Any, *arguments: Any) -> Any:
        return job(*arguments)


class Holders:
    """A transport to peers of which each serves so many bytes until it is cut."""

    peer_id = "me"

    def __init__(self, *served: int) -> None:
        self.served = list(served)
        self.asked: list[Any] = []
        self.honours_offset = True
        self.refuses = False
        self.busy = False

    def payload_bytes(self) -> tuple[int, int]:
        return 0, 0

    async def pull_into(self, peer: str, request: bytes, sink: PullSink, timeout_s: float) -> Refusal | None:
        asked = wire.decode(request, wire.PullUpdate)
        self.asked.append(asked)
        if self.busy:
            raise refused_by_peer(b"busy")
        if self.refuses:
            return Refusal(wire.encode(wire.Refused(PullRefusal.BUSY)))
        offset = asked.have_bytes if asked.have == DIGEST and self.honours_offset else 0
        sink.begin(wire.encode(wire.UpdateHeader(update_version(), offset)), len(PAYLOAD) - offset)
        most = self.served.pop(0)
        rest = PAYLOAD[offset : offset + most]
        for at in range(0, len(rest), 1000):
            sink.write(at, memoryview(rest)[at : at + 1000])
        if offset + most < len(PAYLOAD):
            raise TransportError("stream cut")
        return None


def fetching(holders: Holders) -> tuple[Transfers, DirectCompute, Tickets]:
    compute, tickets = DirectCompute(), Tickets()

    made = Transfers(
        PaperChain(update_bytes=len(PAYLOAD)),
        holders,  # type: ignore[arg-type]
        compute,  # type: ignore[arg-type]
        tickets,
        lambda _event: None,
        LinkMeters(holders),  # type: ignore[arg-type]
    )
    return made, compute, tickets


async def test_the_rest_of_an_update_comes_from_another_holder() -> None:
    holders = Holders(3000, 2500, 10_000)
    made, _, tickets = fetching(holders)
    for peer in ("a", "b"):
        assert isinstance(await made.fetch_update(ev.FetchUpdate(0, 1, peer)), ev.FetchFailed)
    answer = await made.fetch_update(ev.FetchUpdate(0, 1, "c"))
    assert isinstance(answer, ev.UpdateFetched)
    assert [asked.have_bytes for asked in holders.asked] == [0, 3000, 5500]
    assert bytes(tickets.get(answer.ticket)) == PAYLOAD
    assert made.bytes_in == len(PAYLOAD), "nothing travelled twice"


async def test_a_holder_of_something_else_begins_anew() -> None:
    holders = Holders(4000, 10_000)
    made, _, _ = fetching(holders)
    await made.fetch_update(ev.FetchUpdate(0, 1, "a"))
    holders.honours_offset = False
    answer = await made.fetch_update(ev.FetchUpdate(0, 1, "b"))
    assert isinstance(answer, ev.UpdateFetched) and made.bytes_in == len(PAYLOAD) + 4000


async def test_a_refusal_does_not_cost_what_is_here() -> None:
    holders = Holders(4000, 10_000)
    made, _, _ = fetching(holders)
    await made.fetch_update(ev.FetchUpdate(0, 1, "a"))
    holders.refuses = True
    await made.fetch_update(ev.FetchUpdate(0, 1, "b"))
    holders.refuses = False
    answer = await made.fetch_update(ev.FetchUpdate(0, 1, "c"))
    assert isinstance(answer, ev.UpdateFetched) and made.bytes_in == len(PAYLOAD)


async def test_rotten_bytes_from_the_first_holder_are_not_kept_nor_held_against_the_second() -> None:
    holders = Holders(4000, 10_000, 10_000)
    made, _, _ = fetching(holders)
    await made.fetch_update(ev.FetchUpdate(0, 1, "a"))
    ((unfinished, _),) = made.pulling.unfinished._kept.values()
    unfinished.payload[17] ^= 1
    assert isinstance(await made.fetch_update(ev.FetchUpdate(0, 1, "b")), ev.UpdateFetched)
    assert [asked.have_bytes for asked in holders.asked] == [0, 4000, 0]


def offered() -> PushesIn:
    return Welcome(DirectCompute(), Tickets()).pushes_in


def push(size: int, content: int = 0) -> Any:
    label = SimpleNamespace(payload_bytes=size, payload_digest=bytes([content]) * 32, fragment=0)
    return SimpleNamespace(signed=SimpleNamespace(header=label))


async def test_a_contribution_goes_on_where_it_was_cut_and_others_do_not() -> None:
    arrivals = offered()
    sink: Any = arrivals.on_push("a", push(1000))
    await sink.write(0, memoryview(b"x" * 600))
    sink.abort()
    stranger: Any = arrivals.on_push("b", push(1000))
    assert stranger.offset == 0
    again: Any = arrivals.on_push("a", push(1000))
    assert again.offset == 600 and bytes(again._landing.payload[:600]) == b"x" * 600
    stranger.abort()
    again.abort()
    assert arrivals._arriving_bytes == 1000, "what is kept counts"


async def test_what_is_kept_of_cut_pushes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = offered()
    for content in range(MAX_UNFINISHED + 5):
        sink: Any = arrivals.on_push("a", push(1000, content))
        await sink.write(0, memoryview(b"x" * 600))
        sink.abort()
    assert len(arrivals._unfinished) == MAX_UNFINISHED
    assert arrivals._arriving_bytes == MAX_UNFINISHED * 1000
    monkeypatch.setattr(arrivals_module, "SHARE_BYTES", 0)
    monkeypatch.setattr(arrivals_module, "MAX_ARRIVING_BYTES", 17_000)
    assert not isinstance(arrivals.on_push("b", push(5000, 200)), Refusal), "room is made"
    assert arrivals._arriving_bytes <= 17_000


async def test_a_label_that_the_core_does_not_believe_costs_nobody_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrivals = offered()
    sink: Any = arrivals.on_push("a", push(1000))
    await sink.write(0, memoryview(b"x" * 600))
    sink.abort()
    arrivals._memory.most_bytes = 1000

    def unsigned(event: Any) -> None:
        arrivals.decided(ev.AnswerTransfer(event.transfer, 0, Verdict.BAD_SIGNATURE))

    monkeypatch.setattr(arrivals, "_post", unsigned)
    assert isinstance(arrivals.on_push("liar", push(10_000, 1)), Refusal)
    assert arrivals.held_bytes == 1000


async def test_what_has_come_and_waits_to_be_judged_counts() -> None:
    arrivals = offered()
    counted: list[int] = []

    async def run(job: Any, *arguments: Any) -> Any:
        counted.append(arrivals.held_bytes)

    arrivals._compute.run = run  # type: ignore[method-assign]
    sink: Any = arrivals.on_push("a", push(1000))
    await sink.write(0, memoryview(bytes(1000)))
    arrivals._post = lambda event: arrivals.decided(  # type: ignore[method-assign]
        ev.AnswerTransfer(event.transfer, 0, Verdict.HELD)
    )
    await sink.finish()
    assert counted == [1000] and (arrivals.held_bytes, arrivals._tickets.pushed_bytes) == (0, 1000)

    made, compute, tickets = fetching(Holders(10_000))
    made.pulling._memory.count(made, tickets)
    counted.clear()

    async def check(job: Any, *arguments: Any) -> Any:
        counted.append(made.pulling._memory.claimed_bytes)
        return job(*arguments)

    compute.run = check  # type: ignore[method-assign]
    answer = await made.fetch_update(ev.FetchUpdate(0, 1, "a"))
    assert counted == [len(PAYLOAD)] and made.pulling._memory.claimed_bytes == len(PAYLOAD)
    assert made.fanout._arriving, "it is passed on until it is in the log"
    assert isinstance(answer, ev.UpdateFetched)
    tickets.release(answer.ticket)
    assert made.pulling._memory.claimed_bytes == 0 and not made.fanout._arriving


async def test_the_same_offered_twice_at_once_is_counted_once() -> None:
    arrivals = offered()
    both: list[Any] = [arrivals.on_push("a", push(1000)), arrivals.on_push("a", push(1000))]
    for sink in both:
        await sink.write(0, memoryview(b"x" * 600))
        sink.abort()
    assert arrivals._arriving_bytes == 1000, "what the first one left is gone, and counts no more"


async def test_what_nobody_goes_on_with_is_forgotten() -> None:
    now = 0.0
    arrivals = Welcome(DirectCompute(), Tickets(), now=lambda: now).pushes_in
    sink: Any = arrivals.on_push("a", push(1000))
    await sink.write(0, memoryview(b"x" * 600))
    sink.abort()
    parts, part = UnfinishedUpdates(lambda: now), Unfinished(DIGEST, 1000)
    part.have_bytes = 1
    parts.keep(0, part)
    now = KEEP_S - 1
    arrivals.forget_old()
    parts.forget_old()
    assert arrivals._arriving_bytes == 1000 and len(parts) == 1
    now = KEEP_S + 1
    arrivals.forget_old()
    parts.forget_old()
    assert arrivals._arriving_bytes == 0 and len(parts) == 0


async def test_a_busy_holder_does_not_cost_what_is_here_and_a_fetched_state_frees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holders = Holders(4000, 10_000)
    made, _, _ = fetching(holders)
    await made.fetch_update(ev.FetchUpdate(0, 1, "a"))
    holders.busy = True
    answer = await made.fetch_update(ev.FetchUpdate(0, 1, "b"))
    assert answer == ev.FetchFailed(FetchFailure.BUSY) and len(made.pulling.unfinished) == 1
    holders.busy = False

    async def copied(_effect: ev.FetchState) -> Any:
        return SimpleNamespace(version=None, watermarks=())

    monkeypatch.setattr(made.copying, "fetch", copied)
    copy = await made.fetch_state(ev.FetchState(0, 1, "c"))
    assert isinstance(copy, ev.StateFetched) and len(made.pulling.unfinished) == 0


async def test_what_finds_no_place_in_memory_lies_on_the_disk_and_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_module, "SHARE_BYTES", 1500)
    spool, tickets = Spool(tmp_path, spare_bytes=0), Tickets()
    arrivals = Welcome(DirectCompute(), tickets, spool).pushes_in
    tickets.put(bytes(100_000))  # our own: not of this share
    arrivals.on_push("a", push(1000, 1))
    for _ in range(2):
        second: Any = arrivals.on_push("b", push(1000, 2))
        await second.write(second.offset, memoryview(bytes([second.offset // 100]) * 300))
        second.abort()
    assert (arrivals.held_bytes, arrivals.spooled_bytes) == (1000, 1000)
    found = bytearray(600)
    second._landing.payload.read(0, memoryview(found))
    assert found == bytes([0]) * 300 + bytes([3]) * 300
    tickets.put(bytes(500), pushed=True)
    small: Any = arrivals.on_push("c", push(1, 3))
    assert arrivals.spooled_bytes == 1001, "what waits to be merged counts"
    monkeypatch.setattr(Spool, "_put", _full)
    with pytest.raises(TransportError):
        await small.write(0, memoryview(b"x"))
    small.abort()
    del small, second
    gc.collect()  # the error that was raised refers to it
    assert arrivals.spooled_bytes == 1000, "a full disk leaves nothing behind of it"
    arrivals.forget_all()
    assert arrivals.spooled_bytes == 0
    spool.close()


def _full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_more_than_any_budget_is_refused_also_if_the_core_takes_it() -> None:
    core = Welcome(DirectCompute(), Tickets())
    arrivals, posted = core.pushes_in, core.heard
    large = arrivals.on_push("a", push(arrivals_module.MAX_ARRIVING_BYTES + 1))
    assert isinstance(large, Refusal) and not posted
    absurd = arrivals.on_push("a", push(arrivals_module.ABSURD_BYTES + 1))
    assert isinstance(absurd, Refusal) and [type(event) for event in posted] == [
        ev.Offered,
        ev.PayloadBroken,
    ], "the core refuses and counts, or hears that it does not come"
    assert arrivals.held_bytes == 0


async def test_room_is_not_made_by_what_is_about_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = offered()
    sinks: list[Any] = [arrivals.on_push(peer, push(1000, i)) for i, peer in enumerate("ab")]
    for sink in sinks:
        await sink.write(0, memoryview(b"x" * 600))
        sink.abort()
    arrivals._memory.most_bytes = 100
    assert arrivals.on_push("a", push(1000, 0)).offset == 600  # type: ignore[union-attr]
    longer = arrivals.on_push("b", push(1200, 1))
    assert isinstance(longer, Refusal), "of another size: it begins anew, and there is no room"


async def test_a_tight_budget_forgets_what_is_kept_of_others_before_it_refuses_a_fetch() -> None:
    holders = Holders(3000, 10_000, 10_000)
    made, _, _ = fetching(holders)
    made.pulling._memory.count(made)
    await made.fetch_update(ev.FetchUpdate(0, 1, "a"))
    assert made.held_bytes == len(PAYLOAD)
    made.pulling._memory.most_bytes = len(PAYLOAD)
    answer = await made.fetch_update(ev.FetchUpdate(1, 1, "b"))
    assert isinstance(answer, ev.UpdateFetched) and made.held_bytes == 0
    await made.fetch_update(ev.FetchUpdate(0, 1, "a"))
    assert [asked.have_bytes for asked in holders.asked] == [0, 0, 0] and not made.pulling._memory.refused
    made.pulling._memory.most_bytes = len(PAYLOAD) - 1
    answer = await made.fetch_update(ev.FetchUpdate(1, 1, "b"))
    assert answer == ev.FetchFailed(FetchFailure.BUSY) and made.pulling._memory.refused == 1


async def test_the_downlink_is_timed_while_bytes_come_not_while_we_ask() -> None:
    holders = Holders(3000, 10_000)
    made, _, _ = fetching(holders)
    heard: list[tuple[str, int]] = []

    downlink = made._meters.downlink
    downlink.begin = lambda: heard.append(("from", made.bytes_in))  # type: ignore[method-assign]
    downlink.end = lambda: heard.append(("to", made.bytes_in))  # type: ignore[method-assign]
    holders.refuses = True
    await made.fetch_update(ev.FetchUpdate(0, 1, "a"))
    assert not heard
    holders.refuses = False
    for peer in "ab":
        await made.fetch_update(ev.FetchUpdate(0, 1, peer))
    assert heard == [("from", 0), ("to", 3000), ("from", 3000), ("to", len(PAYLOAD))]


# Every word with which a peer gives nothing: how it crosses the wire, and what the core hears of it.

PULLS = {
    PullRefusal.NOT_READY: FetchFailure.NOT_READY,
    PullRefusal.BUSY: FetchFailure.BUSY,
    PullRefusal.GONE: FetchFailure.GONE,
    PullRefusal.BEHIND: FetchFailure.BEHIND,
    PullRefusal.LATER: FetchFailure.LATER,
    PullRefusal.OTHER_RUN: FetchFailure.FALSE,
    PullRefusal.UNKNOWN_RUN: FetchFailure.FALSE,
    PullRefusal.UNKNOWN_FRAGMENT: FetchFailure.FALSE,
    PullRefusal.NOT_HERE: FetchFailure.FALSE,
    PullRefusal.BEYOND_THE_END: FetchFailure.FALSE,
    PullRefusal.NOT_A_MEMBER: FetchFailure.FALSE,
}
UNHEARD = {
    Unheard.BUSY: FetchFailure.BUSY,
    Unheard.NOT_READY: FetchFailure.NOT_READY,
    Unheard.NOT_ADMITTED: FetchFailure.NOT_READY,
    Unheard.BANNED: FetchFailure.NOT_READY,
    Unheard.EXCLUDED: FetchFailure.NOT_READY,
}


@pytest.mark.parametrize("why", PullRefusal)
def test_what_a_refused_pull_is_to_the_core(why: PullRefusal) -> None:
    error = wire.refused(wire.refuse(why))
    assert error.why is why and str(error) == str(why)
    assert failure_of(error) is PULLS[why]


@pytest.mark.parametrize("why", Unheard)
def test_what_it_is_to_the_core_that_a_peer_looks_at_nothing(why: Unheard) -> None:
    error = refused_by_peer(encode_refusal(RemoteError(why.value, "too many")))
    assert error.unheard is why and failure_of(error) is UNHEARD[why]


def test_a_code_of_another_build_is_garbage_and_a_fault_is_the_holders() -> None:
    unknown = msgspec.msgpack.encode(["Refused", "no-mood"])
    with pytest.raises(RemoteError, match="garbage"):
        wire.decode(unknown, wire.Refused)
    for fault in ("garbage", "unreachable", "gone", "later"):
        error = refused_by_peer(encode_refusal(RemoteError(fault)))
        assert error.unheard is None and failure_of(error) is FetchFailure.FALSE
    for found in (
        RemoteError("garbage"),
        NotAsSigned(Verdict.WRONG_DIGEST),
        NotAsSigned(VersionFault.SIGNATURE),
    ):
        assert failure_of(found) is FetchFailure.FALSE


def test_what_the_world_does_and_our_own_lack_of_room_are_nobodys_fault() -> None:
    assert failure_of(OutOfBudget("busy")) is FetchFailure.BUSY
    assert failure_of(PeerUnreachable("gone")) is FetchFailure.UNREACHABLE
    assert failure_of(TransportError("cut")) is FetchFailure.CUT


# Rates, by which peers are chosen: moving averages that are forgotten.


def test_the_newest_transfer_counts_half_and_old_ones_are_forgotten() -> None:
    now_s = 0.0
    rates = Rates(lambda: now_s)
    assert rates.of("a", 7.0) == 7.0
    assert rates.measured("a", 100, 1.0) == 100.0
    rates.measured("a", 100, 0.5)
    assert rates.of("a", 7.0) == 150.0
    now_s = FORGET_S + 1
    assert rates.of("a", 7.0) == 7.0, "who was slow once is tried again"
    rates.measured("a", 100, 1.0)
    assert rates.of("a", 7.0) == 100.0
    for number in range(MAX_PEERS):
        rates.measured(str(number), 1, 1.0)
    assert rates.of("a", 7.0) == 7.0 and rates.of("0", 7.0) == 1.0

"""Windows and allowances under a virtual clock: what a link and a person permit."""

from __future__ import annotations

import asyncio
import heapq

import pytest
from deadlines import within_s

from p2pdiloco.adapters.flow import (
    CHUNK_BYTES,
    LEAST_WINDOW_BYTES,
    TARGET_S,
    Allowance,
    Flow,
    Limits,
    Sending,
)


class Link:
    """A queue that drains at a rate, and a way back: when each chunk is acknowledged."""

    def __init__(self, bytes_per_s: float, round_trip_s: float) -> None:
        self.rate, self.round_trip_s = bytes_per_s, round_trip_s
        self.now, self.free_s = 0.0, 0.0
        self.queue: list[tuple[float, int, int, float]] = []
        self.count = 0
        self.carried = 0
        self.waits: list[float] = []

    def send(self, size: int) -> None:
        self.free_s = max(self.free_s, self.now) + size / self.rate
        self.waits.append(self.free_s - self.now)
        self.count += 1
        heapq.heappush(self.queue, (self.free_s + self.round_trip_s, self.count, size, self.now))


async def fill(link: Link, flow: Flow, until_s: float) -> None:
    """Send whatever the window permits, acknowledge what arrived, for so long."""
    loop = asyncio.get_running_loop()
    while link.now < until_s:
        size = flow.chunk_bytes
        claim = loop.create_task(flow.claim(size))
        await asyncio.sleep(0)
        while not claim.done() and link.now < until_s:
            arrives_s, _, bytes_, sent_s = heapq.heappop(link.queue)
            link.now = arrives_s
            link.carried += bytes_
            flow.arrived(bytes_, arrives_s - sent_s)
            for _ in range(3):
                await asyncio.sleep(0)
        if not claim.done():
            claim.cancel()
            return
        link.send(size)


@pytest.mark.parametrize("mbit", [1, 10, 100, 1000])
@pytest.mark.parametrize("round_trip_s", [0.001, 0.02, 0.1])
async def test_a_link_is_filled_and_nothing_waits_long(mbit: int, round_trip_s: float) -> None:
    link = Link(mbit * 125e3, round_trip_s)
    flow = Flow(lambda: link.now)
    await fill(link, flow, 5.0)  # time to find out
    link.carried, link.waits = 0, []
    await fill(link, flow, 15.0)
    assert link.carried > 0.85 * 10.0 * link.rate
    least_s = (LEAST_WINDOW_BYTES + 8192) / link.rate
    assert sorted(link.waits)[int(0.95 * len(link.waits))] < max(2.5 * TARGET_S, least_s)


@pytest.mark.parametrize(("mbit", "most_s"), [(1, 0.4), (10, 0.3)])
def test_windows_of_several_peers_share_a_link_without_a_word(mbit: int, most_s: float) -> None:
    """Three streams, each begun while the others' queue is there already: a control message, which has to
    wait behind what is on its way, does not wait three times as long as behind one."""
    link = Link(mbit * 125e3, 0.05)
    flows = [Flow(lambda: link.now) for _ in range(3)]
    owners: dict[int, Flow] = {}

    def fill_up(flow: Flow) -> None:
        size = flow.chunk_bytes
        while flow.claim_now(size):
            link.send(size)
            owners[link.count] = flow
            size = flow.chunk_bytes

    for number, flow in enumerate(flows):
        fill_up(flow)
        while link.now < 3.0 * (number + 1) + (20.0 if flow is flows[-1] else 0.0):
            link.now, key, size, sent_s = heapq.heappop(link.queue)
            link.carried += size
            sender = owners.pop(key)
            sender.arrived(size, link.now - sent_s)
            fill_up(sender)
        link.waits = link.waits if flow is flows[-1] else []
    assert link.carried > 0.9 * link.now * link.rate
    assert sorted(link.waits)[int(0.95 * len(link.waits))] < most_s


async def test_bulk_gives_way_when_others_use_the_link() -> None:
    link = Link(2.5e6, 0.02)
    flow = Flow(lambda: link.now)
    await fill(link, flow, 5.0)
    alone = flow.window_bytes
    link.rate /= 10
    await fill(link, flow, 15.0)
    assert flow.window_bytes < alone / 3
    link.rate *= 10
    await fill(link, flow, 50.0)
    assert flow.window_bytes > alone / 2


async def test_chunks_that_are_lost_make_room() -> None:
    flow = Flow(lambda: 0.0)
    sending = Sending(flow, 1 << 20, lambda: 0.0, 1e9)
    while flow.in_flight_bytes + 16_384 <= flow.window_bytes:
        await sending.claim(16_384)
    other = asyncio.create_task(flow.claim(16_384))
    await asyncio.sleep(0)
    assert not other.done()
    sending.close()
    await other
    assert flow.in_flight_bytes == 16_384
    assert not sending.arrived(1), "acknowledged, but not on the way"


async def test_a_receiver_has_at_most_as_much_on_the_way_as_it_wants() -> None:
    flow = Flow(lambda: 0.0)
    flow.window_bytes = 1 << 20
    sending = Sending(flow, 20_000, lambda: 0.0, 1e9)
    assert sending.chunk_bytes <= 10_000
    await sending.claim(10_000)
    await sending.claim(10_000)
    third = asyncio.create_task(sending.claim(1_000))
    await asyncio.sleep(0)
    assert not third.done()
    assert sending.arrived(4_000)
    await third
    assert not sending.arrived(17_001)
    assert not sending.arrived(0)


async def test_who_waits_for_room_has_asked_for_an_acknowledgement() -> None:
    flow = Flow(lambda: 0.0)
    flow.window_bytes = 1 << 20
    sending = Sending(flow, 1 << 24, lambda: 0.0, 1e9)
    asked = []
    for _ in range(8):
        await sending.claim(65_536)
        asked.append(sending.wants_answer())
    assert asked == [False, False, False, True] * 2, "several times in a window, not with every chunk"
    await sending.claim(65_536)
    assert not sending.wants_answer()
    assert sending.wants_answer(now=True)
    assert not sending.wants_answer(now=True), "there is nothing more to ask for"


@pytest.mark.parametrize("mbit", [2, 20, 200])
async def test_our_own_queue_never_comes_to_count_as_the_links_length(mbit: int) -> None:
    link = Link(mbit * 125e3, 0.04)
    flow = Flow(lambda: link.now)
    await fill(link, flow, 900.0 / mbit**0.5)
    link.waits = []
    await fill(link, flow, 1000.0 / mbit**0.5)
    assert sorted(link.waits)[int(0.95 * len(link.waits))] < 2.5 * TARGET_S


async def test_an_allowance_is_kept_over_any_ten_seconds() -> None:
    now = 0.0
    allowance = Allowance(1e6, lambda: now)
    went: list[tuple[float, int]] = []
    for round_ in range(400):
        size = 4096 * (1 + round_ % 25)
        waits_s = allowance._charge(size, float("inf"))
        now += max(0.0, waits_s)
        went.append((now, size))
        if round_ == 200:
            now += 30.0  # nothing to send for a while: that is not saved up
    for start, _ in went:
        within = sum(size for at, size in went if start <= at < start + 10.0)
        assert within * 1.04 <= 1.05 * 10.0 * 1e6
    assert sum(size for _, size in went) * 1.04 > 0.95 * 1e6 * (now - 30.0)


async def test_control_messages_are_paid_by_bulk_but_never_wait() -> None:
    limits = Limits.of(8e6, 0, lambda: 0.0)
    assert limits.download is None and limits.upload is not None
    for _ in range(10_000):
        limits.control(1000, 1000)
    wait_s = limits.upload._charge(1, float("inf"))
    assert 0.5 < wait_s <= 1.0, "and not for more than a second"


async def test_limits_that_change_hold_for_streams_that_are_under_way() -> None:
    now = [100.0]
    limits = Limits.of(8e6, 0, lambda: now[0])
    upload = limits.upload
    assert upload is not None and upload.bytes_per_s == 1e6
    limits.allow(800_000, 4e6, lambda: now[0])
    assert upload.bytes_per_s == 100_000 and limits.upload is upload
    assert limits.download is not None and limits.download.bytes_per_s == 500_000
    limits.allow(0, 0, lambda: now[0])
    assert limits.upload is None and limits.download is None
    assert upload.chunk_bytes == CHUNK_BYTES
    await asyncio.wait_for(upload.take(1 << 30), within_s(1.0))  # a stream that has it still
    await asyncio.wait_for(upload.take(1 << 30), within_s(1.0))


def test_what_went_over_the_link_is_counted_whatever_became_of_it() -> None:
    limits = Limits()
    limits.handed_over(1000)
    limits.sent(500)
    limits.received(200)
    limits.control(30, 40)
    assert (limits.carried_out_bytes, limits.carried_in_bytes) == (1040 + 230, 208 + 240)

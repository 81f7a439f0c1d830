"""Bounds of what waits to be passed on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chain_kit import no_meter
from daemon_kit import until
from fanout_kit import PAYLOAD, update

from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk import updates
from p2pdiloco.daemon.bulk import updates as arriving_updates
from p2pdiloco.daemon.bulk.updates import MAX_GIVEN, MAX_SERVED, Fanout
from p2pdiloco.errors import RemoteError
from p2pdiloco.ports import PullSource, Refusal


def asking(fragment: int = 0, **more: Any) -> wire.PullUpdate:
    return wire.PullUpdate("run", fragment, 1, relays=True, **more)


async def test_places_tables_and_waiting_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    fan = Fanout("me", no_meter(), lambda: now)
    found = (update(PAYLOAD), PAYLOAD)
    given: list[Any] = [await fan.serve(f"q{i}", asking(insist=True), found) for i in range(MAX_SERVED + 10)]
    assert all(isinstance(source, PullSource) for source in given)
    assert len(next(iter(fan._given.values())).takers) == MAX_SERVED
    answer: Any = await fan.serve("late", asking(), found)
    named = wire.decode(answer.answer, wire.Elsewhere)
    assert len(named.peers) == wire.MAX_NAMED and named.patience_ms == 30_000
    now = 2 * updates.FRESH_S
    assert isinstance(await fan.serve("late", asking(), found), Refusal), "streams are still under way"
    for source in given:
        source.release()
    now = 4 * updates.FRESH_S
    assert isinstance(await fan.serve("late", asking(), found), PullSource), "it is given out anew"
    for fragment in range(MAX_GIVEN + 10):
        await fan.serve("q", asking(fragment), found)
    assert len(fan._given) == MAX_GIVEN
    monkeypatch.setattr(updates, "MAX_WAITING", 0)
    fan.arriving(0, 1)
    waits: Any = await fan.serve("z", asking(version=found[0].header.digest()), None)
    assert wire.decode(waits.answer, wire.Refused).reason is PullRefusal.LATER


async def test_invented_versions_take_no_place_and_one_peer_not_all_that_wait() -> None:
    now = 0.0
    fan = Fanout("me", no_meter(), lambda: now)
    arriving, true = fan.arriving(0, 1), update(PAYLOAD)
    waiting = [
        asyncio.create_task(fan.serve("liar", asking(version=bytes([i]) * 32), None))
        for i in range(updates.MAX_WAITING_PER_PEER)
    ]
    await until(lambda: fan._waiting.total() == len(waiting), "all of them to wait")
    one_more: Any = await fan.serve("liar", asking(version=true.header.digest()), None)
    assert wire.decode(one_more.answer, wire.Refused).reason is PullRefusal.LATER
    child = asyncio.create_task(fan.serve("child", asking(version=true.header.digest()), None))
    await until(lambda: fan._waiting.total() == len(waiting) + 1, "the child too")
    now = 1.5
    part = arriving_updates.Unfinished(true.header.update_digest, len(PAYLOAD))
    part.payload[:], part.have_bytes = PAYLOAD, len(PAYLOAD)
    arriving.begun(true, part)
    for answer in await asyncio.gather(*waiting):
        assert wire.decode(answer.answer, wire.Refused).reason is PullRefusal.GONE  # type: ignore[union-attr]
    given = await child
    assert isinstance(given, PullSource)
    assert wire.decode(given.header, wire.UpdateHeader).waited_ms == 1500
    for i in range(5):
        late: Any = await fan.serve("liar", asking(version=bytes([i]) * 32), None)
        assert wire.decode(late.answer, wire.Refused).reason is PullRefusal.GONE
    assert len(fan._given) == 1, "only what there is"


async def test_a_place_comes_free_when_the_peer_stays_away() -> None:
    now = 0.0
    fan = Fanout("me", no_meter(), lambda: now)
    found = (update(PAYLOAD), PAYLOAD)
    one, two = [await fan.serve(peer, asking(), found) for peer in ("one", "two")]
    assert isinstance(one, PullSource) and isinstance(two, PullSource)
    one.release()  # cut
    two.delivered()
    two.release()
    assert isinstance(await fan.serve("three", asking(), found), Refusal), "it may come back"
    now = updates.IDLE_S + 1
    assert isinstance(await fan.serve("three", asking(), found), PullSource)


async def test_an_update_that_was_not_fetched_is_not_passed_on() -> None:
    fan = Fanout("me", no_meter(), lambda: 0.0)
    arriving = fan.arriving(0, 1)
    digest = update(PAYLOAD).header.digest()
    waiting = asyncio.create_task(fan.serve("child", asking(version=digest), None))
    await until(lambda: fan._waiting.total() == 1, "the child to wait")
    fan.failed(0, arriving)
    answer: Any = await waiting
    assert wire.decode(answer.answer, wire.Refused).reason is PullRefusal.GONE
    assert not fan._arriving and not fan._waiting and not fan._given
    with pytest.raises(RemoteError):
        wire.decode(wire.encode(wire.Elsewhere(digest, 1, ("p",) * 9)), wire.Elsewhere)

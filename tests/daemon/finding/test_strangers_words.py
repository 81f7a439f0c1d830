"""What strangers say of the world in an open run: nobody listens, once somebody counts by work."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import daemon_kit
import pytest
from daemon_kit import Neighbourhood, QuickMember, Rogue, until

from p2pdiloco.core.api.messages import Progress
from p2pdiloco.core.api.types import Reach
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import MAX_LOSS, PeerRow, sane_loss
from p2pdiloco.daemon.member import OwnPeer
from p2pdiloco.daemon.network.reach import Reachability
from p2pdiloco.release import WIRE_VERSION


def heartbeat(loss: float) -> Progress:
    """Heartbeat of somebody who says that it learns."""
    said: dict[str, Any] = dict.fromkeys(("learning", "stands"), True)
    said |= dict.fromkeys(("confirmed", "saved", "thin", "votes"), False)
    return Progress(1, 0.1, 1, 1, 1.0, loss, heads=(), offices=(), reach=Reach.DIRECT, **said)


async def tell(rogue: Rogue, member: QuickMember, merges: int) -> None:
    """A stranger's records: a loss, data that all are begun, and heartbeats."""
    heldout = wire.HeldoutLoss(merges, -1.0, 1)
    record = wire.Presence(WIRE_VERSION, 1, "rogue", ("/memory/p2p/x",), True, heldout)
    await rogue.transport.put_record(wire.members_key(rogue.run.id), wire.encode(record), 60.0)
    reading = wire.encode(wire.Reading("data", 1, b"\xff"))
    await rogue.transport.put_record(wire.reading_key(rogue.run.id), reading, 60.0)
    await rogue.say(member, heartbeat(-1.0))
    await until(lambda: rogue.id in member.core.shared.view.members(asyncio.get_running_loop().time()))


def row(member: QuickMember, peer: str) -> PeerRow:
    """What a member shows of that peer."""
    rows = member.report.snapshot(asyncio.get_running_loop().time()).peers
    return next(row for row in rows if row.peer == peer)


class Dials:
    """Dial-backs that note whose question is a stranger's."""

    def __init__(self) -> None:
        self.strangers: list[bool] = []

    async def answer(self, _sender: str, _query: wire.ReachQuery, stranger: bool) -> wire.ReachAnswer:
        self.strangers.append(stranger)
        return wire.ReachAnswer(())


async def test_who_has_not_worked_is_not_asked_what_the_world_sees_of_us_and_is_answered_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = Reachability(None, "public")  # type: ignore[arg-type]
    monkeypatch.setattr(daemon_kit, "OwnPeer", lambda *parts: OwnPeer(*parts, reach))
    async with Neighbourhood(tmp_path) as swarm:
        a = await swarm.member("a", genesis=True)
        monkeypatch.setattr(daemon_kit, "OwnPeer", OwnPeer)
        b, rogue, dials = await swarm.member("b"), await swarm.rogue(), Dials()
        monkeypatch.setattr(a.peer.door, "_dials_back", dials)
        for _ in range(3):
            await swarm.round(a, b)
        assert reach._is_member(b.transport.peer_id) and not reach._is_member(rogue.id)
        for transport in (rogue.transport, b.transport):
            query = wire.QUERY + wire.encode(wire.ReachQuery((4001,)))
            await transport.send(a.transport.peer_id, query, 2.0)
        assert dials.strangers == [True, False]


async def test_losses_and_shards_are_those_of_whoever_has_worked(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as swarm:
        a = await swarm.member("a", genesis=True)
        b = await swarm.member("b")
        rogue = await swarm.rogue()
        for _ in range(3):
            await swarm.round(a, b)
        assert any(record.voters() for record in a.core.shared._records)
        await tell(rogue, a, a.measurements._vault.merges)
        await a.presence.look()
        assert rogue.id in a.presence.names and a.measurements.by != rogue.id
        assert await a.sharing.look() == 0
        assert row(a, rogue.id).loss is None
        # Somebody else, to whom it has a mark, believes it.
        b.core.shared.has_worked = lambda _peer: True  # type: ignore[method-assign]
        await tell(rogue, b, b.measurements._vault.merges)
        await b.presence.look()
        assert b.measurements.by == rogue.id and await b.sharing.look() == 1
        assert row(b, rogue.id).loss == -1.0


async def test_a_number_that_can_be_no_loss_is_none(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as swarm:
        a = await swarm.member("a", genesis=True)
        for loss in (math.nan, math.inf, 1e30, -1e30):
            assert sane_loss(loss) is None
            a.measurements.heard("peer", wire.HeldoutLoss(a.measurements._vault.merges + 1, loss, 1))
            a.measurements.measured(loss, 1)
            assert a.measurements.newest is None
        rogue = await swarm.rogue()
        await rogue.say(a, heartbeat(1e308))
        now = asyncio.get_running_loop().time
        await until(lambda: rogue.id in a.core.shared.view.members(now()))
        assert row(a, rogue.id).loss is None and sane_loss(MAX_LOSS) == MAX_LOSS
        assert a.report.status(now()).loss == pytest.approx(a.report.snapshot(now()).loss)

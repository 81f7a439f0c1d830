"""A visitor among members, which asks for the status of a run and for credits; keepers that lie."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from daemon_kit import QuickMember, Rogue, until

from p2pdiloco.cli import credits_report
from p2pdiloco.cli.credits_report import CreditsSearch, RunCredits, collect_credits
from p2pdiloco.cli.status_command import Search
from p2pdiloco.config.values import peer_in
from p2pdiloco.daemon import history, wire
from p2pdiloco.daemon.display.snapshot import NodeState, PeerRow, StatusReport
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.wire import CreditsAnswer, CreditsQuery
from p2pdiloco.identity import Identity
from p2pdiloco.release import WIRE_VERSION
from p2pdiloco_lab.memory_net import MemoryNetwork, MemoryTransport

RUN = "ab" * 32


class Network:
    """Members of a run in memory that tell of it as they are told, and visitors who ask."""

    def __init__(self) -> None:
        self.hub = MemoryNetwork()
        self._started: list[MemoryTransport] = []

    async def _start(self, door: FrontDoor) -> MemoryTransport:
        transport = self.hub.transport(Identity.generate().peer_id, [])
        self._started.append(transport)
        await transport.start(door)
        return transport

    async def visitor(self) -> MemoryTransport:
        return await self._start(FrontDoor())

    async def add(self, state: NodeState | None = "training", incarnation: int = 1, run: str = RUN) -> str:
        """A member; without a state it refuses to answer. `run`: what it says that its answer is about."""
        door = FrontDoor()
        transport = await self._start(door)
        peer = transport.peer_id
        if state is not None:
            report = StatusReport(
                run_name="test", run_id=run, answered_by=peer, state=state, members=(PeerRow(peer=peer),)
            )
            door.enter(RUN, None, SimpleNamespace(status=lambda now, audience: report))
        summary = wire.RunSummary(RUN, "test", peer)
        await transport.put_record(wire.RUNS_KEY, wire.encode(wire.RunList((summary,))), 60)
        record = wire.Presence(WIRE_VERSION, incarnation, "x", tuple(transport.addresses()))
        await transport.put_record(wire.members_key(RUN), wire.encode(record), 60)
        return peer

    async def aclose(self) -> None:
        for transport in self._started:
            await transport.close()


def quick_keepers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let keepers count at once."""
    monkeypatch.setattr(history, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(history, "AGAIN_S", 0.1)


async def asked(
    monkeypatch: pytest.MonkeyPatch, peer: Rogue, *members: Any, named: Sequence[Any] = (), **wish: Any
) -> RunCredits:
    """What somebody collects from these, the first of which reports. `named`: by --join."""
    first = next(m for m in members if isinstance(m, QuickMember))

    @contextlib.asynccontextmanager
    async def visiting(join: Sequence[str], run: str, _timeout_s: float) -> AsyncIterator[Any]:
        yield peer.transport, Search(run, map(peer_in, join)), first.report.status(0.0)

    async def reach(*_: Any) -> credits_report.ReachedPeers:
        return credits_report.ReachedPeers([id_of(m) for m in members], {})

    monkeypatch.setattr(credits_report, "visiting", visiting)
    monkeypatch.setattr(credits_report, "reach_members", reach)
    join = tuple(f"/ip4/127.0.0.1/tcp/1/p2p/{id_of(m)}" for m in named)
    return await collect_credits(CreditsSearch(join=join, **wish))


def id_of(peer: Any) -> str:
    """The peer id of a member, or of somebody else."""
    return peer.core.shared.me if isinstance(peer, QuickMember) else peer.id


async def settled(member: QuickMember) -> int:
    """Wait until a keeper has counted all that it holds; the tokens of all fragments."""
    keeper = member.keeper
    assert keeper is not None

    def tokens() -> int:
        return sum(fragment.chain.head.tokens for fragment in member.core.fragments)

    await until(lambda: keeper.credits.fragment_tokens == tokens() > 0, "all is counted")
    return tokens()


class Liar:
    """Says that it keeps the history, and answers as `says` and `gives` make it."""

    def __init__(self, rogue: Rogue, honest: QuickMember) -> None:
        self.rogue, self.honest, self.id = rogue, honest, rogue.id
        rogue.on_message = self._answer  # type: ignore[method-assign]
        rogue.pulls = lambda pull: self.gives
        self.gives: Any = None

    def says(self, answer: CreditsAnswer) -> CreditsAnswer:
        return answer

    async def _answer(self, _sender: str, data: bytes) -> bytes:
        query = wire.decode(data[1:], wire.Query)  # type: ignore[arg-type]
        if isinstance(query, CreditsQuery):
            assert self.honest.keeper is not None
            return wire.encode(self.says(self.honest.keeper.answer(query.offset)))
        return wire.encode(self.honest.report.stands())

"""The transfer layers of members without the rest of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
from chain_kit import PaperChain
from daemon_kit import version
from deadlines import within_s

from p2pdiloco.adapters.endpoint import Endpoint
from p2pdiloco.core.api import events as ev
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.daemon.bulk.updates import LEAST_BYTES
from p2pdiloco.daemon.network.link import LinkMeters
from p2pdiloco.daemon.payloads import Tickets
from p2pdiloco.hashing import content_digest
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco_lab.memory_net import MemoryNetwork

PAYLOAD = random.Random(0).randbytes(1 << 20)
SMALL = PAYLOAD[: LEAST_BYTES - 1]


def update(payload: bytes) -> Any:
    made = version(1, bytes(32))
    digest = content_digest(payload)
    return msgspec.structs.replace(made, header=msgspec.structs.replace(made.header, update_digest=digest))


class Worker:
    """Jobs run at once; nothing is wrong with a payload."""

    vault = SimpleNamespace(layouts=[None], check_payload=lambda *_: None)

    async def run(self, job: Callable[..., Any], *arguments: Any) -> Any:
        return job(*arguments)


class Peer:
    """The transfer layer of one member. What it has fetched is in its chain at once."""

    def __init__(self, transport: Endpoint, payload: bytes | None = None) -> None:
        self.name = transport.peer_id
        self.payload = payload
        self.version = update(payload) if payload is not None else None
        self.asked: list[tuple[str, wire.PullUpdate]] = []
        self.answers: Callable[[wire.PullUpdate], PullSource | Refusal | None] = lambda _: None
        self.failures: list[str] = []
        self.tickets = Tickets()
        self.transport = transport
        self.meters = LinkMeters(transport)  # type: ignore[arg-type]
        self.chain = PaperChain(update_bytes=len(PAYLOAD))
        self.chain.update_of = self._update_of  # type: ignore[method-assign]
        worker = Worker()
        parts: Any = self.chain, transport, worker, self.tickets, lambda _event: None, self.meters
        self.transfers = Transfers(*parts)

    async def _update_of(self, fragment: int, number: int) -> Any:
        return None if self.payload is None else (self.version, self.payload)

    def is_member(self, sender: str) -> None:
        return None

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        pull = wire.decode(request, wire.PullUpdate)
        self.asked.append((sender, pull))
        return self.answers(pull) or await self.transfers.on_pull(sender, pull)

    async def fetch(self, holder: str = "p0") -> None:
        answer = await self.transfers.fetch_update(ev.FetchUpdate(0, 1, holder))
        if isinstance(answer, ev.UpdateFetched):
            self.version, self.payload = answer.version, bytes(self.tickets.get(answer.ticket))
        else:
            self.failures.append(answer.detail or str(answer.failure))


class Members:
    """p0 has the update; the others, p1 to p7 and perhaps more, want it."""

    def __init__(self, payload: bytes, members: int) -> None:
        self.hub = MemoryNetwork()
        self.payload = payload
        self.all = [Peer(self.hub.transport(f"p{i}"), payload if i == 0 else None) for i in range(members)]
        self.holder, *self.others = self.all

    async def fetch_all(self, *those: Peer) -> None:
        async with asyncio.timeout(within_s(20)):
            await asyncio.gather(*(peer.fetch() for peer in those or self.others))

    def check(self, *those: Peer) -> None:
        for peer in those or self.others:
            assert peer.payload == self.payload, f"{peer.name}: {peer.failures}"
            assert not peer.failures

    def uploads(self, peer: Peer) -> float:
        """Number of times that this peer gave the update's bytes out."""
        return peer.transfers.bytes_out / len(self.payload)

"""A swarm of transports of either kind; every one of them is closed at the end, also on failure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from net_helpers import Recorder

from p2pdiloco.adapters.endpoint import Endpoint
from p2pdiloco.identity import Identity
from p2pdiloco_lab.memory_net import MemoryNetwork, MemoryTransport

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


class Swarm:
    """Starts transports with recording handlers; the first is everybody's initial peer."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.members: list[Endpoint] = []
        self.handlers: dict[str, Recorder] = {}
        self.hub = MemoryNetwork()
        self._folder = folder

    async def add(self) -> Endpoint:
        number = len(self.members)
        initial = self.members[0].addresses()[:1] if self.members else []  # type: ignore[attr-defined]
        identity_path = self._folder / f"{number}" / "identity.key"
        identity = Identity.load_or_create(identity_path)
        if self.kind == "memory":
            transport: Endpoint = self.hub.transport(identity.peer_id, initial)
        else:
            from p2pdiloco.adapters.hivemind_net import HivemindTransport

            transport = HivemindTransport(
                identity, identity_path, identity_path.parent, LOOPBACK, initial_peers=initial
            )
        self.members.append(transport)
        handlers = self.handlers[transport.peer_id] = Recorder()
        await transport.start(handlers)  # type: ignore[attr-defined]
        return transport

    def handlers_of(self, transport: Endpoint) -> Recorder:
        return self.handlers[transport.peer_id]

    async def vanish(self, transport: Endpoint) -> None:
        """The peer dies without a goodbye."""
        if isinstance(transport, MemoryTransport):
            self.hub.kill(transport.peer_id)
        else:
            await transport.close()  # type: ignore[attr-defined]

    async def raw_stream(self, a: Endpoint, b: Endpoint):  # type: ignore[no-untyped-def]
        """A stream from a to b on which a test may misbehave."""
        return await a._open(b.peer_id, 5.0)

    async def close(self) -> None:
        for transport in self.members:
            await transport.close()  # type: ignore[attr-defined]


@pytest.fixture(params=["memory", pytest.param("hivemind", marks=pytest.mark.net)])
async def swarm(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Swarm]:
    made = Swarm(request.param, tmp_path)
    try:
        yield made
    finally:
        await made.close()

"""Fan-out over libp2p: four members, one holder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from deadlines import within_s
from fanout_kit import PAYLOAD, Peer

from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.identity import Identity

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

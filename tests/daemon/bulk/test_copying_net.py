"""Copying over libp2p: a newcomer, and three that hold what it wants, of which the first dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from copying_kit import SIZE, Peer
from daemon_kit import until
from deadlines import within_s

from p2pdiloco.adapters.flow import Allowance, Limits
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.core.api import events as ev
from p2pdiloco.daemon.bulk import states
from p2pdiloco.identity import Identity

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@pytest.mark.net
async def test_a_state_comes_from_all_and_is_finished_without_the_one_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LEAST_PIECE_BYTES", SIZE // 16)
    peers: list[Peer] = []
    try:
        for number in range(4):
            path = tmp_path / f"{number}" / "identity.key"
            initial = peers[0].transport.addresses()[:1] if peers else []  # type: ignore[attr-defined]
            limits = Limits(upload=Allowance(500_000, asyncio.get_running_loop().time))
            transport = HivemindTransport(
                Identity.load_or_create(path),
                path,
                path.parent,
                LOOPBACK,
                initial_peers=initial,
                limits=limits,
            )
            peers.append(Peer(transport, 1 if peers else None))
            await transport.start(peers[-1])  # type: ignore[arg-type]
        joiner, first, *others = peers
        for peer in (first, *others):
            joiner.transport.learn(peer.name, peer.transport.addresses())  # type: ignore[attr-defined]
        joiner.chain.peers = [peer.name for peer in (first, *others)]
        copying = asyncio.create_task(joiner.copy(first.name))
        await until(lambda: joiner.transfers.copying.bytes_in > SIZE // 4, "a quarter")
        await first.transport.close()  # type: ignore[attr-defined]
        await asyncio.wait_for(copying, within_s(60))
        assert isinstance(joiner.posted[0], ev.StateFetched) and joiner.has_state_of(others[0])
        assert all(peer.gave for peer in (first, *others))
    finally:
        for peer in peers:
            await peer.transport.close()  # type: ignore[attr-defined]
            peer.compute.close()

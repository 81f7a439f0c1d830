"""An audit over libp2p: one learner gives its contribution, of one that died the syncer does."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_kit import AuditNode, AuditTown
from daemon_kit import signed_run, until

from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.core.api.reasons import AuditOutcome
from p2pdiloco.identity import Identity

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@pytest.mark.net
async def test_contributions_come_from_a_learner_and_from_the_syncer(tmp_path: Path) -> None:
    run, nodes = signed_run(tmp_path), []
    try:
        for number in range(4):
            path = tmp_path / f"{number}" / "identity.key"
            initial = nodes[0].transport.addresses()[:1] if nodes else []
            identity = Identity.load_or_create(path)
            transport = HivemindTransport(identity, path, path.parent, LOOPBACK, initial_peers=initial)
            nodes.append(AuditNode(transport, run, path.parent))
            await transport.start(nodes[-1].door)
        town = AuditTown(*nodes)
        version = await town.version()
        await until(lambda: town.auditor.transport.peers_connected() == 3, "all are connected")
        dead, alive = town.learners
        await town.gone(dead)
        assert await town.auditor.audit(version) is AuditOutcome.SAME
        assert (dead.given_bytes, alive.given_bytes > 0, town.syncer.given_bytes > 0) == (0, True, True)
    finally:
        for node in nodes:
            await node.close()

"""Nodes that audit each other's merges: everything real beneath the core, on the network in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from chain_kit import PaperChain
from daemon_kit import signed_run
from msgspec.structs import replace

from p2pdiloco.adapters.spool import Scratch, Spool
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import AuditOutcome
from p2pdiloco.core.api.types import WHOLE_RUN, Contributor, MergeLimits, Stamp
from p2pdiloco.core.api.versions import Mean, SignedVersion, VersionHeader, sample_seed
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.daemon.driver import Merging
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network.link import LinkMeters
from p2pdiloco.daemon.payloads import Compute, Memory, Tickets
from p2pdiloco.daemon.run_files.run import Run, open_run
from p2pdiloco.hashing import content_digest
from p2pdiloco.identity import Identity
from p2pdiloco.ports import Refusal
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.merge import digest_of
from p2pdiloco_lab.memory_net import MemoryNetwork

LIMITS = MergeLimits(most_tokens=300, longest=0.1)
"""Limits that cut every contribution, and some tokens."""


class AuditNode:
    """A node of one run that gives contributions, and audits."""

    def __init__(self, transport: Any, run: Run, folder: Path) -> None:
        self.run, self.vault = open_run(run.signed, Identity.generate())
        self.transport, self.name = transport, transport.peer_id
        self.compute, self.tickets = Compute(self.vault, None), Tickets()
        self.withheld = False
        """What our last audit said of the syncer."""
        self.chain: Any = PaperChain()
        self.chain.run = self.run.id
        self.memory, self.spool = Memory(), Spool(folder, spare_bytes=0)
        meters, post = LinkMeters(self.transport), lambda _event: None
        parts = self.chain, self.transport, self.compute, self.tickets, post, meters
        self.transfers = Transfers(*parts, self.memory, self.spool)
        self.memory.count(self.tickets, self.transfers)
        self.memory.give_way_by(self.transfers.merged)
        bulk = self.transfers
        kept = bulk.merged.keep, bulk.true_updates.correction
        self.merging = Merging(self.compute, self.tickets, post, *kept)
        self.door = FrontDoor()
        self.door.enter(self.run.id, self.transfers, None)  # type: ignore[arg-type]

    @property
    def given_bytes(self) -> int:
        return self.transfers.giving.bytes_out

    def contribute(self, seed: int) -> bytearray:
        """A payload of ours, which we keep."""
        numel = self.run.layouts[0].numel
        all_share, own = (torch.randn(numel, generator=torch.Generator().manual_seed(n)) for n in (-1, seed))
        delta = (all_share + own) * 0.01
        payload = codec(self.run.manifest.codec.contribution).encode(delta)
        self.chain.contributions[content_digest(payload)] = payload
        return payload

    async def spooled(self, payloads: Sequence[bytearray]) -> list[Scratch]:
        """Payloads that were pushed to us and lie on the disk."""
        made = [self.spool.take(len(payload)) for payload in payloads]
        for scratch, payload in zip(made, payloads, strict=True):
            await scratch.write(0, memoryview(payload))
        return made

    def label(self, payload: Any, n: int) -> Contributor:
        """What we say of our contribution."""
        done = 200 + 100 * n, 20 + n
        return Contributor(self.name, Stamp(1, 1), *done, payload_digest=digest_of(payload))

    async def audit(
        self, version: SignedVersion, *givers: AuditNode, repairs: SignedVersion | None = None
    ) -> AuditOutcome:
        """What an audit finds, `givers` having accused its syncer."""
        names = tuple(node.name for node in givers)
        found = await self.transfers.auditing.audit(ev.Audit(0, version, names, repairs))
        self.withheld = found.withheld
        assert found.remade == self.transfers.true_updates.has(version.header.digest())
        return found.outcome

    async def ask(self, holder: AuditNode, digest: bytes, fragment: int = 0) -> bytearray:
        """Pull a contribution. Raises: what the wire says."""
        request = wire.encode(wire.PullContribution(self.run.id, fragment, digest))
        answer = await self.transport.pull(holder.name, request, 1 << 24, 5.0)
        if isinstance(answer, Refusal):
            raise wire.refused(answer)
        return answer[1]

    def forget(self) -> None:
        """Let go of what is kept for audits and repairs."""
        self.transfers.merged.forget()
        self.transfers.true_updates.give_up()

    async def close(self) -> None:
        await self.transport.close()
        self.compute.close()
        self.spool.close()


class AuditTown:
    """An auditor, a syncer, and learners; `async with`."""

    def __init__(self, *nodes: AuditNode) -> None:
        self.nodes = nodes
        self.auditor, self.syncer, *self.learners = nodes
        self.learners.sort(key=lambda node: node.name)
        self.payloads = [learner.contribute(seed) for seed, learner in enumerate(self.learners)]

    async def __aenter__(self) -> AuditTown:
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes:
            node.forget()
            await node.close()

    async def version(
        self,
        payloads: Sequence[Any] = (),
        mends: SignedVersion | None = None,
        voters: int = 0,
        **changes: Any,
    ) -> SignedVersion:
        """What the syncer makes of the learners' contributions, and of an earlier version that it repairs.
        The last `voters` of them vote. `changes`: of the header."""
        syncer, given = self.syncer, payloads or self.payloads
        parts = [node.label(p, n) for n, (node, p) in enumerate(zip(self.learners, given, strict=True))]
        parts = [replace(part, votes=n >= len(parts) - voters) for n, part in enumerate(parts)]
        tickets = [syncer.tickets.put(payload, pushed=True) for payload in given]
        means = [Mean(-100 * n, 8) for n in range(len(parts))]
        inputs = tuple(map(ev.MergeInput, parts, tickets, means))
        wanted = ev.Merge(0, 1, inputs, (), 24, LIMITS, sample_seed(parts), mends)
        merged = await syncer.merging.merge(wanted)
        assert isinstance(merged, ev.Merged)
        if mends is not None and merged.repaired:
            changes = {"repairs": mends.header.digest()} | changes
        for ticket in [*tickets, merged.ticket]:
            syncer.tickets.release(ticket)
        assert len(merged.cut) == len(given)
        parts = [
            replace(part, trust=mean.trust(found.score), length=found.length, score=found.score)
            for part, mean, found in zip(parts, means, merged.measured, strict=True)
        ]
        assert len({part.trust for part in parts}) > 1
        facts = {"update_digest": merged.update_digest, "contributors": tuple(parts), "limits": LIMITS}
        return self.named(**(facts | changes))

    def named(self, **facts: Any) -> SignedVersion:
        """A version of the syncer's with these facts."""
        header = VersionHeader(
            **{
                "run": self.syncer.run.id,
                "group": WHOLE_RUN,
                "fragment": 0,
                "number": 1,
                "parent": bytes(32),
                "term": 1,
                "syncer": self.syncer.name,
                "tokens": 1,
                "state_digest": bytes(32),
                "update_bytes": 1,
                "codec": self.syncer.run.manifest.codec.update,
            }
            | facts
        )
        return SignedVersion(header, b"")

    async def gone(self, *nodes: AuditNode) -> None:
        """These nodes vanish."""
        for node in nodes:
            await node.transport.close()


async def memory_town(folder: Path, learners: int = 3) -> AuditTown:
    """One with so many learners, on the network in memory."""
    hub, run = MemoryNetwork(), signed_run(folder)
    nodes = [AuditNode(hub.transport(Identity.generate().peer_id), run, folder) for _ in range(2 + learners)]
    for node in nodes:
        await node.transport.start(node.door)
    return AuditTown(*nodes)

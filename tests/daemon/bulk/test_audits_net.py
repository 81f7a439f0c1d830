"""An audit over libp2p: one learner gives its contribution, of one that died the syncer does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from audit_kit import LIMITS, AuditNode, AuditTown, memory_town
from daemon_kit import signed_run, until
from msgspec.structs import replace

from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import AuditOutcome
from p2pdiloco.core.api.types import Contributor, MergeLimits
from p2pdiloco.core.api.versions import Mean, MergedPartial, PartOfTree, SignedVersion, sample_seed
from p2pdiloco.hashing import content_digest
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


# Audits of what several groups made: the sum of their partial merges, and each of these.

SAME, DIFFERENT, MISSING = AuditOutcome.SAME, AuditOutcome.DIFFERENT, AuditOutcome.MISSING
OTHER_LIMITS = MergeLimits(most_tokens=250, longest=0.2)
"""Those of an earlier version, by which a group may have merged."""


class GroupTown:
    """Two groups, of two learners and of one, with syncers that are learners; a root, and an auditor."""

    def __init__(self, town: AuditTown) -> None:
        self.town, self.root, self.auditor = town, town.syncer, town.auditor
        self.syncers = [town.learners[0], town.learners[2]]
        self.parts: list[PartOfTree] = []

    async def merge(self, *limits: MergeLimits | None) -> None:
        """Both groups merge, each by its limits."""
        one, two, three = range(3)
        self.parts = [
            await self.partial(self.syncers[n], f"1/0/{n}", members, limits[n] if limits else None)
            for n, members in enumerate(([one, two], [three]))
        ]

    async def partial(
        self, syncer: AuditNode, group: str, members: list[int], limits: MergeLimits | None
    ) -> PartOfTree:
        """Merge the contributions of these learners into one partial, which its syncer keeps."""
        town, means = self.town, [Mean(60, 1)] * len(members)
        labels = [town.learners[n].label(town.payloads[n], n) for n in members]
        tickets = [syncer.tickets.put(town.payloads[n], pushed=True) for n in members]
        inputs = tuple(map(ev.MergeInput, labels, tickets, means))
        seed, by = sample_seed(labels), limits or LIMITS
        made = await syncer.merging.merge_partial(ev.MergePartial(0, inputs, (), by, seed))
        assert isinstance(made, ev.PartialMerged)
        self.sums = bytes(syncer.tickets.get(made.ticket))
        for ticket in [*tickets, made.ticket]:
            syncer.tickets.release(ticket)
        parts: list[Contributor] = [
            replace(label, trust=mean.trust(found.score), length=found.length, score=found.score)
            for label, mean, found in zip(labels, means, made.measured, strict=True)
        ]
        entry = MergedPartial(group, syncer.name, made.payload_digest, b"", limits)
        return PartOfTree(entry, tuple(parts), ())

    async def sum(self, *changed: tuple[int, Any]) -> SignedVersion:
        """What the root makes of them. `changed`: what it adds up in place of a partial."""
        sums = [self.kept(n) for n in range(len(self.parts))]
        for n, payload in changed:
            sums[n] = payload
        root = self.root
        tickets = [root.tickets.put(payload, pushed=True) for payload in sums]
        below = tuple(
            ev.PartialInput(ticket, content_digest(payload))
            for ticket, payload in zip(tickets, sums, strict=True)
        )
        merged = await root.merging.merge(ev.Merge(0, 1, (), below, 24, LIMITS))
        assert isinstance(merged, ev.Merged)
        for ticket in [*tickets, merged.ticket]:
            root.tickets.release(ticket)
        return self.town.named(
            update_digest=merged.update_digest,
            contributors=tuple(part for each in self.parts for part in each.parts),
            limits=LIMITS,
            partials=tuple(each.entry for each in self.parts),
        )

    def kept(self, n: int) -> Any:
        """The sums of a group, which its syncer keeps."""
        payload = self.syncers[n].transfers.merged.get(0, self.parts[n].entry.payload_digest)
        assert payload is not None
        return payload

    async def audit(self, version: SignedVersion, part: PartOfTree | None = None) -> AuditOutcome:
        """What an audit of the sum of all finds, or of one group's."""
        below = tuple(self.parts) if part is None else ()
        asked = ev.Audit(0, version, part=part, below=below)
        return (await self.auditor.transfers.auditing.audit(asked)).outcome


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[GroupTown]:
    async with await memory_town(tmp_path) as made:
        grouped = GroupTown(made)
        await grouped.merge()
        yield grouped
        for node in made.nodes:
            node.forget()
            released = lambda node=node: len(node.tickets) == node.memory.claimed_bytes == 0  # noqa: E731
            await until(released, "all is released")


async def test_the_sum_of_all_is_made_again_from_the_groups_syncers(town: GroupTown) -> None:
    version = await town.sum()
    assert await town.audit(version) is SAME
    assert all(syncer.given_bytes for syncer in town.syncers) and not town.root.given_bytes
    assert town.auditor.transfers.bytes_in == sum(len(town.kept(n)) for n in range(2))


async def test_the_root_gives_what_a_groups_syncer_does_not(town: GroupTown) -> None:
    version = await town.sum()
    for syncer in town.syncers:
        syncer.transfers.merged.forget()
    assert await town.audit(version) is SAME
    town.root.transfers.merged.forget()
    assert await town.audit(version) is MISSING


async def test_a_groups_sums_are_made_again_from_its_learners(town: GroupTown) -> None:
    version = await town.sum()
    for part in town.parts:
        assert await town.audit(version, part) is SAME
    assert not town.root.given_bytes


@pytest.mark.parametrize("group", [0, 1])
async def test_a_group_merges_by_its_own_limits(town: GroupTown, group: int) -> None:
    """Those of the version before, where versions passed while its merge was under way."""
    await town.merge(*(OTHER_LIMITS if n == group else None for n in range(2)))
    version = await town.sum()
    assert await town.audit(version) is SAME
    part = town.parts[group]
    assert await town.audit(version, part) is SAME
    false = part._replace(entry=replace(part.entry, limits=None))
    assert await town.audit(version, false) is DIFFERENT


async def test_a_false_sum_is_the_roots(town: GroupTown) -> None:
    version = await town.sum((0, town.kept(1)))
    assert await town.audit(version) is DIFFERENT
    assert await town.audit(version, town.parts[0]) is SAME


async def test_false_sums_of_a_group_are_its_syncers(town: GroupTown) -> None:
    """They pass for sums of contributions of that weight, and the root adds them up."""
    false = bytearray(town.kept(0))
    false[-4:] = town.sums[-4:]
    digest = content_digest(false)
    syncer, part = town.syncers[0], town.parts[0]
    syncer.transfers.merged.keep(0, [(digest, 999, false)])
    town.parts[0] = part = part._replace(entry=replace(part.entry, payload_digest=digest))
    version = await town.sum()
    assert await town.audit(version) is SAME
    assert await town.audit(version, part) is DIFFERENT


@pytest.mark.parametrize("what", ["length", "score"])
async def test_what_a_group_says_of_a_contribution_is_compared(town: GroupTown, what: str) -> None:
    version, part = await town.sum(), town.parts[0]
    first, *others = part.parts
    false = replace(first, **{what: getattr(first, what) + 1})
    assert await town.audit(version, part._replace(parts=(false, *others))) is DIFFERENT


async def test_no_honest_root_adds_up_what_is_no_sum(town: GroupTown) -> None:
    """Its weights are not those of the contributions that the version names."""
    version, part = await town.sum(), town.parts[0]
    first, *others = part.parts
    town.parts[0] = part._replace(parts=(replace(first, tokens=first.tokens + 9), *others))
    assert await town.audit(version) is DIFFERENT

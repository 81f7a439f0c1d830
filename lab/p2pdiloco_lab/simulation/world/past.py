"""Past of a run that is older than its founding: what its members have on their disks as the world begins.

Of each fragment there is one version that all of them have saved, hundreds of versions old, with a table in
which most have voted for long. The nodes start as after the death of all. Who is not among these members
comes with nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from msgspec import structs

from p2pdiloco.core.api.effects import VoteRecord
from p2pdiloco.core.api.types import WHOLE_RUN, Contributor, Stamp, Watermark, signed_bytes, table_digest
from p2pdiloco.core.api.versions import ALL_AT, SignedVersion, VersionHeader
from p2pdiloco.core.chain import FOUNDING_VERSIONS, LATELY_VERSIONS, PROBATION_MERGES
from p2pdiloco_lab.simulation.node.lineage import FragmentLineage
from p2pdiloco_lab.simulation.world.crypto import HashCrypto
from p2pdiloco_lab.simulation.world.disk import Checkpoint
from p2pdiloco_lab.simulation.world.plan import WorldPlan, stream

MEMBER_SHARE, VOTER_SHARE = 0.85, 0.9
"""Shares of the other nodes that are old members, and of these that vote by a fragment's chain."""
NUMBERS = FOUNDING_VERSIONS + 16, 8 * FOUNDING_VERSIONS
"""Numbers of the versions that are saved, at least and at most."""
AWAY_FROM_S = 4.5
"""Start from which a member had been away when all others stopped: nobody waits for it."""
FORMER_LIFE = 1
"""Incarnation of members before the world begins."""


def old_liars(plan: WorldPlan) -> list[str]:
    """Choose who lies in an old run: the last ones, fewer than a third of all. A third may keep the others
    apart for ever, once these are on two sides: of three sides with a third each nobody can tell which is
    true."""
    peers = [spec.peer for spec in plan.nodes]
    return peers[len(peers) - min(plan.mix.perjurers, (len(peers) - 1) // 3) :]


class Past:
    """Past of one world: versions, and who has saved them."""

    def __init__(self, plan: WorldPlan, genesis: tuple[FragmentLineage, ...]) -> None:
        self._plan, self._rng = plan, stream(plan.seed, "past")
        peers = [spec.peer for spec in plan.nodes]
        liars = old_liars(plan)
        self._voters = {*peers[: 1 + 2 * len(liars)], *liars}
        """Members that vote in every fragment: liars, and so many others that they are fewer than a third."""
        self.members = [p for p in peers if p in self._voters or self._rng.random() < MEMBER_SHARE]
        """Nodes that come with what they saved."""
        self._away = {p.peer for p, at_s in zip(plan.nodes, plan.joins_s, strict=True) if at_s > AWAY_FROM_S}
        self.saved = tuple(self._checkpoint(state) for state in genesis)
        """Versions that every member has saved, one of each fragment."""

    def vote(self, header: VersionHeader) -> VoteRecord:
        """Make the vote of every member in the term of that version."""
        return VoteRecord(header.fragment, header.term, header.syncer, WHOLE_RUN)

    def _mark(self, peer: str, number: int) -> Watermark:
        rng = self._rng
        votes = peer in self._voters or rng.random() < VOTER_SHARE
        newest = number - rng.randint(LATELY_VERSIONS // 2 + 1, 2 * LATELY_VERSIONS) * (peer in self._away)
        first = rng.randint(1, newest // 2)
        merges = rng.randint(PROBATION_MERGES, newest - first + 1) if votes else rng.randint(1, 4)
        return Watermark(
            peer,
            Stamp(FORMER_LIFE, merges),
            newest,
            first,
            merges,
            rng.randint(first + 1, newest // 2 + 1) if votes else 0,
            ALL_AT,
            hashlib.sha256(f"{peer}/{number}".encode()).digest()[:8],
            merges,
        )

    def _part(self, mark: Watermark, fragment: int) -> Contributor:
        config = self._plan.config
        part = Contributor(
            mark.learner,
            mark.stamp,
            config.usual_tokens,
            config.inner_steps,
            Stamp(FORMER_LIFE, mark.merges - 1),
            hashlib.sha256(f"{mark.learner}/{mark.number}".encode()).digest(),
            votes=bool(mark.voter),
        )
        signed = signed_bytes("work", part.work(config.run, fragment))
        return structs.replace(part, signature=HashCrypto(mark.learner).sign(signed))

    def _checkpoint(self, genesis: FragmentLineage) -> Checkpoint:
        config, fragment = self._plan.config, genesis.fragment
        number, first = self._rng.randint(*NUMBERS), config.genesis_versions[fragment].header
        table = tuple(self._mark(peer, number) for peer in sorted(self.members))
        digest = hashlib.sha256(b"past/%d/" % number + genesis.digest).digest()
        syncer = self._rng.choice([mark.learner for mark in table if mark.voter])
        header: VersionHeader = structs.replace(
            first,
            number=number,
            parent=hashlib.sha256(b"parent/" + digest).digest(),
            term=number // 2,
            syncer=syncer,
            tokens=number * len(table) * config.usual_tokens,
            state_digest=digest,
            contributors=tuple(self._part(mark, fragment) for mark in table if mark.number == number),
            unit=config.usual_tokens,
            table=table_digest(table),
        )
        version = SignedVersion(header, HashCrypto(syncer).sign(signed_bytes("version", header)))
        return Checkpoint(version, replace(genesis, number=number, digest=digest, following={}), table, {})

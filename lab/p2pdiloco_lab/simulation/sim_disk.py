"""A node's disk, its copies of fragments in memory, and the past with which the disks of an old run begin.

The disk outlives the node's crashes; writes that were under way at a crash are lost. A `Store` is one
fragment in host memory: its state, the spare copy that the next version is prepared in, and the log.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace

from msgspec import structs

from p2pdiloco.core.api.config import CoreConfig, Restored, RestoredFragment
from p2pdiloco.core.api.events import VoteRecord
from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.types import (
    WHOLE_RUN,
    Contributor,
    Seat,
    Stamp,
    Watermark,
    signed_bytes,
    table_digest,
)
from p2pdiloco.core.api.versions import ALL_AT, SignedVersion, VersionHeader
from p2pdiloco.core.chain import LATELY_VERSIONS, Chain, founding, marks_of
from p2pdiloco.core.pending import TakeUp, Unmerged
from p2pdiloco_lab.simulation.lineage import (
    NOTHING,
    FragmentLineage,
    HashCrypto,
    OuterUpdate,
    Resumed,
    Substance,
)
from p2pdiloco_lab.simulation.seed_plan import WorldPlan, random_stream

LoggedUpdate = tuple[SignedVersion, OuterUpdate]


@dataclass(slots=True)
class Checkpoint:
    """A fragment's durable state with the log that led to it."""

    version: SignedVersion
    state: FragmentLineage
    watermarks: tuple[Watermark, ...]
    log: dict[int, LoggedUpdate]


@dataclass(slots=True)
class ResumeNote:
    """A learner's unmerged displacement of one fragment at an orderly end (`saved_state`)."""

    left: Unmerged
    unmerged_from: int
    rest_from: int
    """Inner step at which the work begins that was made after the copy in the slot."""
    displacement: bytes = b""
    """Matter of the whole displacement; that of what was made after the copy is `rest`."""
    rest: bytes = b""

    def resumed(self, mode: TakeUp) -> Resumed | None:
        """Return what is taken up again; None: nothing."""
        if mode == "none":
            return None
        whole = mode == "all" or self.left.slot is None
        return (self.unmerged_from, self.displacement) if whole else (self.rest_from, self.rest)


@dataclass(slots=True)
class Disk:
    """Durable records of one node, and how long a write takes."""

    write_s: float
    full: bool = False
    slow_factor: float = 1.0
    votes: dict[tuple[str, int, int], VoteRecord] = field(default_factory=dict)
    updates: dict[int, dict[bytes, LoggedUpdate]] = field(default_factory=dict)
    """fragment -> header digest -> update that was made durable before it was announced."""
    resume: dict[int, ResumeNote] = field(default_factory=dict)
    """Written at an orderly end, used up by the next start."""
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    proofs: tuple[Evidence, ...] = ()
    uplink_bits_per_s: float = math.inf
    """Rate that the uplink carried in an earlier life; infinite: not known."""

    def keep_vote(self, record: VoteRecord) -> None:
        """The vote is durable."""
        self.votes[(record.group, record.fragment, record.term)] = record

    def keep_update(self, version: SignedVersion, update: OuterUpdate, keep: int) -> None:
        """The update is durable; older ones than the log's length are dropped."""
        kept = self.updates.setdefault(version.header.fragment, {})
        kept[version.header.digest()] = (version, update)
        floor = version.header.number - keep
        for digest in [d for d, (old, _) in kept.items() if old.header.number < floor]:
            del kept[digest]

    def keep_proofs(self, proofs: tuple[Evidence, ...]) -> None:
        """The proofs are durable, unless there is no room."""
        if not self.full:
            self.proofs = proofs

    def keep_checkpoint(self, checkpoint: Checkpoint) -> None:
        """The fragment's state is durable."""
        self.checkpoints[checkpoint.version.header.fragment] = checkpoint

    def restore(self, fragment: int, genesis: Checkpoint, substance: Substance = NOTHING) -> Checkpoint:
        """The newest durable version: the checkpoint and every durable update that continues it."""
        found = self.checkpoints.get(fragment, genesis)
        version, state, log = found.version, found.state, dict(found.log)
        marks = marks_of(found.watermarks)
        children = {v.header.parent: (v, u) for v, u in self.updates.get(fragment, {}).values()}
        while (child := children.get(version.header.digest())) is not None:
            chain = Chain((version,), marks.table, 1)
            version, update = child
            said = replace(update, longest_steps=version.header.longest_steps())
            state = state.apply(said, substance)
            if state.digest != version.header.state_digest:  # a liar's own: it goes on from what it stated
                state = state.miscomputed()
            log[version.header.number] = child
            marks = chain.marks_after(version.header)
        return Checkpoint(version, state, marks.table, log)

    def holds_run(self, fragments: int) -> bool:
        """Every fragment is saved, and not all of them as version 0: a node can go on from this alone."""
        numbers = [checkpoint.version.header.number for checkpoint in self.checkpoints.values()]
        return len(numbers) == fragments and max(numbers) > 0

    def vote_records(self) -> tuple[VoteRecord, ...]:
        """List the durable votes, in order."""
        return tuple(record for _, record in sorted(self.votes.items()))


def restored_from(disk: Disk, fragments: list[Checkpoint], config: CoreConfig) -> Restored:
    """Collect what the core is told at start."""
    parts = []
    for found in fragments:
        log = [v for _, (v, _) in sorted(found.log.items())][-config.log_versions :]
        if not log or log[-1] != found.version:
            log.append(found.version)
        parts.append(RestoredFragment(log=tuple(log), watermarks=found.watermarks))
    saved = any(found.version.header.number > 0 for found in fragments)
    votes = disk.vote_records()
    return Restored(fragments=tuple(parts), votes=votes, proofs=disk.proofs, saved=saved)


# Copies of fragments.


class Store:
    """One fragment in host memory."""

    def __init__(
        self,
        version: SignedVersion,
        state: FragmentLineage,
        watermarks: tuple[Watermark, ...],
        log: dict[int, LoggedUpdate],
    ) -> None:
        self.version, self.state, self.watermarks = version, state, watermarks
        self.log = dict(log)
        self.spare: FragmentLineage | None = None
        self.saved_s = 0.0
        self._generation = 0
        self._busy = False

    def take_spare(self) -> int | None:
        """Begin a job that will fill the spare copy. None: another job is at it."""
        if self._busy:
            return None
        self._busy = True
        self._generation += 1
        self.spare = None
        return self._generation

    def fill_spare(self, generation: int, state: FragmentLineage | None) -> None:
        """A job is done (with nothing, if None). A job that was dropped meanwhile changes nothing."""
        if generation == self._generation:
            self.spare = state
            self._busy = False

    def drop_spare(self) -> None:
        """Forget what is in the spare copy, and any job that is filling it."""
        self._generation += 1
        self.spare = None
        self._busy = False

    def commit(
        self,
        version: SignedVersion,
        update: OuterUpdate | None,
        watermarks: tuple[Watermark, ...],
        keep: int,
    ) -> None:
        """The spare copy becomes the state."""
        if self.spare is None:
            raise ValueError("nothing in the spare copy")
        self.version, self.state, self.watermarks = version, self.spare, watermarks
        self.drop_spare()
        if update is None:
            self.log.clear()
            return
        number = version.header.number
        self.log[number] = (version, update)
        for old in [n for n in self.log if n <= number - keep]:
            del self.log[old]

    def checkpoint(self) -> Checkpoint:
        """Return the content of a checkpoint."""
        return Checkpoint(self.version, self.state, self.watermarks, dict(self.log))


# Past.

MEMBER_SHARE = 0.85
"""Share of the other nodes that are old members."""
NUMBERS = 80, 512
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
    """Past of a run that is older than its founding: versions, and who has saved them.

    Of each fragment there is one version that all members have saved, hundreds of versions old, with a table
    in which all nodes have seats, those too that come with nothing. The nodes start as after the death of
    all. A node that is not among these members comes with nothing.
    """

    def __init__(self, plan: WorldPlan, genesis: tuple[FragmentLineage, ...]) -> None:
        self._plan, self._rng = plan, random_stream(plan.seed, "past")
        peers = [spec.peer for spec in plan.nodes]
        liars = old_liars(plan)
        many = len(peers) if plan.crowd is not None else 1 + 2 * len(liars)
        sure = {*peers[:many], *liars}
        """Members in every world: liars, and so many others that they are fewer than a third."""
        self.members = [p for p in peers if p in sure or self._rng.random() < MEMBER_SHARE]
        """Nodes that come with what they saved."""
        self._away = {p.peer for p, at_s in zip(plan.nodes, plan.joins_s, strict=True) if at_s > AWAY_FROM_S}
        self.saved = tuple(self._checkpoint(state) for state in genesis)
        """Versions that every member has saved, one of each fragment."""

    def vote(self, header: VersionHeader) -> VoteRecord:
        """Make the vote of every member in the term of that version."""
        return VoteRecord(header.fragment, header.term, header.syncer, WHOLE_RUN)

    def _mark(self, peer: str, seat: Seat | None, number: int) -> Watermark:
        rng = self._rng
        newest = number - rng.randint(LATELY_VERSIONS // 2 + 1, 2 * LATELY_VERSIONS) * (peer in self._away)
        first = rng.randint(1, newest // 2)
        merges = rng.randint(8, newest - first + 1)
        return Watermark(
            peer,
            Stamp(FORMER_LIFE, merges),
            newest,
            first,
            merges,
            seat,
            ALL_AT,
            hashlib.sha256(f"{peer}/{number}".encode()).digest()[:8],
        )

    def _part(self, mark: Watermark, fragment: int) -> Contributor:
        config = self._plan.config
        part = Contributor(
            mark.learner,
            mark.stamp,
            config.usual_tokens,
            config.inner_steps,
            Stamp(FORMER_LIFE, mark.merges - 1),
            payload_digest=hashlib.sha256(f"{mark.learner}/{mark.number}".encode()).digest(),
            votes=bool(mark.seat),
        )
        signed = signed_bytes("work", part.work(config.run, fragment))
        return structs.replace(part, signature=HashCrypto(mark.learner).sign(signed))

    def _checkpoint(self, genesis: FragmentLineage) -> Checkpoint:
        config, fragment = self._plan.config, genesis.fragment
        number, first = self._rng.randint(*NUMBERS), config.genesis_versions[fragment].header
        first_table = founding(config.seats)
        marks = {peer: self._mark(peer, first_table.seat(peer), number) for peer in sorted(self.members)}
        table = tuple(marks.get(mark.learner, mark) for mark in first_table.table)
        digest = hashlib.sha256(b"past/%d/" % number + genesis.digest).digest()
        syncer = self._rng.choice(list(marks))
        header: VersionHeader = structs.replace(
            first,
            number=number,
            parent=hashlib.sha256(b"parent/" + digest).digest(),
            term=number // 2,
            syncer=syncer,
            tokens=number * len(marks) * config.usual_tokens,
            state_digest=digest,
            contributors=tuple(self._part(mark, fragment) for mark in table if mark.number == number),
            unit=config.usual_tokens,
            table=table_digest(table),
        )
        version = SignedVersion(header, HashCrypto(syncer).sign(signed_bytes("version", header)))
        return Checkpoint(version, replace(genesis, number=number, digest=digest, following={}), table, {})

"""A node's disk: it outlives the node's crashes; writes that were under way at a crash are lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from p2pdiloco.core.api.config import CoreConfig, Restored, RestoredFragment
from p2pdiloco.core.api.effects import VoteRecord
from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.types import Watermark
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain import marks_of
from p2pdiloco.core.pending import TakeUp, Unmerged
from p2pdiloco_lab.simulation.node.lineage import FragmentLineage, OuterUpdate
from p2pdiloco_lab.simulation.node.substance import NOTHING, Resumed, Substance

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
    """A learner's unmerged displacement of one fragment at an orderly end (daemon/run_files/saved_state.py)."""

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
    votes: dict[tuple[str, int, int], str] = field(default_factory=dict)
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
        self.votes[(record.group, record.fragment, record.term)] = record.candidate

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
            version, update = child
            said = replace(update, longest_steps=version.header.longest_steps())
            state = state.apply(said, substance)
            if state.digest != version.header.state_digest:  # a liar's own: it goes on from what it stated
                state = state.miscomputed()
            log[version.header.number] = child
            marks = marks.after(version.header.number, version.header.contributors)
        return Checkpoint(version, state, marks.table, log)

    def holds_run(self, fragments: int) -> bool:
        """Every fragment is saved, and not all of them as version 0: a node can go on from this alone."""
        numbers = [checkpoint.version.header.number for checkpoint in self.checkpoints.values()]
        return len(numbers) == fragments and max(numbers) > 0

    def vote_records(self) -> tuple[VoteRecord, ...]:
        """List the durable votes, in order."""
        return tuple(VoteRecord(f, t, who, group) for (group, f, t), who in sorted(self.votes.items()))


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

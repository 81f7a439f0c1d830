"""Attestations of this node in one fragment.

Rules: docs/protocol/belief.md, section 6.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from p2pdiloco.core.api.events import MILESTONES, Persist, Undone, VoteRecord
from p2pdiloco.core.api.types import Attestation
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.fork_choice import ForkChoice


class Attester:
    """This node's word on milestones: one a height, durable before a label of its work says it.

    It attests what its chain asks for once a version more is built on the target, and its head has support:
    else it may be about to leave for another chain, on which it could not attest that height any more.
    """

    def __init__(self, context: FragmentContext, heads: ForkChoice, votes: Iterable[VoteRecord]) -> None:
        self._context, self._shared, self._chain = context, context.shared, context.chain
        self._heads = heads
        nothing = VoteRecord(context.index, 0, "", MILESTONES)
        said = (vote for vote in votes if vote.group == MILESTONES)
        self._newest = max(said, key=lambda vote: vote.term, default=nothing)
        self._durable, self._saving = True, False

    def attestation(self) -> Attestation | None:
        """Find what the next label is to say; None: nothing, or our chain has it already."""
        link = self._chain.link
        if link is None or not self._durable or self._record(link) != self._newest:
            return None
        return None if self._chain.marks.attested(self._shared.me) == link.target.number else link

    def poll(self) -> None:
        """Attest the newest milestone, if it is time; it is saved first."""
        link = self._chain.link
        if self._saving or link is None:
            return
        record = self._record(link)
        if record == self._newest and not self._durable and self._shared.vote_disk.works:
            self._save(record)
        elif self._may(record):
            self._newest, self._durable = record, False
            self._save(record)

    def _record(self, link: Attestation) -> VoteRecord:
        named = hashlib.sha256(link.named()).hexdigest()
        return VoteRecord(self._context.index, link.target.number, named, MILESTONES, link.source.number)

    def _may(self, record: VoteRecord) -> bool:
        """Tell whether an honest seat attests that. Of a disk that is an old copy the chain may know more."""
        shared, marks, newest = self._shared, self._chain.marks, self._newest
        higher = record.term > max(newest.term, marks.attested(shared.me)) and record.source >= newest.source
        settled = shared.confirmed and self._heads.verified and not self._heads.apart
        return higher and settled and shared.me in marks.seats and self._chain.head.number > record.term

    def _save(self, record: VoteRecord) -> None:
        self._saving = True
        self._shared.out.ask(Persist(record, ()), self._saved)

    def _saved(self, answer: Undone | None, now: float) -> None:
        self._saving, self._durable = False, answer is None
        if answer is None:
            self._shared.vote_disk.saved(now)
        else:
            self._shared.vote_disk.failed(lambda: self._save(self._newest), answer.reason, now)

"""Our own vote in one group, and what others' votes prove (design 5.3)."""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.effects import Effect, VoteRecord
from p2pdiloco.core.electorate import Electorate
from p2pdiloco.core.types import Certificate, Vote, VoteBody

MAX_SAVING = 2
"""Votes that wait for the disk at one time; on a slow one, votes for ever new terms would only queue up."""


class Voter:
    """One vote per (group, fragment, term), durable before anybody hears of it."""

    def __init__(self, context: FragmentContext, group: str) -> None:
        self._context = context
        self._shared = context.shared
        self._group = group
        vote, self.durable = context.ballots.last(group)
        self.term = vote.term if vote else context.ballots.floor(group)
        """Of our newest vote."""
        self.candidate = vote.candidate if vote else ""
        self.saving = 0
        """Votes on their way to the disk."""

    def gave(self, candidate: str, term: int) -> bool:
        """Whether this is our vote, and durable."""
        return (self.term, self.candidate, self.durable) == (term, candidate, True)

    def why_not(self, candidate: str, term: int) -> str:
        """Why we cannot vote for that candidate in that term; empty if we can."""
        if term < self.term or (term == self.term and self.candidate != candidate):
            return f"our vote of term {self.term} is given"
        return "our last votes are still being saved" if self.saving >= MAX_SAVING else ""

    def sign(self, candidate: str, term: int) -> Vote:
        """The vote itself; it must be durable before it leaves us."""
        shared = self._shared
        body = VoteBody(shared.config.run, self._group, self._context.index, term, candidate, shared.me)
        return Vote(body, shared.sign("vote", body))

    def give(
        self,
        candidate: str,
        term: int,
        then: tuple[Effect, ...],
        done: Callable[[float], None],
        failed: Callable[[float, str], None],
    ) -> None:
        """From now on this is our choice. `then` happens once it is durable, and `done` hears of it."""
        self.term, self.candidate, self.durable = term, candidate, False
        record = VoteRecord(self._context.index, term, candidate, self._group)
        self._context.ballots.give(record, durable=False)
        self.saving += 1
        token = self._shared.out.persist(record, then)
        self._shared.on_persisted[token] = lambda t: self._saved(record, done, t)
        self._shared.on_persist_failed[token] = lambda t, why: self._not_saved(failed, t, why)

    def _saved(self, record: VoteRecord, done: Callable[[float], None], now: float) -> None:
        self.saving -= 1
        self.durable = self.durable or record.term == self.term
        if self._context.ballots.last(self._group)[0] == record:
            self._context.ballots.give(record, durable=True)
        done(now)

    def _not_saved(self, failed: Callable[[float, str], None], now: float, why: str) -> None:
        self.saving -= 1
        failed(now, why)


def why_not_certified(
    context: FragmentContext, electorate: Electorate, certificate: Certificate, now: float
) -> str:
    """Why a certificate puts nobody in office, in the view that we have ourselves; empty if it does."""
    shared = context.shared
    valid: set[str] = set()
    for vote in certificate.votes:
        body = vote.body
        expected = VoteBody(
            shared.config.run,
            certificate.group,
            context.index,
            certificate.term,
            certificate.syncer,
            body.voter,
        )
        if body != expected or not shared.signed_by(body.voter, "vote", body, vote.signature):
            return "certificate-signature"
        valid.add(body.voter)
    if not valid:
        return "certificate-empty"
    if shared.confirmed and 2 * electorate.count(valid, now) <= electorate.size(now):
        return "certificate-minority"
    return ""

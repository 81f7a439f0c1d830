"""Candidates for an office: whose turn it is to stand, who leaves it to others, and who comes last.

`Candidates` ranks those that would stand. `Trust` says whether this member counts on the syncer in office.

Rules: docs/protocol/election.md, sections 2, 3 and 6.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import islice

from p2pdiloco.core.api.reasons import Suspicion
from p2pdiloco.core.api.types import WHOLE_RUN, Certificate
from p2pdiloco.core.api.versions import VersionHeader
from p2pdiloco.core.context import LEAVES_TO_OTHERS, Electorate, Fitness, FragmentContext
from p2pdiloco.core.distrust import OF_OFFICE
from p2pdiloco.util import BoundedDict

MAX_DOUBLED = 3
"""Limit of doublings of what each rank waits."""


class Candidates:
    """Candidates for one group's office, this node among them, ranked anew only when they change."""

    def __init__(self, context: FragmentContext, group: str, electorate: Electorate) -> None:
        self._context = context
        self._group = group
        self._electorate = electorate
        self._had: BoundedDict[str, None] = BoundedDict()
        """Syncers in the order in which they made a version, or nothing of the office, the last one last."""
        self._seen: VersionHeader | None = None
        self._of: tuple[int, list[str], frozenset[str]] = (0, [], frozenset())
        self._ours = 0
        self.losses = 0
        """Candidacies of ours that failed since the office was last filled."""
        self.taken_s = -1e18
        """Time at which the office was last filled."""

    def may_stand(self, now: float) -> bool:
        """Tell whether we would be syncer. One that leaves would not, but where no other would and work of
        its own waits for one."""
        shared = self._context.shared
        if not shared.votes or not shared.exact or not self._electorate.decides(shared.me, now):
            return False
        return not shared.leaving or (self._context.needs_syncer() and not self._electorate.willing(now))

    def lost(self) -> None:
        """Note that a candidacy of ours failed."""
        self.losses += 1

    def filled(self, now: float) -> None:
        """Note that the office is filled."""
        self.losses, self.taken_s = 0, now

    def wait_s(self, term: int, now: float) -> float:
        """Compute how long our rank leaves the better ones alone.

        Members of a new group see its office open a message's way apart; and where candidates crossed each
        other's path, messages take longer than a rank waited.
        """
        shared = self._context.shared
        doubled = min(self.losses + (self._group != WHOLE_RUN), MAX_DOUBLED)
        later_s = shared.timing.settle_s if self.passed_over(now) else 0.0
        return self.our_rank(term, now) * shared.timing.stagger_s * (1 << doubled) + later_s

    def passed_over(self, now: float) -> bool:
        """Tell whether we should leave the office to a fitter member."""
        return bool(self._electorate.fitter(self._context.shared.me, now))

    def why_give_way(
        self, certificate: Certificate | None, now: float, number: int = 0, candidate: str = ""
    ) -> str:
        """Say why the holder should leave the office to others: it was elected where those were not there, or
        were no fitter. Empty if it should not, or not yet.

        It first makes a version (`number`: there is one of it, though not here), so that work goes on if they
        fail. It goes on while none of the fitter ones has that: they could not be elected. A hidden holder
        has a limited time for it. `candidate`: the member that asks for the office; unless the holder has
        laid it down, it has to be one of the fitter ones itself.
        """
        if certificate is None:
            return ""
        fitter = self._electorate.fitter(certificate.syncer, now)
        if candidate and self._still_holds(certificate):
            fitter = [peer for peer in fitter if peer == candidate]
        if not fitter:
            return ""
        fitness = self._electorate.fitness(certificate.syncer)
        made = max(self._context.chain.head.number, number) > certificate.base[0]
        ends = made and any(peer == candidate or self._up_to_date(peer) for peer in fitter)
        if fitness is Fitness.HIDDEN:
            ends = made or now - self.taken_s >= self._context.shared.timing.settle_s
        return LEAVES_TO_OTHERS[fitness] if ends else ""

    def _up_to_date(self, peer: str, less: int = 0) -> bool:
        """Tell whether that peer, perhaps oneself, has our newest version, or is behind by no more than
        `less`."""
        chain, view = self._context.chain, self._context.shared.view
        head = chain.head if peer == self._context.shared.me else view.head(peer, self._context.index)
        return head is not None and head.number >= chain.head.number - less

    def _still_holds(self, certificate: Certificate) -> bool:
        """Tell whether the certified syncer still holds the office, by its last heartbeat."""
        progress = self._context.shared.view.progress(certificate.syncer)
        office = self._group, self._context.index, certificate.term
        return certificate.syncer == self._context.shared.me or bool(progress and office in progress.offices)

    def our_rank(self, term: int, now: float) -> int:
        """Find our rank in that term; 0: we are first."""
        shared = self._context.shared
        of = term, self._electorate.candidates(now), self._lately(now)
        if of != self._of:
            order = ranking(shared.config.run, self._group, self._context.index, term, of[1])
            order.sort(key=lambda peer: peer in of[2])
            self._of, self._ours = of, order.index(shared.me)
        return self._ours

    def look(self) -> None:
        """Note who made the head of the chain. In grouped runs no group's syncer makes versions."""
        header = self._context.chain.header
        if header is not self._seen and self._group == WHOLE_RUN and header.groups == 1:
            self._seen = header
            self.had(header.syncer)

    def had(self, syncer: str) -> None:
        """Let others come before this syncer. Nobody can make a member wait for its rank, and by naming a
        high term it can choose one in which it is the first. So without this one member could hold every
        office for ever, and leave whom it likes out of all rounds, or make nothing."""
        self._had.pop(syncer, None)
        self._had[syncer] = None

    def _lately(self, now: float) -> frozenset[str]:
        return frozenset(islice(reversed(self._had), len(self._standing(now)) // 2))

    def _standing(self, now: float) -> list[str]:
        own = [self._context.shared.me] if self.may_stand(now) else []
        return [*self._electorate.willing(now), *own]

    def comes_last(self, candidate: str, certificate: Certificate | None, now: float) -> bool:
        """Tell whether others are to be elected before that candidate, which was syncer lately, and there are
        some."""
        lately = self._lately(now)
        if candidate not in lately or self._goes_on(candidate, certificate):
            return False
        fit = self._electorate.fitness(candidate)
        return any(
            peer not in lately and self._electorate.fitness(peer) >= fit and self._up_to_date(peer, 1)
            for peer in self._standing(now)
        )

    def _goes_on(self, candidate: str, certificate: Certificate | None) -> bool:
        """Tell whether that one asks again for its own office, of which it has not made as many versions as a
        term has: its votes may be no majority any more."""
        chain, most = self._context.chain, self._context.shared.config.term_versions
        made_nothing = next(reversed(self._had)) == candidate != chain.header.syncer
        if certificate is None or certificate.syncer != candidate or made_nothing:
            return False
        first = chain.logged(chain.head.number - most + 1)
        made = first is not None and first.header.syncer == candidate
        return not made and chain.head.number < certificate.base[0] + most


class Trust:
    """Trust of one member in one group's syncer, by what it has seen itself.

    Rules: docs/protocol/election.md, section 2.
    """

    def __init__(
        self, context: FragmentContext, group: str, electorate: Electorate, candidates: Candidates
    ) -> None:
        self._electorate = electorate
        self._shared = context.shared
        self._fragment = context.index
        self._roster = context.roster
        self._group = group
        self._candidates = candidates
        self.suspected: Suspicion | None = None
        """Reason why this one is not counted on, though it is alive; None if it is."""
        self._stays_term = 0
        """Term in which others let stay whom we do not count on."""
        self._rests_until_s = 0.0

    def doubt(self, why: Suspicion | None) -> None:
        """Stop counting on it, or (None) count on it again, or on the next."""
        self.suspected = why

    def overruled(self, certificate: Certificate, now: float) -> None:
        """Take in that those that refused us their votes count on it, where we do not. To stand against it
        again soon would be in vain."""
        self._rests_until_s = now + self._shared.timing.member_ttl_s
        self._stays_term = certificate.term

    def stays(self, certificate: Certificate) -> bool:
        """Tell whether others count on it, and so it stays."""
        return certificate.term == self._stays_term

    def rests(self, certificate: Certificate | None, now: float) -> bool:
        """Tell whether to stand against it is in vain for now: others have just let it stay."""
        return certificate is not None and now < self._rests_until_s and not self._gone(certificate, now, "")

    def why_not(self, certificate: Certificate, now: float, candidate: str = "") -> str:
        """Say why the certified syncer cannot be counted on (or is to leave the office to `candidate`); empty
        if it can. For another than this node."""
        return self._seen(certificate, now, candidate) or self._found(certificate.syncer, now)

    def _found(self, syncer: str, now: float) -> str:
        """Say what audits of ours have found against it. Without a vote we cannot find out whether others
        count on it all the same: it is to have our work."""
        found = self._electorate.decides(self._shared.me, now) and self._shared.distrust.has(
            syncer, now, *OF_OFFICE
        )
        return "the syncer is distrusted" if found else ""

    def _seen(self, certificate: Certificate, now: float, candidate: str) -> str:
        """Say what else speaks against it, which others may see, too."""
        if certificate.syncer in self._shared.excluded:
            return "the syncer is excluded"
        if self._roster.known and certificate.syncer not in self._roster.known:
            return "the syncer has no seat any more"
        return str(self.suspected) if self.suspected is not None else self._gone(certificate, now, candidate)

    def _gone(self, certificate: Certificate, now: float, candidate: str) -> str:
        """Say why it is not here any more, or is to leave the office to others."""
        if others := self._candidates.why_give_way(certificate, now, candidate=candidate):
            return f"the syncer {others}"
        view, syncer = self._shared.view, certificate.syncer
        if view.has_left(syncer):
            return "the syncer left"
        said = view.progress(syncer)
        if said and not said.votes and (self._group, self._fragment, certificate.term) not in said.offices:
            return "the syncer cannot save, and has laid the office down"
        if not view.alive(syncer, now):
            silent = view.silence_s(syncer, now) >= self._shared.timing.suspect_s
            return "the syncer is silent" if silent else "the syncer is unreachable"
        return ""


def ranking(run: str, group: str, fragment: int, term: int, candidates: Iterable[str]) -> list[str]:
    """Rank all candidates, the first first.

    Every peer computes the same order from the same members, and a different one for every fragment and term.
    So offices spread over the members and rotate by themselves, without a word exchanged
    (docs/protocol/election.md, section 3).
    """

    def score(peer: str) -> bytes:
        return hashlib.sha256(f"{run}/{group}/{fragment}/{term}/{peer}".encode()).digest()

    return sorted(candidates, key=score, reverse=True)

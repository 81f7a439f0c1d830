"""Candidates for an office: whose turn it is to stand, and who leaves it to others.

Rules: docs/protocol/election.md, section 7.
"""

from __future__ import annotations

from p2pdiloco.core.api.types import WHOLE_RUN, Certificate
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.electorate import LEAVES_TO_OTHERS, Electorate, Fitness
from p2pdiloco.core.election.idle import Idle
from p2pdiloco.core.election.rendezvous import ranking
from p2pdiloco.core.election.rota import Rota

MAX_DOUBLED = 3
"""Limit of doublings of what each rank waits."""


class Candidates:
    """Candidates for one group's office, this node among them, ranked anew only when they change."""

    def __init__(self, context: FragmentContext, group: str, electorate: Electorate) -> None:
        self._context = context
        self._group = group
        self._electorate = electorate
        self.idle = Idle()
        self._rota = Rota()
        self._of: tuple[int, list[str], frozenset[str], frozenset[str]] = (0, [], frozenset(), frozenset())
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
        later_s = shared.timing.hidden_wait_s if self.passed_over(now) else 0.0
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
        made = max(self._context.chain.head.number, number) > certificate.start_number
        ends = made and any(peer == candidate or self._up_to_date(peer) for peer in fitter)
        if fitness is Fitness.HIDDEN:
            ends = made or now - self.taken_s >= self._context.shared.timing.hidden_wait_s
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

    def is_news(self, syncer: str, now: float) -> bool:
        """Tell whether it was elected just now among peers that had not met before: its heartbeat is on the
        way."""
        shared = self._context.shared
        met = self._group == WHOLE_RUN or not shared.view.may_come(syncer, now)
        return not met and now - self.taken_s < shared.timing.suspect_s

    def our_rank(self, term: int, now: float) -> int:
        """Find our rank in that term; 0: we are first."""
        shared = self._context.shared
        of = term, self._electorate.candidates(now), self.idle.now(now), self._lately(now)
        if of != self._of:
            order = ranking(shared.config.run, self._group, self._context.index, term, of[1])
            order.sort(key=lambda peer: (peer in of[2], peer in of[3]))
            self._of, self._ours = of, order.index(shared.me)
        return self._ours

    def look(self) -> None:
        """Note who made the head of the chain. In grouped runs no group's syncer makes versions."""
        if self._group == WHOLE_RUN and self._context.chain.header.groups == 1:
            header = self._context.chain.header
            self._rota.made(header.syncer, header.number)

    def _lately(self, now: float) -> frozenset[str]:
        return self._rota.lately(len(self._standing(now)) // 2)

    def _standing(self, now: float) -> list[str]:
        """List everyone that would stand, oneself included."""
        own = [self._context.shared.me] if self.may_stand(now) else []
        return [*self._electorate.willing(now), *own]

    def waited_in_vain(self, certificate: Certificate | None, now: float) -> None:
        """Remember a syncer that makes nothing of its term. In grouped runs versions are not its to make."""
        if certificate and self._group == WHOLE_RUN and self._context.chain.header.term < certificate.term:
            self.idle.was(certificate.syncer, certificate.term, now)

    def comes_last(self, candidate: str, certificate: Certificate | None, now: float) -> bool:
        """Tell whether others are to be elected before that candidate, which made nothing of its last term or
        was syncer lately, and there are some."""
        idle = self.idle.now(now)
        others = [peer for peer in self._standing(now) if peer not in idle]
        if candidate in idle:
            return bool(others)
        lately = self._lately(now)
        if candidate not in lately or self._goes_on(candidate, certificate):
            return False
        fit = self._electorate.fitness(candidate)
        return any(
            peer not in lately and self._electorate.fitness(peer) >= fit and self._up_to_date(peer, 1)
            for peer in others
        )

    def _goes_on(self, candidate: str, certificate: Certificate | None) -> bool:
        """Tell whether that one asks again for its own office, of which it has not made as many versions as a
        term has: its votes may be no majority any more."""
        most = self._context.shared.config.term_versions
        if certificate is None or certificate.syncer != candidate:
            return False
        over = self._context.chain.head.number >= certificate.start_number + most
        return not over and self._rota.versions(candidate) < most

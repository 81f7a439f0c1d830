"""Candidates for an office: whose turn it is to stand, who leaves it to others, and who comes last.

`Candidates` ranks those that would stand. `Trust` says whether this member counts on the syncer in office.
`Rota` and `Idle` know the syncers that others come before.

Rules: docs/protocol/election.md, sections 2, 3, 7 and 8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import islice

from p2pdiloco.core.api.reasons import Suspicion
from p2pdiloco.core.api.types import WHOLE_RUN, Certificate
from p2pdiloco.core.context import LEAVES_TO_OTHERS, Electorate, Fitness, FragmentContext
from p2pdiloco.util import BoundedDict

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
        self.idle.filled()

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
        made = max(self._context.chain.head.number, number) > certificate.base[0]
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
        own = [self._context.shared.me] if self.may_stand(now) else []
        return [*self._electorate.willing(now), *own]

    def waited_in_vain(self, certificate: Certificate | None, now: float) -> None:
        """Remember a syncer that makes nothing of its term. In grouped runs versions are not its to make."""
        if certificate and self._group == WHOLE_RUN and self._context.chain.header.term < certificate.term:
            self.idle.was(certificate.syncer, certificate.term, now)

    def comes_last(self, candidate: str, now: float) -> bool:
        """Tell whether others are to be elected before that candidate, which made nothing of its last term or
        was syncer lately, and there are some."""
        idle = self.idle.now(now)
        others = [peer for peer in self._standing(now) if peer not in idle]
        if candidate in idle:
            return bool(others)
        lately = self._lately(now)
        if candidate not in lately:
            return False
        fit = self._electorate.fitness(candidate)
        return any(
            peer not in lately and self._electorate.fitness(peer) >= fit and self._up_to_date(peer, 1)
            for peer in others
        )


REST_S = 10.0
"""Time for which this member does not stand again against a holder that others count on."""


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
        self._group = group
        self._candidates = candidates
        self.suspected: Suspicion | None = None
        """Reason why this one is not counted on, though it is alive; None if it is."""
        self._stays_term = 0
        """Term in which others let stay whom we do not count on."""
        self._rests_until_s = 0.0

    def overruled(self, certificate: Certificate, now: float) -> None:
        """Take in that those that refused us their votes count on it, where we do not."""
        self._rests_until_s = now + REST_S
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
        if not self._electorate.decides(self._shared.me, now):
            return ""
        if self._shared.distrust.has(syncer, now):
            return "a merge of the syncer's was false, or it left our work out"
        return "the syncer's work does harm, or nothing" if syncer in self._shared.loss_audits else ""

    def _seen(self, certificate: Certificate, now: float, candidate: str) -> str:
        """Say what else speaks against it, which others may see, too."""
        if certificate.syncer in self._shared.excluded:
            return "the syncer is excluded"
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


MOST = 256


class Rota:
    """Syncers of one chain in the order in which they made its versions, as this member saw.

    Others come before those that were syncer last. Nobody can make a member wait for its rank, and by naming
    a high term it can choose one in which it is the first. So without this one member could hold every office
    for ever, and leave whom it likes out of all rounds.

    Rules: docs/protocol/election.md, section 8.
    """

    def __init__(self) -> None:
        self._last: BoundedDict[str, int] = BoundedDict(MOST)
        """Number of each one's newest version, the newest last."""

    def made(self, syncer: str, number: int) -> None:
        """Note who made the head of the chain, and its number."""
        if self._last.get(syncer) != number:
            self._last[syncer] = number

    def lately(self, many: int) -> frozenset[str]:
        """List so many of those who were syncer last."""
        return frozenset(islice(reversed(self._last), many))


FIRST_S = 60.0
"""Time for which others come first; twice as long after every further time, up to `LONGEST_S`."""
LONGEST_S = 3600.0


VAIN_S = 3.0
"""Time from the first vote for a candidate on after which one that is not in office yet comes last."""


class Idle:
    """Syncers that made nothing of one group's office, and candidates that made no office of our votes, as
    this member saw, until they make a version.

    They were waited for as long as anybody is. They are the last in turn: else one fast member that makes
    nothing would be elected again and again, each time for a patience of all.

    Rules: docs/protocol/election.md, section 8.
    """

    def __init__(self) -> None:
        self._known: BoundedDict[str, tuple[int, int, float]] = BoundedDict(MOST)
        """The newest such term, how many there were in a row, and until when others come first."""
        self._voted: BoundedDict[str, float] = BoundedDict(MOST)
        """Time at which each first got our vote since the office was last filled."""

    def was(self, syncer: str, term: int, now: float) -> None:
        """Note that this syncer let us wait for nothing in this term."""
        before, times, _ = self._known.get(syncer, (0, 0, 0.0))
        if term > before:
            self._known[syncer] = term, times + 1, now + min(FIRST_S * 2.0 ** min(times, 16), LONGEST_S)

    def voted(self, candidate: str, term: int, now: float) -> None:
        """Note that this one gets our vote, perhaps again, though it did not come into office by it."""
        first_s = self._voted.setdefault(candidate, now)
        if now - first_s >= VAIN_S:
            self.was(candidate, term, now)

    def filled(self) -> None:
        """Note that the office is filled."""
        self._voted.clear()

    def made(self, syncer: str, term: int) -> None:
        """Note that this syncer made a version in this term."""
        if syncer in self._known and self._known[syncer][0] <= term:
            del self._known[syncer]

    def now(self, now: float) -> frozenset[str]:
        """List those after whom nobody comes for a while."""
        return frozenset(peer for peer, (_, _, until_s) in self._known.items() if now < until_s)


def ranking(run: str, group: str, fragment: int, term: int, candidates: Iterable[str]) -> list[str]:
    """Rank all candidates, the first first.

    Every peer computes the same order from the same members, and a different one for every fragment and term.
    So offices spread over the members and rotate by themselves, without a word exchanged
    (docs/protocol/election.md, section 3).
    """

    def score(peer: str) -> bytes:
        return hashlib.sha256(f"{run}/{group}/{fragment}/{term}/{peer}".encode()).digest()

    return sorted(candidates, key=score, reverse=True)

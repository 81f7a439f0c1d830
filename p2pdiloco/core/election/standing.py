"""Whose turn it is to stand for an office, and who leaves it to others (design 5.3)."""

from __future__ import annotations

from p2pdiloco.core.api.types import WHOLE_RUN, Certificate
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.electorate import NOT_DIALABLE, THIN, Electorate
from p2pdiloco.core.election.rendezvous import ranking
from p2pdiloco.core.uplinks.uplink import weights

MAX_DOUBLED = 3
"""What each rank waits doubles so many times at most."""


class Ranks:
    """Our place among those that would stand, which is worked out anew only when they change."""

    def __init__(self, context: FragmentContext, group: str, electorate: Electorate) -> None:
        self._context = context
        self._group = group
        self._electorate = electorate
        self._of: tuple[int, tuple[tuple[str, int], ...]] = (0, ())
        self._ours = 0
        self.losses = 0
        """Candidacies of ours that failed since somebody was in office."""
        self.taken_s = -1e18
        """When the office was last filled."""

    def may_stand(self, now: float) -> bool:
        """Whether we would be syncer. Who leaves would not, but where nobody else would and work of its own
        waits for one."""
        shared = self._context.shared
        if not shared.votes or not shared.stands:
            return False
        return not shared.leaving or (self._context.needs_syncer and not self._electorate.willing(now))

    def filled(self, now: float) -> None:
        """Somebody is in office."""
        self.losses, self.taken_s = 0, now

    def wait_s(self, term: int, now: float) -> float:
        """How long our rank leaves the better ones alone.

        Members of a new group see its office open a message's way apart; and where candidates crossed each
        other's path, messages take longer than a rank waited."""
        shared = self._context.shared
        doubled = min(self.losses + (self._group != WHOLE_RUN), MAX_DOUBLED)
        later_s = shared.timing.hidden_wait_s if self.passed_over(now) else 0.0
        return self.ours(term, now) * shared.timing.stagger_s * (1 << doubled) + later_s

    def passed_over(self, now: float) -> bool:
        """Whether we should leave the office to somebody who can be dialled, or to a better uplink."""
        return bool(self._electorate.passed_over(self._context.shared.me, now))

    def give_way(
        self, certificate: Certificate | None, now: float, number: int = 0, candidate: str = ""
    ) -> str:
        """Why the holder should leave the office to others: it was elected where those were not there, or
        were no better. Empty if it should not, or not yet: it first makes a version (`number`: there is one
        of it, though not here), so that work goes on if they fail. Who cannot be dialled has time for one;
        what is on its way to a thin uplink is not to be sent again for it, and it goes on while none of the
        better ones has what it made: they could not be elected. `candidate`: who asks for the office; unless
        the holder has laid it down, it has to be one of the better ones itself."""
        if certificate is None:
            return ""
        asked_for = bool(candidate) and self._still_holds(certificate)
        better = self._electorate.better(certificate.syncer, now)
        if asked_for:
            better = {peer: why for peer, why in better.items() if peer == candidate}
        made = max(self._context.chain.head.number, number) > certificate.start_number
        if NOT_DIALABLE in better.values():
            waited = now - self.taken_s >= self._context.shared.timing.hidden_wait_s
            return NOT_DIALABLE if made or waited else ""
        return THIN if made and any(peer == candidate or self._level(peer) for peer in better) else ""

    def _level(self, peer: str) -> bool:
        """Whether that peer, perhaps oneself, has our newest version."""
        chain, view = self._context.chain, self._context.shared.view
        head = chain.head if peer == self._context.shared.me else view.head(peer, self._context.index)
        return head is not None and head.number >= chain.head.number

    def _still_holds(self, certificate: Certificate) -> bool:
        """By its last heartbeat."""
        progress = self._context.shared.view.progress(certificate.syncer)
        office = self._group, self._context.index, certificate.term
        return certificate.syncer == self._context.shared.me or bool(progress and office in progress.offices)

    def is_news(self, syncer: str, now: float) -> bool:
        """Elected just now among peers that had not met before: its heartbeat is on the way."""
        shared = self._context.shared
        met = self._group == WHOLE_RUN or not shared.view.may_come(syncer, now)
        return not met and now - self.taken_s < shared.timing.suspect_s

    def ours(self, term: int, now: float) -> int:
        """0: we are first-ranked in that term."""
        shared = self._context.shared
        standing = self._electorate.standing(now)
        strains = tuple(
            (p, shared.strain.value if p == shared.me else shared.view.strain(p)) for p in standing
        )
        if (term, strains) != self._of:
            order = ranking(shared.config.run, self._group, self._context.index, term, weights(strains))
            self._of, self._ours = (term, strains), order.index(shared.me)
        return self._ours

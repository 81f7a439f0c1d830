"""Search for the syncers of the neighbouring groups, when groups are new.

The holder of a group's office asks, for every group beside its own whose syncer it does not know, one
probable member after the other, each several times. A member that knows the certificate sends it. One that
knows only that of a smaller group inside sends that one, and its holder is asked next. The asked one also
learns of the asker: that saves it the search, and a group of newcomers only would hear of no confirmed member
otherwise (docs/protocol/groups.md, section 6).
"""

from __future__ import annotations

from p2pdiloco.core.api.grouping import group_name, leaf_index
from p2pdiloco.core.api.messages import OfficeQuery
from p2pdiloco.core.api.types import Certificate
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.rendezvous import ranking
from p2pdiloco.core.groups.electorates import UpperElectorate
from p2pdiloco.core.timing import backoff_s

KEPT_S = 10.0
"""Time for which an asked peer gets our heartbeats."""
TRIES_EACH = 3
"""Questions to a probable member before the next is asked: whoever is elected there, it will know."""
ASKED_PER_CHILD = 8
"""Limit of peers asked in `KEPT_S`, per group below: strangers' certificates may name any number of them."""


class _Search:
    """Search for the syncer of one group."""

    __slots__ = ("at_s", "tries")

    def __init__(self) -> None:
        self.at_s = -1e18
        self.tries = 0


class Seeking:
    """Searches of one seat above the leaves."""

    def __init__(self, context: FragmentContext, plan: tuple[int, int], electorate: UpperElectorate) -> None:
        self._context = context
        self._shared = context.shared
        self._epoch, self._groups = plan
        self._electorate = electorate
        self._searches: dict[str, _Search] = {}
        self._asked: dict[str, float] = {}
        """Time at which each peer was asked. Bounded: entries are dropped after `KEPT_S`, and searches back
        off."""

        self.due_s: float | None = None
        """Time at which the next one is to be asked."""

    def poll(self, now: float) -> None:
        """Ask for those that are unknown, each in its time."""
        self.due_s = None
        for child in self._electorate.unknown(now):
            search = self._searches.setdefault(child, _Search())
            if now >= search.at_s:
                peer = self._whom(child, search.tries)
                search.tries += 1
                search.at_s = now + backoff_s(self._shared.timing.retry_s, search.tries)
                if peer:
                    self._ask(peer, child, now)
            self.due_s = search.at_s if self.due_s is None else min(self.due_s, search.at_s)

    def neighbours(self, now: float) -> list[str]:
        """List the peers that we asked lately."""
        self._asked = {peer: at_s for peer, at_s in self._asked.items() if now - at_s < KEPT_S}
        return list(self._asked)

    def learned(self, child: str, certificate: Certificate, now: float) -> None:
        """Take in a certificate of that group below, or of one inside it."""
        syncer, shared, plan = certificate.syncer, self._shared, (self._epoch, self._groups)
        if syncer == shared.me or self._asked.get(syncer, -1e18) > now - 0.1:
            return
        leaf = leaf_index(shared.config.run, self._context.index, *plan, syncer)
        if leaf not in self._electorate.children[child]:
            return  # made up: nobody of another group holds an office in this one
        if certificate.group == child:
            self._note(syncer, now)
        else:
            self._ask(syncer, child, now)

    def _ask(self, peer: str, child: str, now: float) -> None:
        if self._note(peer, now):
            self._shared.out.send(peer, OfficeQuery(child, self._context.index, 0))

    def _note(self, peer: str, now: float) -> bool:
        """Count a peer among our neighbours for a while. False: what we were told has led to too many
        already."""
        if peer not in self._asked and len(self._asked) >= ASKED_PER_CHILD * len(self._electorate.children):
            self.neighbours(now)
            if len(self._asked) >= ASKED_PER_CHILD * len(self._electorate.children):
                return False
        self._asked[peer] = now
        self._shared.notices.greet(peer)
        return True

    def _whom(self, child: str, tries: int) -> str:
        """Choose whom to ask: first the one that is ranked first in the election there, then the others."""
        shared, fragment = self._shared, self._context.index
        run, span = shared.config.run, self._electorate.children[child]
        turn = tries // TRIES_EACH
        leaf = span[turn % len(span)]
        mates = shared.roster.leaves(run, fragment, self._epoch, self._groups)[leaf]
        if not mates:
            return ""
        name = group_name(self._epoch, self._groups, 0, leaf)
        order = ranking(run, name, fragment, self._context.chain.head.term + 1, mates)
        return order[turn // len(span) % len(order)]

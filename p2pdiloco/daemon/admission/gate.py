"""Gate of a run: who may say, push and pull what at our front door, before anything of it is decoded.

Rules: docs/protocol/trust.md, section 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

from p2pdiloco.core.api.reasons import Unheard
from p2pdiloco.daemon.admission.papers import Admission, AdmissionFault, encode_notice
from p2pdiloco.daemon.admission.queries import (
    MAX_OTHERS,
    AdmissionQuery,
    AdmissionShown,
    GiveNotice,
    JoinAnswer,
    MayJoin,
    NoticeAnswer,
    NoticeQuery,
    ShowAdmission,
)
from p2pdiloco.daemon.admission.register import Register
from p2pdiloco.daemon.budgets import LISTING_BYTES, LISTING_S, Budget, Enough
from p2pdiloco.errors import RemoteError

QUERIES, QUERIES_S = 32.0, 60.0
"""Queries with something to check that a peer has answered at once, if it is not admitted, and time in which
it may have as many again."""


_UNHEARD = {AdmissionFault.BANNED: Unheard.BANNED, AdmissionFault.EXCLUDED: Unheard.EXCLUDED}


class Change(Enum):
    """Changes of the register."""

    ADMITTED = "admitted"
    NOTICE = "notice"


class NotAdmitted(RemoteError):
    """Refusal of a peer that the run has not admitted."""

    def __init__(self, why: Unheard) -> None:
        super().__init__(why.value)


class Gate:
    """Gate of one run, for those who come to us."""

    def __init__(
        self,
        register: Register,
        ours: Admission | None,
        changed: Callable[[Change], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ours`: what we show those who ask. `changed` is told when the register has something new."""
        self._register = register
        self._ours = ours
        self._changed = changed
        self._checks = Budget(Enough.ADMISSIONS, QUERIES, QUERIES_S, now)
        self._notices = Budget(Enough.LISTINGS, LISTING_BYTES, LISTING_S, now)

    def check_not_banned(self, peer: str) -> None:
        """Check that the owner has not banned the peer, and no proof excludes it. Raises: NotAdmitted."""
        fault = self._register.shut_out(peer)
        if fault is not None:
            raise NotAdmitted(_UNHEARD[fault])

    def check(self, peer: str) -> None:
        """Check that a peer is admitted. Raises: NotAdmitted."""
        fault = self._register.fault(peer)
        if fault is not None:
            raise NotAdmitted(_UNHEARD.get(fault, Unheard.NOT_ADMITTED))

    def admits(self, peer: str) -> bool:
        """Tell whether a peer is admitted."""
        return self._register.fault(peer) is None

    def has_papers(self, peer: str) -> bool:
        """Tell whether the owner's word admits a peer. In an open run nobody has it."""
        return self._register.charter.mode != "open" and self.admits(peer)

    def answer(self, sender: str, query: AdmissionQuery) -> AdmissionShown | JoinAnswer | NoticeAnswer:
        """Answer a query about admission. Raises: RemoteError (another run's; false; or it had enough)."""
        run = query.notice.run if isinstance(query, GiveNotice) else query.run
        if run != self._register.charter.run:
            raise RemoteError("not-a-member")
        if not self.admits(sender):
            self._checks.check(sender)
            self._checks.take(sender, 1.0)
        match query:
            case ShowAdmission():
                return self._shown(sender, query)
            case MayJoin():
                return JoinAnswer(self._register.would_take(query.peer, query.grant))
            case NoticeQuery():
                return self._notice(sender, query.above)
            case GiveNotice():
                if self._register.take_notice(query.notice):
                    self._changed(Change.NOTICE)
                return self._notice(sender, query.notice.sequence)

    def _shown(self, sender: str, query: ShowAdmission) -> AdmissionShown:
        before = len(self._register.admissions)
        fault = self._register.take(sender, query.admission)
        if len(self._register.admissions) != before:
            self._changed(Change.ADMITTED)
        others = self._register.newest(MAX_OTHERS, (sender,)) if fault is None else ()
        proof = self._register.proof_of(sender)
        return AdmissionShown(fault, self._ours, self._register.sequence, others, proof)

    def _notice(self, sender: str, above: int) -> NoticeAnswer:
        notice = self._register.notice
        if notice is None or notice.sequence <= above:
            return NoticeAnswer(None)
        if not self.admits(sender):
            self._notices.check(sender)
            self._notices.take(sender, len(encode_notice(notice)))
        return NoticeAnswer(notice)

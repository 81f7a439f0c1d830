"""Register of a run's members, as one node has it: whom it has admitted, and what the owner's notice says.

Everything is judged by signatures. A clock is asked only where a peer is seen for the first time: whoever
has been admitted once stays so after the invite's end, and whoever has a mark in the chain was. A newcomer
has no chain yet, and everybody whom it meets may have been there for long: it takes expired ones for the
time being, and whoever has no mark when it is a member itself has to be vouched for by another. `uses` are
counted by what this node has seen or was told; two nodes that cannot hear each other may together admit
more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct

from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.daemon.admission.papers import (
    Admission,
    AdmissionFault,
    Grant,
    Notice,
    admission_fault,
    grant_fault,
    is_true_notice,
)
from p2pdiloco.errors import RemoteError
from p2pdiloco.identity import verify

MAX_ADMITTED = 4096


class Charter(Struct, frozen=True):
    """Terms of a run on its members: whose it is, and who may be one."""

    run: str
    owner: str
    mode: Literal["open", "invite", "list"] = "open"


class Register:
    """Register of one run."""

    def __init__(
        self,
        charter: Charter,
        worked: Callable[[str], bool] = lambda _peer: False,
        settled: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.time,
        proof_of: Callable[[str], Evidence | None] = lambda _peer: None,
    ) -> None:
        """`worked`: tells whether our chain has a mark of the peer; `settled`: whether we have a chain that
        others confirm. `clock`: Unix time. `proof_of`: finds the proof for which a peer is excluded."""
        self.charter = charter
        self.notice: Notice | None = None
        self._worked = worked
        self._settled = settled
        self._provisional: set[str] = set()
        """Peers whose invite had expired when we saw them first, as newcomers."""
        self._clock = clock
        self.proof_of = proof_of
        self._by_peer: dict[str, Admission] = {}
        self._users: dict[str, set[str]] = {}
        """Peers that were admitted by each grant's key, as far as we know."""
        self._banned: frozenset[str] = frozenset()
        self._revoked: frozenset[str] = frozenset()
        self._listed: frozenset[str] = frozenset()

    @property
    def sequence(self) -> int:
        """Sequence of the notice; 0: there is none."""
        return self.notice.sequence if self.notice is not None else 0

    @property
    def admissions(self) -> list[Admission]:
        """Admissions that were taken for good, in the order in which they came."""
        return [shown for peer, shown in self._by_peer.items() if not self._in_doubt(peer)]

    def _in_doubt(self, peer: str) -> bool:
        return peer in self._provisional and not self._worked(peer)

    def vouches(self, peer: str) -> bool:
        """Tell whether the peer's word on others counts: it is admitted, and for good."""
        return self.fault(peer) is None and not self._in_doubt(peer)

    def fault(self, peer: str) -> AdmissionFault | None:
        """Say why a peer is not admitted; None: it is."""
        if peer in self._banned:
            return AdmissionFault.BANNED
        if self.proof_of(peer) is not None:
            return AdmissionFault.EXCLUDED
        if self.charter.mode == "open":
            return None
        if peer in self._by_peer and not (self._in_doubt(peer) and self._settled()):
            return None
        if self.charter.mode == "list":
            return None if peer in self._listed else AdmissionFault.NOT_LISTED
        return AdmissionFault.NOT_SHOWN

    def is_banned(self, peer: str) -> bool:
        """Tell whether the owner has banned the peer, or a proof excludes it."""
        return self.shut_out(peer) is not None

    def shut_out(self, peer: str) -> AdmissionFault | None:
        """Say why nothing of that peer is wanted, whatever it shows; None: it may show something."""
        fault = self.fault(peer)
        return fault if fault in (AdmissionFault.BANNED, AdmissionFault.EXCLUDED) else None

    def take(self, peer: str, shown: Admission | None, vouched: bool = False) -> AdmissionFault | None:
        """Take an admission that a peer shows; say why the peer is not admitted all the same.

        `vouched`: a member has it from an earlier time, so that its end does not matter.
        """
        standing = self.fault(peer)
        if shown is None or self.is_banned(peer) or not self._matters(shown):
            return standing
        if self._by_peer.get(peer) == shown and not self._in_doubt(peer):
            return standing
        fault = admission_fault(shown, peer, self.charter.run, self.charter.owner, verify)
        fault = fault or self._closed(shown.grant, peer, vouched)
        if fault is not None:
            return fault if standing is not None else None
        before = self._by_peer.pop(peer, None)
        if before is not None:
            self._users[before.grant.key].discard(peer)
        self._by_peer[peer] = shown
        self._provisional.discard(peer)
        if self._is_over(shown.grant) and not vouched:
            self._provisional.add(peer)
        self._users.setdefault(shown.grant.key, set()).add(peer)
        return None

    def would_take(self, peer: str, grant: Grant | None) -> AdmissionFault | None:
        """Say why a peer would not be admitted with a grant; None: it would be."""
        standing = self.fault(peer)
        if standing is None or self.is_banned(peer) or grant is None:
            return standing
        fault = grant_fault(grant, self.charter.run, self.charter.owner, verify)
        if fault is None and self.charter.mode == "list":
            return standing
        return fault or self._closed(grant, peer, False)

    def _matters(self, shown: Admission) -> bool:
        """Tell whether the run's mode asks for it: of a list, only the owner's own nodes have admissions."""
        mode = self.charter.mode
        return mode == "invite" or (mode == "list" and shown.grant.key == self.charter.owner)

    def _closed(self, grant: Grant, peer: str, vouched: bool) -> AdmissionFault | None:
        """Say why a sound grant lets this peer in no more."""
        if grant.key in self._revoked:
            return AdmissionFault.REVOKED
        if len(self._by_peer) >= MAX_ADMITTED and peer not in self._by_peer:
            return AdmissionFault.FULL
        users = self._users.get(grant.key, set())
        known = peer in users and peer not in self._provisional
        if grant.key == self.charter.owner or known or self._worked(peer):
            return None
        if not vouched and self._is_over(grant) and self._settled():
            return AdmissionFault.EXPIRED
        return AdmissionFault.USED_UP if len(users - {peer}) >= grant.uses else None

    def _is_over(self, grant: Grant) -> bool:
        return bool(grant.expires) and self._clock() > grant.expires

    def take_notice(self, notice: Notice) -> bool:
        """Take the owner's notice if it is newer than ours; tell whether it was.

        Raises: RemoteError ("notice-signature").
        """
        if notice.sequence <= self.sequence:
            return False
        if not is_true_notice(notice, self.charter.run, self.charter.owner, verify):
            raise RemoteError("notice-signature", "not made by this run's owner")
        self.notice = notice
        self._banned, self._listed = frozenset(notice.banned), frozenset(notice.members)
        self._revoked = frozenset(notice.revoked) - {self.charter.owner}
        for peer in [p for p, shown in self._by_peer.items() if shown.grant.key in self._revoked]:
            del self._by_peer[peer]
            self._provisional.discard(peer)
        return True

    def newest(self, most: int, without: Iterable[str] = ()) -> tuple[Admission, ...]:
        """List the newest admissions, for another member to know."""
        left = [a for a in self.admissions if not self.is_banned(a.peer) and a.peer not in without]
        return tuple(left[-most:])

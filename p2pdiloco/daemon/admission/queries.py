"""Queries about admission between peers: shown at the door, and answered by it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.types import Count, PeerId, RunId, Wire
from p2pdiloco.daemon.admission.papers import Admission, AdmissionFault, Grant, Notice

MAX_OTHERS = 32


class ShowAdmission(Wire, frozen=True, tag=True):
    """Paper that the asker has to show, and the sequence of the notice that it knows (0: of none)."""

    run: RunId
    admission: Admission | None
    notice: Count


class AdmissionShown(Wire, frozen=True, tag=True):
    """Answer to `ShowAdmission`; what follows `fault` is of the one who answers."""

    fault: AdmissionFault | None
    """Reason why the asker is not admitted; None: it is."""
    admission: Admission | None
    notice: Count
    others: Annotated[tuple[Admission, ...], Meta(max_length=MAX_OTHERS)]
    """Admissions that it has seen, the newest ones; for those whom it admits."""
    proof: Evidence | None = None
    """Evidence for which the asker is excluded."""


class MayJoin(Wire, frozen=True, tag=True):
    """Question whether a peer would be admitted with a grant."""

    run: RunId
    peer: PeerId
    grant: Grant | None


class JoinAnswer(Wire, frozen=True, tag=True):
    """Answer to `MayJoin`."""

    fault: AdmissionFault | None


class NoticeQuery(Wire, frozen=True, tag=True):
    """Question for the notice of a run's owner, if its sequence is above this one."""

    run: RunId
    above: Count


class NoticeAnswer(Wire, frozen=True, tag=True):
    """Answer to `NoticeQuery`, and to `GiveNotice`: the notice if it is newer than the asker's."""

    notice: Notice | None


class GiveNotice(Wire, frozen=True, tag=True):
    """Notice for whoever has an older one."""

    notice: Notice


AdmissionQuery = ShowAdmission | MayJoin | NoticeQuery | GiveNotice

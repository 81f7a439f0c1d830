"""Effect that commits a version, with what becomes of our own contribution."""

from __future__ import annotations

from p2pdiloco.core.api.effects import CommitVersion
from p2pdiloco.core.api.types import Ticket
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.contributions.own import ContributionQueue
from p2pdiloco.core.shared import Shared


def commit_effect(
    shared: Shared, chain: Chain, own: ContributionQueue, version: SignedVersion, update: Ticket | None
) -> CommitVersion:
    """Make the effect by which the spare copy becomes the state. It says whether our own contribution is in
    it."""
    marks = chain.marks_after(version.header)
    after = max(marks.stamp(shared.me), chain.watermark(shared.me))
    merged_ticket, overwrite = own.would_merge(after)
    return CommitVersion(version, update, merged_ticket, marks.table, after, overwrite)

"""Checks of fetched versions that need no parent.

Rules: docs/protocol/following.md, section 2.
"""

from __future__ import annotations

from p2pdiloco.core.api.config import CoreConfig
from p2pdiloco.core.api.events import StateFetched
from p2pdiloco.core.api.proofs import false_label
from p2pdiloco.core.api.reasons import VersionFault
from p2pdiloco.core.api.types import WHOLE_RUN, table_digest
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain import scale
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.contributions.label import unsigned
from p2pdiloco.core.following.heads import NamedHeads
from p2pdiloco.core.shared import Shared


def why_no_state(
    context: FragmentContext, heads: NamedHeads, event: StateFetched, now: float
) -> VersionFault | None:
    """Say why a state that a donor gave is not taken; None: it is."""
    version, table, shared = event.version, event.watermarks, context.shared
    header, config = version.header, shared.config
    right = (header.run, header.group, header.fragment) == (config.run, WHOLE_RUN, context.index)
    if not right or not shared.signed_by(header.syncer, "version", header, version.signature):
        return VersionFault.SIGNATURE
    if not (heads.yields_to(event.peer, now) or heads.proven(header, event.peer, now)):
        return VersionFault.UNBACKED
    if context.false_states.builds_on(header):
        return VersionFault.FALSE_STATE
    if not heads.may_copy(header.head(), event.peer, now):
        return VersionFault.UNSUPPORTED
    if not plausible(header, config):
        return VersionFault.IMPLAUSIBLE_TOKENS
    if table_digest(table) != header.table:
        return VersionFault.FALSE_TABLE
    if not scale.can_be(header, table, config):
        return VersionFault.OUT_OF_SCALE
    if falsely_labelled(shared, version):
        return VersionFault.FALSE_LABEL
    return None if heads.may_replace(header.head(), event.peer, now) else VersionFault.BEHIND


def falsely_labelled(shared: Shared, version: SignedVersion) -> bool:
    """Tell whether it names a contribution that its learner did not sign: its syncer lied."""
    index = unsigned(shared, version.header.fragment, version.header.contributors)
    if index is not None:
        shared.excluded.found(false_label(version, index))
    return index is not None


def plausible(header: VersionHeader, config: CoreConfig) -> bool:
    """Tell whether its contributions can be: their steps say how far momentum goes."""
    return header.plausible(config.tokens_per_step, config.inner_steps)

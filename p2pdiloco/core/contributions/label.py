"""Labels of contributions: what their authors sign, and whether they did.

Rules: docs/protocol/exactly-once.md, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pdiloco.core.api.partials import PartOfTree
from p2pdiloco.core.api.types import ContributionHeader, Contributor, MergeLimits, SignedContribution
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.contributions.pending import Pending
from p2pdiloco.core.shared import Shared

DRAWN = 64
"""Labels of one merge whose signatures a member checks; each draws its own, where there are more."""


def signed_label(context: FragmentContext, pending: Pending) -> SignedContribution:
    """Sign what a contribution is, as our chain stands. The base is the head where its own is too old."""
    shared, chain = context.shared, context.chain
    config, ready = shared.config, pending.ready
    age = chain.head.number - pending.base_number
    if not chain.knows(pending.base_number, pending.base_digest) or age > config.max_base_age_versions:
        # A displacement is the same measured from any base that the learner was rebased to.
        pending.rebase(chain.head)
    header = ContributionHeader(
        run=config.run,
        group=context.leaf.name,
        fragment=context.index,
        learner=shared.me,
        stamp=pending.stamp,
        after=pending.after,
        base_number=pending.base_number,
        base_digest=pending.base_digest,
        tokens=ready.tokens,
        inner_steps=ready.inner_steps,
        payload_digest=ready.payload_digest,
        payload_bytes=ready.payload_bytes,
        codec=config.contribution_codec,
        due=ready.due or shared.leaving,
    )
    work = SignedContribution(header, b"").contributor().work(config.run, context.index)
    return SignedContribution(header, shared.sign("work", work))


def signed_by_learners(shared: Shared, fragment: int, parts: Sequence[Contributor]) -> bool:
    """Tell whether the learners themselves say what these parts of a merge say of them, all of them: who puts
    one into a version answers for it."""
    return all(_signed(shared, fragment, part) for part in parts)


def signed_by_syncer(shared: Shared, fragment: int, part: PartOfTree, limits: MergeLimits) -> bool:
    """Tell whether a group's syncer itself says what a merge of these limits says of its partial."""
    label, entry = part.label(shared.config.run, fragment, limits), part.entry
    return shared.signed_by(entry.syncer, "partial", label, entry.signature)


def unsigned(shared: Shared, fragment: int, parts: Sequence[Contributor]) -> int | None:
    """Find a part of a version that its learner did not sign, among some that are drawn; its index. None:
    there is none."""
    drawn = range(len(parts)) if len(parts) <= DRAWN else shared.rng.sample(range(len(parts)), DRAWN)
    return next((index for index in drawn if not _signed(shared, fragment, parts[index])), None)


def _signed(shared: Shared, fragment: int, part: Contributor) -> bool:
    return shared.signed_by(part.learner, "work", part.work(shared.config.run, fragment), part.signature)

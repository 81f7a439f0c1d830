"""Label of a contribution: what its author signs of it, anew for each offer."""

from __future__ import annotations

from p2pdiloco.core.api.types import ContributionHeader, SignedContribution
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.contributions.pending import Pending


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
    return SignedContribution(header, shared.sign("contribution", header))

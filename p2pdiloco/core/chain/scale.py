"""Scale of a chain: what is usual in its versions, against which the numbers of one member are measured.

Members say themselves how many tokens their work took, and how long it is, nobody can know. So every header
carries two running figures: `unit`, the tokens of a usual contribution, and `reach`, the length of a
usual one. They follow from the parent's header and from what was merged, so that whoever has the parent works
them out anew (`after`), and refuses another value. What is beyond them is cut: it counts, weighs and moves no
more than a generous member's work would.

- *counted*: a chain's tokens, and with them the schedule of the learning rate, grow by at most 8 units for a
  contribution, and by twice what it weighs at most (or 2 H inner steps: a fast learner's beside slow ones),
  times the versions since that learner's last one
- *weighed*: no contribution has more weight than 4 units have, however long it took, and none has more than
  a third of a merge to which all others bring usual ones (the run may say other numbers). Where members are
  known, by invite or list, H inner steps weigh in full: there an honest learner may be much the fastest
- length: a contribution is cut to three times the reach, and three times what is usual in its round
  (less, where few of those who vote are in a version)
- who is not trusted (`core.api.trust_weight`) counts and measures nothing

The medians of a round's tokens and lengths move unit and reach, by an eighth at most: so fewer than half of a
round cannot move them, and of two the smaller counts. Where three or more that are trusted vote, only they
are asked (`core.api.references`): identities are free, and votes are not.

Rules: docs/protocol/weights.md, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from p2pdiloco.core.api.config import CoreConfig
from p2pdiloco.core.api.partials import Plan
from p2pdiloco.core.api.plausible import FULL_TRUST, LEAST_TRUST
from p2pdiloco.core.api.reasons import VersionFault
from p2pdiloco.core.api.references import FEWEST, references
from p2pdiloco.core.api.trust_weight import plausible, trust_of
from p2pdiloco.core.api.types import MAX_CONTRIBUTORS, NO_LIMITS, Contributor, MergeLimits, Stamp, Watermark
from p2pdiloco.core.api.versions import VersionHeader
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.chain.earning import earned
from p2pdiloco.core.chain.watermarks import LATELY_VERSIONS

COUNTED_UNITS = 8
"""Units that one contribution counts at most, for every version since the learner's last one."""
COUNTED_WEIGHTS = 2
"""Times the tokens that it weighs at most, or that H inner steps take, that it counts at most, likewise."""
MOST_GAP = 63
"""Limit of versions between two contributions of a learner that are made up for."""
MOST_GROWTH = 256
"""Limit of the unit, as a multiple of that of version 0: H inner steps."""
LONGEST = 3.0
"""Length to which a contribution is cut, as a multiple of the reach."""
COMPANY, LEAST_COMPANY = 2, 1 / 24
"""Divisor of those who vote: with so large a part of them, as far as they are trusted, a version may be as
long as any; with a smaller one it is shorter, by the square. And the least share of that length: an eighth of
the reach."""
LEAST_OFTEN = FULL_TRUST // 3
"""Part of all versions, of `FULL_TRUST`, in which a voter is reckoned to be at least. Those on thin links are
in fewer, and one alone is what is usual there."""
FIRST_LONGEST = 8.0
"""Length to which one is cut in version 1, before which none was measured."""
FIRST_REACH = 0.25
"""Reach of version 0, as a share of its own length: first strides of twice that are not cut."""
SHORT = 8
"""Divisor of H: contributions of fewer inner steps say little about what is usual."""
FASTEST = 8
"""Divisor of a step: unit and reach move by so small a part of the way to the newest value."""
FINDING_VERSIONS, FINDING = 16, 2
"""Versions at a run's beginning in which the reach moves by a larger part: what is usual is not known yet.
It comes from above: while learning rates warm up, lengths grow tenfold from one version to the next."""
REACHES = 2.0**-20, 2.0**10
"""Least and largest reach, as multiples of version 0's length. No run needs others, and none gets stuck."""
MOST_SEQUENCE = 1 << 16
"""Contributions of a learner that can have come to nothing between two that are merged."""
MOST_INCARNATION = 1 << 43
"""Limit of incarnations, which are milliseconds since 1970: the year 2248."""
MOST_TERMS = 1 << 16
"""Elections that there can be between two versions. Terms start above the head's: numbers that end."""
MOST_VERSIONS = 1 << 40
MOST_TOKENS = MAX_CONTRIBUTORS * COUNTED_UNITS * (1 + MOST_GAP) * MOST_GROWTH
"""Limit of what one version adds to a chain's tokens, as a multiple of version 0's unit."""
BEGINNERS = 4
"""Learners that may have begun since anything of them could be merged."""
PARTIAL_VERSIONS = 16
"""Versions for which a partial merge may be under way and not know of new voters."""
LONG = 32
"""Number of contributors from which on it pays to remember what follows from them."""
REMEMBERED = 64
"""Answers about long headers that are kept, for the nodes of a simulator."""


class Scale(Struct, frozen=True):
    """Figures of a version that follow from its parent and from what was merged."""

    tokens: int
    """Tokens of the chain, as counted."""
    unit: int
    reach: float


def unit_of(header: VersionHeader, config: CoreConfig) -> int:
    """Tokens of a usual contribution once this is the head; H inner steps' where no version says so."""
    return header.unit or config.usual_tokens


def limits_after(chain: Chain, config: CoreConfig, learners: Iterable[str] | None = None) -> MergeLimits:
    """Compute the limits of what is merged into a child of the chain's head. `learners`: those whose work it
    is, if that is all that is merged; None: it is a part of a version."""
    unit = unit_of(chain.header, config)
    heaviest = heaviest_units(chain.marks.lately, config) * unit
    if config.admits:
        heaviest = max(heaviest, min(config.usual_tokens, config.most_units * unit))
    of_median = LONGEST if chain.header.reach else 0.0
    most_tokens = min(round(heaviest), NO_LIMITS.most_tokens)
    longest = longest_after(chain.header)
    if learners is not None and chain.header.groups == 1:
        longest *= _company(chain, learners)
    return MergeLimits(most_tokens, longest, of_median)


def _company(chain: Chain, learners: Iterable[str]) -> float:
    """Compute the share of the longest contribution that may be merged in a version of these learners. A
    syncer can leave all others out: then nothing is measured, and its own work has all of the weight, however
    little it is trusted. So few of those who vote in the parent's table move the chain by little; each voter
    counts as often as it is in versions."""
    marks, number = chain.marks, chain.header.number
    voting = marks.voting_since(number - LATELY_VERSIONS)
    if len(voting) < FEWEST:
        return 1.0
    here = sum(trust_of(marks.mean(each).agreement) for each in voting.intersection(learners))
    usual = sum(max(LEAST_OFTEN, marks.often(each, number, FULL_TRUST)) for each in voting)
    share = COMPANY * here / usual
    return min(1.0, max(LEAST_COMPANY, share * share))


def heaviest_units(learners: int, config: CoreConfig) -> float:
    """Compute how many units one contribution weighs at most, where so many learners were merged lately.

    A usual one always weighs in full. Of two learners none can be told from the other: no share helps."""
    share = config.largest_share
    if learners <= 2 or share >= 1.0:
        return config.most_units
    return min(max(1.0, (learners - 1) * share / (1.0 - share)), config.most_units)


def plan_of(parent: VersionHeader, config: CoreConfig) -> Plan:
    """Make the plan by which members fall into groups for a child of this version."""
    return Plan(config.run, parent.fragment, parent.epoch, parent.groups, config.group_size)


def longest_after(header: VersionHeader) -> float:
    """Compute the length of a contribution to a child of this version at most."""
    return (LONGEST if header.number else FIRST_LONGEST) * header.reach or math.inf


def strange_after(header: VersionHeader) -> float:
    """Compute the length beyond which a contribution to a child of this version is hardly of a learner that
    still learns."""
    return FIRST_LONGEST * header.reach or math.inf


def after(chain: Chain, contributors: tuple[Contributor, ...], config: CoreConfig) -> Scale:
    """Compute the figures of the version that merges this into the chain's head."""
    tokens, unit = _counted(chain, contributors, config)
    return Scale(tokens, unit, _next_reach(chain.header, contributors, config))


_known: list[tuple[VersionHeader, tuple[Contributor, ...], tuple[int, int]]] = []


def _counted(chain: Chain, parts: tuple[Contributor, ...], config: CoreConfig) -> tuple[int, int]:
    """Compute (tokens, unit) of the next version. In a simulator thousands of nodes ask the same."""
    if len(parts) < LONG:
        return _count(chain, parts, config)
    for known, merged, answer in _known:
        if known is chain.header and merged is parts:
            return answer
    answer = _count(chain, parts, config)
    _known[:] = [*_known[1 - REMEMBERED :], (chain.header, parts, answer)]
    return answer


def _count(chain: Chain, parts: tuple[Contributor, ...], config: CoreConfig) -> tuple[int, int]:
    usual: list[tuple[int, bool]] = []
    parent, first = chain.header, config.usual_tokens
    tokens, unit = parent.tokens, unit_of(parent, config)
    most = min(COUNTED_WEIGHTS * limits_after(chain, config).most_tokens, COUNTED_UNITS * unit)
    most = max(most, COUNTED_WEIGHTS * first)
    for part, earns in zip(parts, earned(parts, chain.marks.lasts), strict=True):
        if not earns:
            continue
        last = chain.merged_at(part.learner)
        share = 1 + min(MOST_GAP, max(0, parent.number - last)) if last else 1
        usual.append((earns // share, part.votes))
        tokens += min(earns, most * share)
    if not usual:
        return tokens + 1, unit  # else it would be no heavier than its parent, and nobody would follow it
    measures = sorted(each for each, _ in references(usual, [votes for _, votes in usual]))
    median = measures[(len(measures) - 1) // 2]
    way = min(max(median, unit // 2), 2 * unit) - unit
    # Towards zero, so that small units do not creep down.
    unit += way // FASTEST if way > 0 else -(-way // FASTEST)
    return tokens, min(max(1, unit), MOST_GROWTH * first)


def _next_reach(parent: VersionHeader, parts: tuple[Contributor, ...], config: CoreConfig) -> float:
    """Floating-point operations that have one result everywhere: no sum is reordered, nothing is fused."""
    first, reach = config.genesis_versions[parent.fragment].header.norm, parent.reach
    if not first:
        return 0.0  # a run made by hand, whose lengths are not known: nothing is cut
    usual = _usual_length(parts, config.inner_steps)
    if not usual:
        return reach
    way = min(max(usual, reach / 2), 2 * reach) - reach
    reach += way / (FINDING if parent.number < FINDING_VERSIONS else FASTEST)
    return min(max(reach, first * REACHES[0]), first * REACHES[1])


def _usual_length(parts: Sequence[Contributor], period: int) -> float:
    """Find the lower median of the lengths, each as if it was of H inner steps: work of fewer is shorter, by
    about the square root of their number."""
    trusted = [part for part in parts if part.trust > LEAST_TRUST] or parts
    trusted = references(trusted, [part.votes for part in trusted])
    whole = [part for part in trusted if SHORT * part.inner_steps >= period] or trusted
    found = sorted(part.length / math.sqrt(min(1.0, part.inner_steps / period)) for part in whole)
    return found[(len(found) - 1) // 2] if found else 0.0


def most_learners(number: int, watermarks: Sequence[Watermark], expected: int = 0) -> int:
    """Number of learners that a run can have at this version: twice those merged lately, and a few that have
    just begun. Who only says that it trains moves no schedule.

    At first not all have been merged: as many as are `expected` can be there.
    """
    found = 2 * sum(mark.number >= number - LATELY_VERSIONS for mark in watermarks) + BEGINNERS
    return max(found, expected) if number <= LATELY_VERSIONS else found


# --- what is beyond every scale ---------------------------------------------------------------------------


def follows(stamp: Stamp, mark: Stamp) -> bool:
    """Tell whether a contribution of that stamp can come after the one merged last: such numbers end, and
    who takes them to their end could never contribute again."""
    floor = mark.sequence if mark.incarnation == stamp.incarnation else 0
    return stamp.incarnation <= MOST_INCARNATION and stamp.sequence <= floor + MOST_SEQUENCE


def can_be(header: VersionHeader, watermarks: Sequence[Watermark], config: CoreConfig) -> bool:
    """Tell whether some chain can have such numbers, whatever its history: asked of copies, whose parent is
    not known."""
    first = config.genesis_versions[header.fragment].header.norm
    return (
        header.number <= MOST_VERSIONS
        and header.term <= header.number * MOST_TERMS
        and header.tokens <= header.number * MOST_TOKENS * config.usual_tokens
        and header.unit <= MOST_GROWTH * config.usual_tokens
        and 0.0 <= header.reach <= first * REACHES[1]
        and math.isfinite(header.norm)
        and all(mark.stamp.incarnation <= MOST_INCARNATION for mark in watermarks)
        and all(mark.stamp.sequence <= header.number * MOST_SEQUENCE for mark in watermarks)
    )


def rightly_stated(chain: Chain, part: Contributor) -> bool:
    """Tell whether a part of a merge has measurements that can be, and the trust weight that follows from its
    score and the chain."""
    can_be_so = 0.0 <= part.length < math.inf and plausible(part.score) and _votes_so(chain, part)
    return can_be_so and part.trust == chain.marks.mean(part.learner).trust(part.score)


def _votes_so(chain: Chain, part: Contributor) -> bool:
    """Tell whether a part says rightly whether its learner votes. What comes in a partial merge may be of an
    earlier table: who has voted since a few versions only may be called one who does not yet."""
    since = chain.marks.voter_since(part.learner)
    if part.votes or not since:
        return part.votes == bool(since)
    return chain.header.groups > 1 and since + PARTIAL_VERSIONS > chain.header.number


# --- what a version states --------------------------------------------------------------------------------


def fault(chain: Chain, header: VersionHeader, config: CoreConfig) -> VersionFault | None:
    """Say what is wrong with the numbers of a child of the chain's head; None: nothing."""
    for part in header.contributors:
        mark = chain.watermark(part.learner)
        if part.after != mark or not follows(part.stamp, mark):
            return VersionFault.FALSE_STAMP
        if not rightly_stated(chain, part):
            return VersionFault.FALSE_TRUST
    limits = limits_after(chain, config, [part.learner for part in header.contributors])
    if not 0.0 <= header.norm <= limits.longest_update or math.isinf(header.norm):
        return VersionFault.OUT_OF_SCALE
    right = after(chain, header.contributors, config)
    if not header.contributors or header.tokens != right.tokens:
        return VersionFault.FALSE_TOKENS
    stated = header.unit, header.reach, header.limits
    if stated != (right.unit, right.reach, limits):
        return VersionFault.FALSE_SCALE
    near = all(entry.by(limits).near(limits) for entry in header.partials)
    made_so = near and header.tree(plan_of(chain.header, config)) is not None
    return None if made_so else VersionFault.FALSE_PARTIALS

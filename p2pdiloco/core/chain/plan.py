"""Plan of the groups that a version's header states, worked out by its maker and checked by everybody.

Rules: docs/protocol/groups.md, section 1.
"""

from __future__ import annotations

from p2pdiloco.core.api.config import CoreConfig
from p2pdiloco.core.api.grouping import next_plan
from p2pdiloco.core.api.versions import VersionHeader
from p2pdiloco.core.chain.watermarks import Marks

LATELY_TERMS = 2
"""Terms in whose versions a learner was merged to be counted: who works, not who is listed, makes groups."""


def plan_after(parent: VersionHeader, marks: Marks, number: int, config: CoreConfig) -> tuple[int, int]:
    """Decide (epoch, groups) that the header of version `number` states. `marks`: the table after it."""
    members = marks.merged_since(number - LATELY_TERMS * config.term_versions)
    return next_plan(parent.epoch, parent.groups, number, members, config.group_size, config.term_versions)

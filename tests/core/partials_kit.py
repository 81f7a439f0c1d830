"""Partial merges of versions and labels, rightly signed."""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from p2pdiloco.core.api.types import Contributor, MergeLimits, signed_bytes
from p2pdiloco.core.api.versions import (
    MergedPartial,
    PartialLabel,
    Plan,
    group_name,
    level_sizes,
    tree_of,
)
from p2pdiloco_lab.simulation.lineage import HashCrypto


def sums_of(group: str) -> bytes:
    """Stands for the digest of a group's sums."""
    return hashlib.sha256(b"sums " + group.encode()).digest()


def signed(syncer: str, label: PartialLabel) -> bytes:
    """That syncer's signature."""
    return HashCrypto(syncer).sign(signed_bytes("partial", label))


def partials_of(
    plan: Plan, parts: tuple[Contributor, ...], limits: MergeLimits, top: str = ""
) -> tuple[MergedPartial, ...]:
    """Partial merges of these contributions by the groups below `top`, or of a whole version, rightly signed
    by one of the learners each."""
    sizes = level_sizes(plan.groups, plan.group_size)
    end = plan.place(top) or (len(sizes) - 1, 0)
    syncers: dict[str, str] = {}
    for part in parts:
        level, index = plan.leaf_of(part.learner)
        while level < end[0]:
            syncers[group_name(plan.epoch, plan.groups, level, index)] = part.learner
            level, index = plan.above((level, index), level + 1)
    made = [MergedPartial(g, syncers[g], sums_of(g), b"", limits) for g in sorted(syncers)]
    whole = [MergedPartial(top, parts[0].learner, sums_of(top), b"", limits)] if top else []
    for level in range(end[0]):  # who is above signs the signatures of those below, too
        tree = tree_of(plan, parts, [*made, *whole], top)
        if tree is None:
            return ()
        labels = {group: part.label(plan.run, plan.fragment, limits) for group, part in tree.items()}
        made = [
            replace(each, signature=signed(each.syncer, labels[each.group]))
            if each.group.split("/")[1] == str(level)
            else each
            for each in made
        ]
    return tuple(made)

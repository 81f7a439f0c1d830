"""Watch over the link: whether it keeps up with the run, and to how many versions it contributes.

A node whose link does not keep up says so once, and contributes to fewer versions rather than too late to
all.

What the link carries is what a person permits (--max-upload), or what transfers achieved lately; what the run
asks of it is `daemon.links.linkplan`'s arithmetic. Both change slowly, and a false alarm would cost
contributions. So the best of the last transfers counts, only long ones, and only what is found several times
in a row. The best of many, since a peer's own link may be what is full: with others' contributions to it, for
instance. While a transfer of ours is under way, everything that goes the same way counts, also updates that
are given to others.

Fewer contributions are for a thin uplink. A thin downlink is only said: every update is fetched and none can
be left out, however little the node contributes. Where updates come faster than the link carries them, the
node falls further and further behind, and copies the whole state in the end. It is behind again when that has
come, and what it measured against versions older than `group.max_base_age_versions` is refused.

Rules: docs/protocol/links.md, section 4.
"""

from __future__ import annotations

import math

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.values import rate_text
from p2pdiloco.core.capacity import UPDATE_COPIES
from p2pdiloco.daemon.links.link import Link
from p2pdiloco.daemon.links.linkplan import TOLERANCE, Demand, demand_of
from p2pdiloco.daemon.links.meters import LinkMeters
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import FragmentLayout

RISE, FALL = 3, 24
"""Judgements in a row until something worse (`RISE`), or again something better (`FALL`), is believed."""
FOLLOWS, SLOW_OFFICES, FALLS_BEHIND = range(3)
EFFECTS = {
    SLOW_OFFICES: "versions come late, and others' too where this node is syncer",
    FALLS_BEHIND: "it may fall behind for good; contributions to old versions are refused",
}


class SteadyLevel:
    """Level that changes when it was found several times in a row: 0 or 1 is good, more is worse."""

    def __init__(self, level: int) -> None:
        self.level = level
        self._streak: list[int] = []

    def look(self, wanted: int) -> bool:
        """Take another judgement in; return whether the level changes."""
        level, streak = self.level, self._streak
        if wanted == level or (streak and (wanted > level) != (streak[0] > level)):
            streak.clear()
        if wanted != level:
            streak.append(wanted)
        if len(streak) >= (RISE if wanted > level else FALL):
            self.level = min(streak) if wanted > level else max(streak)
            streak.clear()
        return self.level != level


class LinkWatch:
    """Judge of the link, who looks now and then."""

    def __init__(self, manifest: Manifest, layouts: tuple[FragmentLayout, ...], meters: LinkMeters) -> None:
        self._manifest = manifest
        self._layouts = layouts
        self.meters = meters
        self._rarer = SteadyLevel(1)
        self._behind = SteadyLevel(FOLLOWS)
        self.every = 1
        """Stride of versions to which the node contributes; 1: to all."""
        self.words = ""
        """Sentence that a person should know about the link; empty: it keeps up."""

    @property
    def uplink_bits_per_s(self) -> float:
        """Rate of the uplink for decisions about offices, where a mistake costs no contribution.

        It is known sooner than `LinkMeters.link`: also from other transfers than contributions, from few of
        them, or from an earlier life. While nothing is known of it, updates that came in say how much it has
        at most: of links to homes the uplink is the thinner part.
        """
        known = min(self.meters.limits.upload_bits_per_s, self.meters.uplink.bits_per_s)
        return known if known < math.inf else self.meters.downlink.early_bits_per_s

    def office_bits_per_s(self, members: int) -> float:
        """Rate of an uplink that carries as much of an office as this link does.

        A syncer takes in what all others of its group contribute, so a person's limit of the downlink counts
        too. What transfers show of the downlink does not count: mostly that is the uplink of whoever sent.
        """
        codecs, group = self._manifest.codec, min(members, self._manifest.group.size)
        contribution, update = (
            sum(codec(name).encoded_bytes(layout.numel) for layout in self._layouts)
            for name in (codecs.contribution, codecs.update)
        )
        up, down = contribution + UPDATE_COPIES * update, (group - 1) * contribution + update
        return min(self.uplink_bits_per_s, self.meters.limits.download_bits_per_s * up / down)

    def judge(self, members: int, step_s: float, catching_up: bool = False) -> bool:
        """Judge the link; return whether there is something new to say, and `every` may have changed.

        `members`: with this node. `step_s`: length of an inner step; 0: not known yet. `catching_up`: only a
        person's limits count, since states come as slowly as suits those who give them.
        """
        if step_s <= 0:
            return False
        link, sync = self.meters.limits if catching_up else self.meters.link, self._manifest.sync
        found = demand_of(self._manifest, self._layouts, link, members, step_s)
        changed = [self._rarer.look(found.every), self._behind.look(behind(found))]
        # Where the others are no quorum without us, rounds would wait for us all the longer.
        every = self._rarer.level if members > sync.quorum else 1
        if every == self.every and not any(changed):
            return False
        self.every = every
        keeps_up = self._rarer.level == 1 and self._behind.level == FOLLOWS
        self.words = "" if keeps_up else self._say(link, found)
        return True

    def _say(self, link: Link, found: Demand) -> str:
        has = [
            f"{rate_text(rate)}bit/s {way}"
            for rate, way in ((link.upload_bits_per_s, "up"), (link.download_bits_per_s, "down"))
            if rate < math.inf
        ]
        asked = (
            f"{rate_text(found.upload_bits_per_s)}bit/s up, {rate_text(found.download_bits_per_s)}bit/s down"
        )
        does = [EFFECTS[self._behind.level]] if self._behind.level else []
        if self.every > 1:
            does.append(f"contributing to one in {self.every} versions")
        elif self._rarer.level > 1:
            does.append("contributions come late")
        what = "; ".join(does)
        return f"the link ({', '.join(has)}) cannot keep up with what this run asks ({asked}): {what}"


def behind(found: Demand) -> int:
    """Tell what a thin downlink costs: `FOLLOWS` (nothing), `SLOW_OFFICES`, `FALLS_BEHIND`."""
    if found.fetch_share > 1 + TOLERANCE:
        return FALLS_BEHIND
    return SLOW_OFFICES if found.download_share > 1 + TOLERANCE else FOLLOWS

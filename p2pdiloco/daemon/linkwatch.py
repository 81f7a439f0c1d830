"""Whether this node's link keeps up with its run: says so once if not, and lets the node contribute to fewer
versions rather than too late to all of them.

What the link carries is what a person permits (--max-upload), or what transfers achieved lately; what the run
asks of it is `daemon.linkplan`'s arithmetic. Both change slowly, and a false alarm would cost contributions:
the best of the last transfers counts, only long ones, and only what is found several times in a row. While
one of ours is under way, everything that goes the same way counts, also updates that are given to others. The
best of many, since a peer's own link may be what is full: with others' contributions to it, for instance.
"""

from __future__ import annotations

import math

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.units import rate_text
from p2pdiloco.core.meter import Meter, Uplink
from p2pdiloco.daemon.linkplan import Demand, Link, demand_of
from p2pdiloco.tensors.layout import FragmentLayout

RISE, FALL = 3, 24
"""Judgements in a row until fewer, or again more, contributions are made."""


class LinkWatch:
    """Judges the link now and then."""

    def __init__(
        self, manifest: Manifest, layouts: tuple[FragmentLayout, ...], limits: Link, up: Uplink, down: Meter
    ) -> None:
        """`limits`: what a person permits; infinite where nothing is said."""
        self._manifest = manifest
        self._layouts = layouts
        self._limits = limits
        self._up, self._down = up, down
        self._streak: list[int] = []
        self._level = 1
        self.every = 1
        """The node contributes to every so-and-so-many-th version."""
        self.words = ""
        """What a person should know of the link; empty: it keeps up."""

    @property
    def link(self) -> Link:
        """What is known of the link. Round trips do not count: they cost delay, not participation."""
        return Link(
            min(self._limits.upload_bits_per_s, self._up.sure_bits_per_s),
            min(self._limits.download_bits_per_s, self._down.bits_per_s),
            0.0,
        )

    @property
    def uplink_bits_per_s(self) -> float:
        """The same of the uplink, known sooner: also from other transfers than contributions, few of them, or
        from an earlier life. It decides about offices; a mistake there costs no contribution."""
        return min(self._limits.upload_bits_per_s, self._up.bits_per_s)

    def judge(self, members: int, step_s: float) -> bool:
        """Look at the link; whether there is something new to say, and `every` may have changed. `members`:
        with this node; `step_s`: of an inner step; 0: not known yet."""
        if step_s <= 0:
            return False
        link, sync = self.link, self._manifest.sync
        found = demand_of(self._manifest, self._layouts, link, members, step_s)
        before, self._level = self._level, self._steady(found.every(sync.inner_steps))
        # Where the others are no quorum without us, rounds would wait for us all the longer.
        every = self._level if members > sync.quorum else 1
        if (before, self.every) == (self._level, every):
            return False
        self.every = every
        self.words = "" if self._level == 1 else self._say(link, found)
        return True

    def _steady(self, wanted: int) -> int:
        """The level, after another judgement."""
        level = self._level
        if wanted == level or (self._streak and (wanted > level) != (self._streak[0] > level)):
            self._streak.clear()
        if wanted != level:
            self._streak.append(wanted)
        if len(self._streak) >= (RISE if wanted > level else FALL):
            level = min(self._streak) if wanted > level else max(self._streak)
            self._streak.clear()
        return level

    def _say(self, link: Link, found: Demand) -> str:
        has = [
            f"{rate_text(rate)}bit/s {way}"
            for rate, way in ((link.upload_bits_per_s, "up"), (link.download_bits_per_s, "down"))
            if rate < math.inf
        ]
        asked = (
            f"{rate_text(found.upload_bits_per_s)}bit/s up, {rate_text(found.download_bits_per_s)}bit/s down"
        )
        does = (
            f"contributing to one in {self.every} versions" if self.every > 1 else "contributions come late"
        )
        return f"the link ({', '.join(has)}) cannot keep up with what this run asks ({asked}): {does}"

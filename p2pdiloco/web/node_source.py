"""Source of views on a node: its own snapshot, and what it remembers."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from p2pdiloco.daemon.budgets import Link
from p2pdiloco.daemon.display.snapshot import NodeSnapshot, status_of
from p2pdiloco.daemon.display.timeline import Timeline
from p2pdiloco.daemon.owner.control import OwnerControls
from p2pdiloco.release import VERSION
from p2pdiloco.web.joining import join_view
from p2pdiloco.web.making import credit_views, public_view
from p2pdiloco.web.sources import limits_by_name, offered
from p2pdiloco.web.view import ContributionsView, LinkView, OwnView, RunView
from p2pdiloco.web.words import NodeWord

if TYPE_CHECKING:  # a bootstrap has no torch
    from p2pdiloco.daemon.member import Member

RATE_OVER_S = 4.0
"""Time over which a rate is taken at least."""


class NodeSource:
    """Source of a node's view."""

    def __init__(self, member: Member, controls: OwnerControls | None = None) -> None:
        """`controls`: those that its page may offer."""
        self._member, self._controls = member, controls
        loop = asyncio.get_running_loop()
        self._rates = LinkRates(loop.time)
        self._monotonic = loop.time

    def view(self, run: str) -> RunView | None:
        """Make the view."""
        member = self._member
        if run and run != member.run.id:
            return None
        now_s = time.time()
        snapshot = member.report.snapshot(self._monotonic())
        timeline = member.diary.timeline
        told = member.keeper.answer(0) if member.keeper is not None else None
        public = public_view(
            status_of(snapshot),
            now_s,
            owner=member.run.signed.owner,
            since_s=timeline.since_s,
            join=join_view(member.run, member.peer.transport.addresses()),
            credits=credit_views(told, snapshot.peer),
            at_s=timeline.version_at_s,
        )
        own = own_view(snapshot, timeline, member.meters.link, self._rates, self._controls)
        return RunView(role="node", version=VERSION, public=public, own=own)


class LinkRates:
    """Rates of what counters say, between two looks at them that are not too close."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._before: tuple[float, int, int] | None = None
        self._rates: tuple[float | None, float | None] = (None, None)

    def of(self, sent_bytes: int, received_bytes: int) -> tuple[float | None, float | None]:
        """Compute bits a second, up and down; None: nothing is known yet."""
        now, before = self._now(), self._before
        if before is None or now - before[0] >= RATE_OVER_S:
            self._before = now, sent_bytes, received_bytes
            if before is not None:
                passed_s = now - before[0]
                up, down = sent_bytes - before[1], received_bytes - before[2]
                self._rates = round(8 * up / passed_s), round(8 * down / passed_s)
        return self._rates


def own_view(
    snapshot: NodeSnapshot, timeline: Timeline, link: Link, rates: LinkRates, controls: OwnerControls | None
) -> OwnView:
    """Make what only the owner of the machine sees."""
    state = controls.state() if controls is not None else None
    return OwnView(
        state=NodeWord(snapshot.state.replace(" ", "-")),
        rest=snapshot.rest.words if snapshot.rest is not None else "",
        peer=snapshot.peer,
        name=snapshot.name,
        device=snapshot.device,
        inner_step=snapshot.inner_step,
        tokens_per_s=round(snapshot.tokens_per_s, 1),
        tokens_total=snapshot.tokens_total,
        step_time_s=snapshot.step_time_s,
        loss=snapshot.loss,
        contributions=_contributions(snapshot, timeline),
        link=_link_view(snapshot, link, rates),
        refusals=snapshot.refusals,
        expelled=Counter(row.expelled for row in snapshot.peers if row.expelled is not None),
        recent=snapshot.recent,
        controls=offered(state),
        limits=limits_by_name(state),
    )


def _contributions(snapshot: NodeSnapshot, timeline: Timeline) -> ContributionsView:
    own = timeline.own
    return ContributionsView(
        merged=own.merged,
        merged_tokens=own.merged_tokens,
        merged_at_s=own.merged_at_s,
        waiting=sum(bool(row.pending) for row in snapshot.fragments),
        refused=dict(own.refused),
        given_up=own.given_up,
    )


def _link_view(snapshot: NodeSnapshot, link: Link, rates: LinkRates) -> LinkView:
    up, down = rates.of(snapshot.bytes_sent, snapshot.bytes_received)
    return LinkView(
        reach=snapshot.reach,
        up_bits_per_s=up,
        down_bits_per_s=down,
        known_up_bits_per_s=_known(link.upload_bits_per_s),
        known_down_bits_per_s=_known(link.download_bits_per_s),
        sent_bytes=snapshot.bytes_sent,
        received_bytes=snapshot.bytes_received,
        carried=snapshot.bulk,
        words=snapshot.link,
    )


def _known(bits_per_s: float) -> float | None:
    return round(bits_per_s) if math.isfinite(bits_per_s) else None

"""A scene for the page: a swarm of a usual size in the middle of its run, and things that happen to it.

There is something in every part of it.
"""

from __future__ import annotations

import math

import segno
from msgspec.structs import replace

from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.daemon.display.snapshot import DataRow, PeerRow
from p2pdiloco.daemon.display.timeline import OwnWork
from p2pdiloco.web.view import (
    BehindReason,
    Control,
    CreditView,
    Forecast,
    JoinView,
    LinkView,
    LossCurve,
    Mark,
    MarkKind,
    MemberCondition,
    MemberView,
    NewestView,
    NodeCondition,
    OwnView,
    ProgressView,
    PublicView,
    Pulse,
    RunChoice,
    RunView,
    StripView,
)

NAMES = ("anna", "bernd's attic", "c3-lab", "dmitri", "eva", "old laptop", "fukuoka-2")
NOW_S = 1_800_000_000.0
"""Time of the scene where the time of day does not matter."""
RUN = "5f0c2a91b7d4e6f8" * 4
SCHEDULE = 153_000_000
DONE = 57_100_000
PACE = 9_400.0
"""Tokens a second of the scene's members together."""
LINK = "p2pdiloco:0f3k9s2v7m1q8d4h6j5p0z2x9c8b7n3a1s4d6f8g0h2j4k6l8q1w3e5r7t9y0u2i4o6p8a0s2d4f6g8h0j2k4l6z8x0"


def peer(index: int) -> str:
    """A peer id."""
    return f"12D3KooW{'QmAnNaBeRnDcLeOdMiTrIeVaFuKu' * 2}"[: 44 + index % 2] + f"x{index:07d}"


def loss_at(tokens: float) -> float:
    """Where the scene's curve is after so many tokens."""
    return 2.35 + 5.2 * (1 + tokens / 900_000) ** -0.42


def _curve(now_s: float) -> tuple[LossCurve, Forecast]:
    steps = [int(DONE * (i + 1) / 120) for i in range(120)]
    losses = [
        loss_at(t) + 0.035 * math.sin(i * 1.7) * math.exp(-i / 60) + 0.012 * math.sin(i * 4.1)
        for i, t in enumerate(steps)
    ]
    times = [now_s - (DONE - t) / PACE - 40 for t in steps]
    ahead = [int(DONE + (SCHEDULE - DONE) * i / 40) for i in range(41)]
    centre = [loss_at(t) for t in ahead]
    return (
        LossCurve(at_s=tuple(times), tokens=tuple(steps), loss=tuple(losses)),
        Forecast(
            tokens=tuple(ahead),
            at_s=tuple(now_s + (t - DONE) / PACE for t in ahead),
            loss=tuple(centre),
            low=tuple(c - 0.02 - 0.05 * i / 40 for i, c in enumerate(centre)),
            high=tuple(c + 0.02 + 0.06 * i / 40 for i, c in enumerate(centre)),
        ),
    )


def member(index: int, now_s: float, **changes: object) -> MemberView:
    """One of the scene's members; those beyond its names have none."""
    row = MemberView(
        peer=peer(index),
        name=NAMES[index] if index < len(NAMES) else "",
        state=MemberCondition.HERE,
        in_last_merge=True,
        merged_at_s=now_s - 8,
        seen_at_s=now_s - 0.3,
        tokens_per_s=PACE / 5 * (0.6 + 0.2 * (index % 4)),
        tokens_total=9_000_000 - 700_000 * index,
        inner_step=41_200 + 13 * index,
        loss=2.91 + 0.02 * index,
        reach="direct",
        is_me=index == 0,
    )
    return replace(row, **changes)


def _credits(now_s: float) -> tuple[CreditView, ...]:
    tokens = {
        0: 17_900_000,
        2: 14_200_000,
        1: 11_400_000,
        6: 6_100_000,
        4: 5_300_000,
        3: 1_800_000,
        5: 400_000,
    }
    return tuple(
        CreditView(
            peer=peer(index),
            name=NAMES[index],
            tokens=amount,
            steps=amount // 512,
            contributions=amount // 40_000,
            first_at_s=now_s - 7000,
            last_at_s=now_s - 8 - 300 * place,
        )
        for place, (index, amount) in enumerate(tokens.items())
    )


def _marks(now_s: float) -> tuple[Mark, ...]:
    """Somebody leaves in good order; later somebody dies who was syncer of three fragments."""
    told: tuple[tuple[float, MarkKind, str, int | None, int], ...] = (
        (5900, MarkKind.JOIN, "heard of for the first time", 4, 1),
        (4100, MarkKind.JOIN, "heard of for the first time", 5, 1),
        (3900, MarkKind.COURSE, "amendment 1: the schedule is 153M tokens", None, 1),
        (3300, MarkKind.LEAVE, "said good-bye", 6, 1),
        (3298, MarkKind.ELECTION, "elected with 4 of 5 votes", 2, 3),
        (1700, MarkKind.FAULT, "the learner of this node ended (signal 9) and was started again", None, 1),
        (240, MarkKind.OFFICE, "takes office", 0, 1),
        (68, MarkKind.SILENT, "not counted on: silent or unreachable", 3, 1),
        (66, MarkKind.SUSPICION, "three of us do not hear it", 3, 1),
        (64, MarkKind.ELECTION, "elected with 4 of 5 votes", 4, 3),
    )
    return tuple(
        Mark(
            at_s=now_s - ago_s,
            kind=kind,
            words=words,
            peer="" if index is None else peer(index),
            name="" if index is None else NAMES[index],
            fragment=17 if kind is MarkKind.OFFICE else None,
            times=times,
        )
        for ago_s, kind, words, index, times in told
    )


def scene(now_s: float = NOW_S, own: bool = True, fragments: int = 24) -> RunView:
    """Six members: one is behind, one went silent; a syncer was lost and another elected."""
    curve, forecast = _curve(now_s)
    syncers = [0, 1, 2, 4]
    members = (
        member(0, now_s, offices=7),
        member(1, now_s, offices=6),
        member(2, now_s, offices=6),
        member(4, now_s, offices=5),
        member(
            5,
            now_s,
            state=MemberCondition.BEHIND,
            why=BehindReason.THIN_UPLINK,
            behind_versions=3,
            in_last_merge=False,
            merged_at_s=now_s - 340,
            reach="relayed",
        ),
        member(
            3,
            now_s,
            state=MemberCondition.SILENT,
            why=BehindReason.SILENT,
            in_last_merge=False,
            merged_at_s=now_s - 95,
            seen_at_s=now_s - 71,
            tokens_per_s=0.0,
        ),
    )
    marks = _marks(now_s)
    public = PublicView(
        run_name="library-of-small-things",
        run_id=RUN,
        owner=peer(0),
        told_by=peer(0),
        told_by_name="anna",
        made_at_s=now_s,
        since_s=now_s - 7300,
        pulse=Pulse.ALIVE,
        newest=NewestView(fragment=17, number=214, at_s=now_s - 8, usual_s=11.0, contributors=4),
        progress=ProgressView(
            tokens=DONE,
            schedule_tokens=SCHEDULE,
            ends_at_s=now_s + (SCHEDULE - DONE) / PACE,
            versions=5123,
            tokens_per_s=PACE,
            amendment=1,
            amendment_from_tokens=30_000_000,
        ),
        heldout_loss=curve.loss[-1],
        heldout_at_s=now_s - 40,
        heldout_by=peer(2),
        training_loss=2.954,
        curve=curve,
        forecast=forecast,
        members=members,
        members_total=len(members),
        fragments=tuple(
            StripView(
                index=i,
                number=214 - (i * 5) % 3 - (4 if i == 20 else 0),
                digest="a1b2c3d4",
                tokens=DONE,
                syncer=peer(syncers[i % 4]),
                syncer_name=NAMES[syncers[i % 4]],
                state="collecting 3/5" if i % 7 == 3 else "idle",
                at_s=now_s - 8 - i,
            )
            for i in range(fragments)
        ),
        marks=marks,
        data=DataRow(epoch=1, shards=240, begun=57),
        credits=_credits(now_s),
        join=JoinView(
            line=f"p2pdiloco node {LINK}",
            link=LINK,
            qr_svg=segno.make(LINK, error="m").svg_inline(omitsize=True, border=0),
        ),
    )
    return RunView(
        role="node" if own else "bootstrap",
        version="0.9.0",
        public=public,
        own=_own(now_s) if own else None,
    )


def _own(now_s: float) -> OwnView:
    """What the owner of the machine sees of the node."""
    return OwnView(
        state=NodeCondition.TRAINING,
        me=PeerRow(
            peer=peer(0),
            name=NAMES[0],
            inner_step=41_200,
            tokens_per_s=2_310.0,
            tokens_total=21_000_000,
            loss=2.91,
        ),
        device="NVIDIA GeForce RTX 3060",
        step_time_s=0.22,
        work=OwnWork(
            merged=482,
            merged_tokens=17_900_000,
            merged_at_s=now_s - 8,
            refused={"stale": 5, "not in office": 2},
        ),
        waiting=2,
        link=LinkView(
            reach="direct",
            up_bits_per_s=8.2e6,
            down_bits_per_s=3.1e6,
            known_up_bits_per_s=2.0e7,
            known_down_bits_per_s=8.8e7,
            sent_bytes=7_310_000_000,
            received_bytes=9_840_000_000,
        ),
        refusals={"stale": 3},
        expelled={LossFinding.HARM: 1},
        recent=(
            "merged fragment 17 from 4 of 5",
            "fragment 20: eva is elected, term 9",
            "contribution to fragment 3 is merged in version 214",
        ),
        controls=(Control.PAUSE, Control.FINISH, Control.LIMITS),
        limits={"max-upload": "20Mbit", "max-download": "", "hours": "22-7", "max-transfer": "200GB/month"},
    )


def several(view: RunView) -> RunView:
    """A program that serves two runs."""
    assert view.public is not None
    mine = RunChoice(run_id=view.public.run_id, run_name=view.public.run_name)
    return replace(view, runs=(mine, RunChoice(run_id="ab" * 32, run_name="other")))


def with_public(view: RunView, **changes: object) -> RunView:
    """The same with another run part."""
    assert view.public is not None
    return replace(view, public=replace(view.public, **changes))


def with_own(view: RunView, **changes: object) -> RunView:
    """The same with another part of the owner's."""
    assert view.own is not None
    return replace(view, own=replace(view.own, **changes))

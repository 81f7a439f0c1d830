"""An example of a view with something in every part of it, made by hand."""

from __future__ import annotations

from msgspec.structs import replace

from p2pdiloco.web.view import (
    ContributionsView,
    CreditView,
    DataView,
    Forecast,
    JoinView,
    LinkView,
    LossCurve,
    Mark,
    MemberView,
    NewestView,
    OwnView,
    ProgressView,
    PublicView,
    RunView,
    StripView,
)
from p2pdiloco.web.words import Control, MarkKind, MemberWord, NodeWord, Pulse, Why

NOW_S = 1_800_000_000.0
ADA, BEN, CLEO, DAN = (f"12D3KooWExample{name:0>37}" for name in ("ada", "ben", "cleo", "dan"))
HOSTILE = "<img src=x onerror=alert(1)>"
"""A name that a stranger chose."""


def example_view(now_s: float = NOW_S) -> RunView:
    """Make the view of a node that trains with three others, one of them behind and one silent."""
    return RunView(role="node", version="1.2.3", public=example_public(now_s), own=example_own(now_s))


def example_public_only(now_s: float = NOW_S) -> RunView:
    """Make what a bootstrap shows to anybody."""
    return replace(example_view(now_s), role="bootstrap", own=None)


def example_public(now_s: float) -> PublicView:
    tokens = [50_000 * (i + 1) for i in range(40)]
    losses = [2.0 + 3.6 * (1 + i) ** -0.45 + 0.01 * (i % 3) for i in range(40)]
    ahead = [2_000_000 + 100_000 * i for i in range(21)]
    expected = [2.0 + 3.6 * (tokens_ / 50_000) ** -0.45 for tokens_ in ahead]
    return PublicView(
        run_name="shakespeare",
        run_id="5f0c" * 16,
        owner=ADA,
        told_by=ADA,
        told_by_name="ada",
        made_at_s=now_s,
        since_s=now_s - 7200,
        pulse=Pulse.ALIVE,
        newest=NewestView(fragment=3, number=41, at_s=now_s - 4, usual_s=6.0, contributors=2),
        progress=ProgressView(
            tokens=2_000_000,
            schedule_tokens=4_000_000,
            ends_at_s=now_s + 7000,
            versions=326,
            tokens_per_s=284.0,
            message="Thank you all. We evaluate on Sunday.",
        ),
        heldout_loss=2.71,
        heldout_at_s=now_s - 31,
        heldout_by=BEN,
        training_loss=2.68,
        curve=LossCurve(
            at_s=tuple(now_s - 7200 + 180.0 * i for i in range(40)), tokens=tuple(tokens), loss=tuple(losses)
        ),
        forecast=Forecast(
            tokens=tuple(ahead),
            at_s=tuple(now_s + 350.0 * i for i in range(21)),
            loss=tuple(expected),
            low=tuple(loss - 0.02 for loss in expected),
            high=tuple(loss + 0.02 for loss in expected),
        ),
        members=_members(now_s),
        members_total=4,
        fragments=tuple(_strip(index, now_s) for index in range(8)),
        marks=_marks(now_s),
        data=DataView(epoch=1, shards=240, begun=57),
        credits=(
            CreditView(peer=ADA, name="ada", tokens=900_000, steps=14_000, contributions=160),
            CreditView(peer=BEN, name="ben", tokens=700_000, steps=11_000, contributions=120),
            CreditView(peer=DAN, name=HOSTILE, tokens=400_000, steps=6_300, contributions=70),
        ),
        join=JoinView(
            line=f"p2pdiloco node --join /ip4/192.0.2.7/tcp/31337/p2p/{ADA} --run 5f0c5f0c",
            link="p2pdiloco:example",
            qr_svg='<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><path d="M0 0h7v7h-7z"/></svg>',
        ),
    )


def example_own(now_s: float) -> OwnView:
    return OwnView(
        state=NodeWord.TRAINING,
        peer=ADA,
        name="ada",
        device="cpu",
        inner_step=14_020,
        tokens_per_s=128.0,
        tokens_total=901_234,
        step_time_s=0.5,
        loss=2.66,
        contributions=ContributionsView(
            merged=160,
            merged_tokens=900_000,
            merged_at_s=now_s - 4,
            waiting=1,
            refused={"stale-base": 3, "closing": 1},
        ),
        link=LinkView(
            reach="relayed",
            up_bits_per_s=1.2e6,
            down_bits_per_s=3.4e6,
            known_up_bits_per_s=9.6e6,
            sent_bytes=81_000_000,
            received_bytes=212_000_000,
            carried={"pushed_bytes": 30_000_000, "updates_given_bytes": 51_000_000},
        ),
        refusals={"stale": 3},
        recent=("office: fragment 3 elected, by 3 of 4 (ben)", "silent: nothing heard for 15 s (dan)"),
        controls=(Control.PAUSE, Control.FINISH, Control.LIMITS),
        limits={"max-upload": "20Mbit", "max-download": ""},
    )


def _members(now_s: float) -> tuple[MemberView, ...]:
    me = MemberView(
        peer=ADA, name="ada", in_last_merge=True, merged_at_s=now_s - 4, seen_at_s=now_s, tokens_per_s=128.0,
        tokens_total=901_234, inner_step=14_020, loss=2.66, reach="relayed", offices=3, is_me=True,
    )  # fmt: skip
    ben = replace(me, peer=BEN, name="ben", reach="direct", offices=5, tokens_total=700_100, is_me=False)
    cleo = replace(
        ben, peer=CLEO, name="", state=MemberWord.BEHIND, why=Why.CATCHING_UP, behind_versions=12,
        in_last_merge=False, merged_at_s=None, offices=0, tokens_total=0, tokens_per_s=0.0, loss=None,
    )  # fmt: skip
    dan = replace(
        cleo, peer=DAN, name=HOSTILE, state=MemberWord.SILENT, why=Why.SILENT, behind_versions=3,
        merged_at_s=now_s - 300, seen_at_s=now_s - 71, tokens_total=400_000,
    )  # fmt: skip
    return me, ben, cleo, dan


def _strip(index: int, now_s: float) -> StripView:
    ours = index % 3 == 0
    return StripView(
        index=index,
        number=40 + index % 2,
        digest="9a0b3c4d",
        tokens=2_000_000,
        syncer=ADA if ours else BEN,
        syncer_name="ada" if ours else "ben",
        state="collecting 2/3" if index == 4 else "idle",
        at_s=now_s - 4 - index,
    )


def _marks(now_s: float) -> tuple[Mark, ...]:
    return (
        Mark(at_s=now_s - 7190, kind=MarkKind.JOIN, words="first heard of", peer=BEN, name="ben"),
        Mark(at_s=now_s - 3600, kind=MarkKind.COURSE, words="amendment 1 of the run's owner holds"),
        Mark(at_s=now_s - 71, kind=MarkKind.SILENT, words="nothing heard for 15 s", peer=DAN, name=HOSTILE),
        Mark(at_s=now_s - 60, kind=MarkKind.ELECTION, words="the syncer is silent", fragment=3, times=4),
        Mark(at_s=now_s - 58, kind=MarkKind.OFFICE, words="elected", peer=BEN, name="ben", fragment=3),
    )

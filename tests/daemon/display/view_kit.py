"""Snapshots for the tests of what people see."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

from msgspec.structs import replace
from rich.console import Console, RenderableType

from p2pdiloco.daemon.display.snapshot import DataRow, FragmentRow, NodeSnapshot, PeerRow, mean_loss

ME = "12D3KooWabcdef"
HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]\u202eevil\r\n"


def peer_rows(count: int) -> tuple[PeerRow, ...]:
    return tuple(
        PeerRow(
            peer=f"12D3KooWpeer{index:06d}",
            name=f"node-{index}",
            inner_step=1000 + index,
            tokens_per_s=15_200.0,
            tokens_total=10_000,
            last_seen_s=0.5 * index,
            confirmed=index != 1,
            offices=index % 3,
            loss=2.5,
        )
        for index in range(count)
    )


def fragment_rows(count: int, peers: tuple[PeerRow, ...]) -> tuple[FragmentRow, ...]:
    states = ["idle", "collecting 2/3", "grace 0.8 s", "merging"]
    return tuple(
        FragmentRow(
            index=index,
            number=12 + index % 3,
            digest=f"{index:08x}",
            term=3,
            syncer=ME if index in (2, 5) or not peers else peers[index % len(peers)].peer,
            tokens=1_000_000,
            state=states[index % 4],
            pending="sent" if index % 5 == 0 else "",
        )
        for index in range(count)
    )


def snapshot(peers: int = 3, fragments: int = 24, recent: int = 9) -> NodeSnapshot:
    rows = peer_rows(peers)
    me = PeerRow(
        peer=ME,
        name="ann",
        inner_step=1240,
        tokens_per_s=15_230.0,
        tokens_total=12_345_678,
        last_seen_s=0.0,
        confirmed=True,
        offices=sum(row.syncer == ME for row in fragment_rows(fragments, rows)),
        loss=2.3111,
    )
    return NodeSnapshot(
        answered_by=ME,
        members=(me, *rows),
        members_total=peers + 1,
        run_name="shakespeare",
        run_id="1a2b3c4d" * 8,
        state="training",
        device="cpu",
        loss=mean_loss((me, *rows)),
        loss_history=tuple(5 - 3 * step / 100 for step in range(100)),
        step_time_s=0.062,
        data=DataRow(epoch=1, shards=240, begun=57, tokens=12_345_678),
        fragments=fragment_rows(fragments, rows),
        run_tokens=34_500_000,
        run_versions=300,
        refusals={"stale-base": 3, "nan": 1},
        recent=tuple(f"fragment {index}: waiting: 3 of 4 contributions" for index in range(recent)),
        bytes_sent=12_000_000,
        bytes_received=155_000,
    )


def empty() -> NodeSnapshot:
    return NodeSnapshot(
        answered_by=ME, members=(PeerRow(peer=ME),), members_total=1, run_name="", run_id="", state="joining"
    )


def with_me(of: NodeSnapshot, **changes: Any) -> NodeSnapshot:
    """The same of a node whose own row is otherwise."""
    return replace(of, members=(replace(of.me, **changes), *of.peers))


def with_peers(of: NodeSnapshot, peers: Sequence[PeerRow]) -> NodeSnapshot:
    """The same with these other members."""
    return replace(of, members=(of.me, *peers), members_total=len(peers) + 1)


def printed(renderable: RenderableType, width: int, height: int = 24) -> list[str]:
    """The lines that a plain terminal of this size shows."""
    output = StringIO()
    console = Console(file=output, width=width, height=height, color_system=None, force_terminal=False)
    console.print(renderable)
    return output.getvalue().split("\n")[:-1]

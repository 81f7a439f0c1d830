"""Terminal view of a node: pure functions of a `NodeSnapshot`.

Drawn line by line and not with tables, because the whole must fit any terminal from 80x24 up. With too many
fragments or peers the busiest are shown and the rest is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from p2pdiloco.daemon.display.progress import owner_text, progress_text
from p2pdiloco.daemon.display.snapshot import DataRow, FragmentRow, NodeSnapshot, PeerRow, offices_of
from p2pdiloco.daemon.display.wording import (
    count,
    duration,
    fit,
    loss_text,
    ranges,
    short_peer,
    size,
    sparkline,
)
from p2pdiloco.printable import clean

CELL_WIDTH = 39
"""Columns of one fragment's cell: two fit on 80."""
HEADER_LINES = 3
STATE_STYLES = {"training": "bold green", "leaving": "bold red"}


def log_line(snapshot: NodeSnapshot) -> str:
    """Say it in one line: `step 1240  loss 2.31  tokens/s 15.2k  peers 3  versions 12-14  syncer of 2,5`."""
    parts = [] if snapshot.state == "training" else [f"{snapshot.state}:"]
    parts += [
        f"step {snapshot.inner_step}",
        f"loss {loss_text(snapshot.loss)}",
        f"tokens/s {count(snapshot.tokens_per_s)}",
        f"peers {_peers_total(snapshot)}",
        f"versions {versions_text(snapshot.fragments)}",
        f"syncer of {ranges(offices_of(snapshot))}",
    ]
    if snapshot.course.schedule_tokens:
        parts.append(progress_text(snapshot.course))
    return "  ".join(parts)


def log_fields(snapshot: NodeSnapshot) -> dict[str, object]:
    """List the figures of the line, and a few more, under names that stay (docs/events.md)."""
    numbers = [row.number for row in snapshot.fragments]
    course = snapshot.course
    share = min(1.0, course.tokens / course.schedule_tokens) if course.schedule_tokens else None
    return {
        "state": snapshot.state,
        "inner_step": snapshot.inner_step,
        "loss": snapshot.loss,
        "heldout_loss": snapshot.heldout_loss,
        "tokens_per_s": snapshot.tokens_per_s,
        "step_time_s": snapshot.step_time_s,
        "tokens_total": snapshot.tokens_total,
        "run_tokens": snapshot.run_tokens,
        "run_versions": snapshot.run_versions,
        "peers": _peers_total(snapshot),
        "version_min": min(numbers, default=None),
        "version_max": max(numbers, default=None),
        "offices": offices_of(snapshot),
        "sent_bytes": snapshot.bytes_sent,
        "received_bytes": snapshot.bytes_received,
        "refusals": snapshot.refusals,
        "reach": snapshot.reach,
        "votes": snapshot.votes,
        "link": snapshot.link,
        "run_share": share,
        "run_left_s": course.left_s,
    }


def render(snapshot: NodeSnapshot) -> RenderableType:
    """Make the live view; it takes width and height from the console that it is printed on."""
    return NodeView(snapshot)


class NodeView:
    """Rich renderable of one snapshot, with at most one line less than the terminal has."""

    def __init__(self, snapshot: NodeSnapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.size.height
        yield Text("\n").join(view_lines(self._snapshot, options.max_width, height))


def view_lines(snapshot: NodeSnapshot, width: int, height: int) -> list[Text]:
    """Draw at most height - 1 lines of at most `width` columns each."""
    columns = max(1, width // CELL_WIDTH)
    room = max(3, height - 1 - HEADER_LINES - 3)
    peers_need = max(1, len(snapshot.peers) + (_peers_total(snapshot) > len(snapshot.peers)))
    recent_rows = min(2, len(snapshot.recent))
    fragment_rows = min(
        max(1, math.ceil(len(snapshot.fragments) / columns)),
        max(1, room - recent_rows - min(3, peers_need)),
    )
    peer_rows = min(peers_need, max(1, room - recent_rows - fragment_rows))
    recent_rows = max(0, min(len(snapshot.recent), room - fragment_rows - peer_rows))
    lines = [
        *_header(snapshot),
        _title(f"peers ({_peers_total(snapshot)})", width),
        *_peer_lines(snapshot, peer_rows),
        *_fragment_lines(snapshot, fragment_rows, columns, width),
    ]
    if recent_rows:
        lines.append(_title("latest", width))
        lines += [Text(clean(line)) for line in snapshot.recent[-recent_rows:]]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[: max(1, height - 1)]


def versions_text(fragments: Sequence[FragmentRow]) -> str:
    """Word the lowest and the highest version number, as "12-14"; "-" without fragments."""
    numbers = [row.number for row in fragments]
    if not numbers:
        return "-"
    return str(numbers[0]) if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"


def peer_names(own_peer: str, own_label: str, peers: Sequence[PeerRow]) -> dict[str, str]:
    """Choose what to call each peer id: its name if it has one, else the end of its id."""
    names = {row.peer: clean(row.name) or short_peer(row.peer) for row in peers}
    return {**names, own_peer: own_label, "": "-"}


def _header(snapshot: NodeSnapshot) -> list[Text]:
    first = Text.assemble(
        (clean(snapshot.name) or "node", "bold"),
        f" …{short_peer(snapshot.peer)}   run ",
        (clean(snapshot.run_name), "bold"),
        f" {clean(snapshot.run_id[:8])}   ",
        (snapshot.state, STATE_STYLES.get(snapshot.state, "bold yellow")),
        f"   {clean(snapshot.device)}",
        f"   {data_text(snapshot.data)}" if snapshot.data else "",
    )
    second = Text.assemble(
        f"step {snapshot.inner_step}   loss ",
        (loss_text(snapshot.loss, 3), "bold"),
        (f" {sparkline(snapshot.loss_history, 16)}", "cyan"),
        f"   held-out {loss_text(snapshot.heldout_loss, 3)}" if snapshot.heldout_loss is not None else "",
        f"   {count(snapshot.tokens_per_s)} tokens/s   {duration(snapshot.step_time_s)}/step",
    )
    third = Text(
        f"tokens {count(snapshot.tokens_total)} here, {count(snapshot.run_tokens)} in "
        f"{count(snapshot.run_versions)} versions   "
        f"up {size(snapshot.bytes_sent)}, down {size(snapshot.bytes_received)}"
    )
    if snapshot.course.schedule_tokens:
        third.append(f"   {progress_text(snapshot.course)}", "bold")
    if owner := owner_text(snapshot.course):
        third.append(f"   {owner}", "yellow")
    if snapshot.refusals:
        third.append(f"   refused {refusals_text(snapshot.refusals)}", "yellow")
    if snapshot.reach not in ("", "direct"):
        third.append(f"   {clean(snapshot.reach)}", "yellow")
    if not snapshot.votes:
        third.append("   the disk takes nothing: no vote", "yellow")
    if snapshot.link:
        third.append(f"   {clean(snapshot.link)}", "yellow")
    return [first, second, third]


def data_text(data: DataRow) -> str:
    """Word how many shards were begun, as "epoch 1, 57/240 shards"."""
    return f"epoch {data.epoch}, {data.begun}/{data.shards} shards"


def refusals_text(refusals: dict[str, int]) -> str:
    """Word refusals, as `4: stale 3, nan 1`: the sum, then the reasons, most frequent first."""
    ordered = sorted(refusals.items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{clean(reason)} {number}" for reason, number in ordered)
    return f"{sum(refusals.values())}: {reasons}"


def _title(text: str, width: int) -> Text:
    head = f"── {text} "
    return Text(head + "─" * max(0, width - len(head)), style="dim")


def _peers_total(snapshot: NodeSnapshot) -> int:
    return max(snapshot.peers_total, len(snapshot.peers))


def _peer_lines(snapshot: NodeSnapshot, rows: int) -> list[Text]:
    if not snapshot.peers:
        return [Text("nobody else so far", style="dim")]
    shown = list(snapshot.peers)
    if _peers_total(snapshot) > rows:
        shown = shown[: rows - 1]
    lines = [_peer_line(row) for row in shown]
    more = _peers_total(snapshot) - len(shown)
    if more:
        lines.append(Text(f"and {more} more", style="dim"))
    return lines


def _peer_line(row: PeerRow) -> Text:
    words = ("" if row.reach == "direct" else clean(row.reach), role_text(row))
    seen = "never heard" if row.last_seen_s is None else f"{duration(row.last_seen_s)} ago"
    text = (
        f"{fit(row.name or '-', 12)} …{short_peer(row.peer):<6} step {row.inner_step:<7} "
        f"{count(row.tokens_per_s):>5} tok/s {seen:>11}  {', '.join(w for w in words if w)}"
    )
    return Text(text.rstrip(), style="" if row.confirmed else "yellow")


def role_text(row: PeerRow) -> str:
    """Word what a member is beside a learner: "syncer of 3", "catching up", "not training", "cannot save"."""
    words = [] if row.confirmed else ["catching up"]
    words += [] if row.learning else ["not training"]
    words += [] if row.votes else ["cannot save"]
    words += ["thin uplink"] if row.thin else []
    words += [f"syncer of {row.offices}"] if row.offices else []
    return ", ".join(words)


def _fragment_lines(snapshot: NodeSnapshot, rows: int, columns: int, width: int) -> list[Text]:
    fragments = list(snapshot.fragments)
    total = len(fragments)
    if total > rows * columns:
        busiest = sorted(fragments, key=lambda row: (row.state == "idle" and not row.pending, row.index))
        fragments = sorted(busiest[: rows * columns], key=lambda row: row.index)
    shown = "" if len(fragments) == total else f", the {len(fragments)} busiest"
    title = f"fragments ({total}{shown}), versions {versions_text(snapshot.fragments)}"
    lines = [_title(title + groups_text(snapshot.fragments), width)]
    if not fragments:
        return [*lines, Text("no state yet", style="dim")]
    names = peer_names(snapshot.peer, "you", snapshot.peers)
    used_rows = math.ceil(len(fragments) / columns)
    for row in range(used_rows):
        cells = [_fragment_cell(item, names, width // columns) for item in fragments[row::used_rows]]
        lines.append(Text("").join(cells))
    return lines


def groups_text(fragments: Sequence[FragmentRow]) -> str:
    """Word how the members are divided, as ", 3 groups, epoch 12"; empty where all are in one."""
    most = max((row.groups for row in fragments), default=1)
    if most == 1:
        return ""
    epochs = [row.epoch for row in fragments]
    first, last = min(epochs), max(epochs)
    return f", {most} groups, epoch {first}" + (f"-{last}" if last > first else "")


def seat_text(row: FragmentRow) -> str:
    """Word our leaf group, and the highest level of which we are syncer: "g2", "g2 leaf", "g2 L1", "g2
    root"."""
    if row.groups <= 1:
        return ""
    if row.level is None:
        return f"g{row.group}"
    role = "root" if row.level == row.levels - 1 else f"L{row.level}" if row.level else "leaf"
    return f"g{row.group} {role}"


def activity_text(row: FragmentRow) -> str:
    """Word what goes on around a fragment, as "collecting 2/3 sent"; "idle" only if nothing does."""
    words = (row.state if row.state != "idle" else "", row.pending)
    return " ".join(clean(word) for word in words if word) or "idle"


def _fragment_cell(row: FragmentRow, names: dict[str, str], width: int) -> Text:
    syncer = names.get(row.syncer) or short_peer(row.syncer)
    activity = activity_text(row)
    doing = " ".join(word for word in (seat_text(row), activity) if word)
    text = f"{row.index:>3} v{row.number:<4} {clean(row.digest[:4]):<4} {fit(syncer, 7)} {doing}"
    style = "bold cyan" if syncer == "you" else ""
    return Text(fit(text, width - 1) + " ", style=style or ("dim" if activity == "idle" else ""))

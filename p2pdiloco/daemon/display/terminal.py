"""Terminal view of a node: pure functions of a `NodeSnapshot`.

Drawn line by line and not with tables, because the whole must fit any terminal from 80x24 up. With too many
fragments or peers the busiest are shown and the rest is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from p2pdiloco.daemon.display.header import header
from p2pdiloco.daemon.display.keys import HELP
from p2pdiloco.daemon.display.progress import copied_text, progress_text
from p2pdiloco.daemon.display.snapshot import FragmentRow, NodeSnapshot, PeerRow, offices_of
from p2pdiloco.daemon.display.wording import (
    count,
    duration,
    fit,
    folded,
    loss_text,
    ranges,
    short_peer,
)
from p2pdiloco.errors import clean

CELL_WIDTH = 39
"""Columns of one fragment's cell: two fit on 80."""
INDENT = "    "
WEIGHS_IN_FULL = 0.95
"""Weight of a member's work, beside a usual one's, from which on nothing is said about it."""
MOST_RECENT = 4
"""Rows of the newest sentences that fragments make room for."""
LEAST_BELOW = 11
"""Rows below the header at least: three titles, and what is most important under each."""
EXPLAINED = (
    "q: leave in good order (again: at once); Ctrl-C does the same. ?: back to the figures.",
    "loss: of this node's training, a moving average. held-out: of the run's parameters, on data that nobody "
    "trains on, with its age.",
    "tokens here: trained by this node; in versions: merged by all. In per cent: of the run's schedule.",
    "peers: name, end of its id, inner step, speed, when it was last heard, what keeps it from more. Yellow: "
    "it does not count yet. syncer of N: it merges N fragments.",
    "fragments: parts of the model. Index, version, beginning of its digest, syncer, what goes on. "
    "collecting 2/3: contributions that are in; sent: ours is on its way.",
    "refused: what peers sent and this node did not take, by reason; a few are usual.",
    "yellow above: what limits this node (link, disk, reach), or what the run's owner says.",
)


def log_line(snapshot: NodeSnapshot) -> str:
    """Say it in one line: `step 1240  loss 2.31  tokens/s 15.2k  peers 3  versions 12-14  syncer of 2,5`."""
    parts = [] if snapshot.state == "training" else [f"{snapshot.state}:"]
    if snapshot.state == "idle" and snapshot.rest is not None:
        parts = [clean(snapshot.rest.words)]
    parts += [
        f"step {snapshot.inner_step}",
        f"loss {loss_text(snapshot.loss)}",
        f"tokens/s {count(snapshot.tokens_per_s)}",
        f"peers {_peers_total(snapshot)}",
        f"versions {versions_text(snapshot.fragments)}",
        f"syncer of {ranges(offices_of(snapshot))}",
    ]
    if snapshot.copied_share is not None:
        parts.insert(0, copied_text(snapshot.copied_share))
    if snapshot.course.schedule_tokens:
        parts.append(progress_text(snapshot.course))
    return "  ".join(parts)


def log_fields(snapshot: NodeSnapshot) -> dict[str, object]:
    """List the figures of the line, and a few more, under names that stay (docs/reference/events.md)."""
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
        "copied_share": snapshot.copied_share,
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
        "rest": snapshot.rest.reason.value if snapshot.rest is not None else None,
        "month_bytes": snapshot.transfer.sent_bytes + snapshot.transfer.received_bytes
        if snapshot.transfer is not None
        else None,
    }


def render(snapshot: NodeSnapshot, explained: bool = False) -> RenderableType:
    """Make the live view; it takes width and height from the console that it is printed on. `explained`: what
    its words mean instead."""
    return NodeView(snapshot, explained)


class NodeView:
    """Rich renderable of one snapshot, with at most one line less than the terminal has."""

    def __init__(self, snapshot: NodeSnapshot, explained: bool) -> None:
        self._snapshot = snapshot
        self._explained = explained

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height, width = options.height or console.size.height, options.max_width
        if self._explained:
            lines = [Text(line) for text in EXPLAINED for line in folded(text, width)]
            yield Text("\n").join(lines[: max(1, height - 1)])
        else:
            yield Text("\n").join(view_lines(self._snapshot, width, height))


def view_lines(snapshot: NodeSnapshot, width: int, height: int) -> list[Text]:
    """Draw at most height - 1 lines of at most `width` columns each.

    What does not fit is left out whole: the least important of the header, idle fragments, older sentences,
    and peers, which are counted.
    """
    columns = max(1, width // CELL_WIDTH)
    top = header(snapshot, width, max(2, height - LEAST_BELOW))
    room = max(3, height - 1 - len(top) - 3)
    peers = _peer_blocks(snapshot, width)
    peers_need = sum(map(len, peers)) + (_peers_total(snapshot) > len(snapshot.peers))
    newest = len(folded(clean(snapshot.recent[-1]), width)) if snapshot.recent else 0
    wanted = min(max(2, newest), MOST_RECENT, len(snapshot.recent) + newest)
    recent = _recent_lines(snapshot, width, max(0, min(wanted, room - 2)))
    fragment_rows = min(
        max(1, math.ceil(len(snapshot.fragments) / columns)),
        max(1, room - len(recent) - min(3, peers_need)),
    )
    peer_rows = min(peers_need, max(1, room - len(recent) - fragment_rows))
    recent = _recent_lines(snapshot, width, max(0, room - fragment_rows - peer_rows))
    lines = [
        *top,
        title(f"peers ({_peers_total(snapshot)})", width, HELP),
        *_peer_lines(snapshot, peers, peer_rows),
        *_fragment_lines(snapshot, fragment_rows, columns, width),
    ]
    if recent:
        lines += [title("latest", width), *recent]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[: max(1, height - 1)]


def _recent_lines(snapshot: NodeSnapshot, width: int, rows: int) -> list[Text]:
    """Draw the newest sentences, whole, on so many rows; only if not even the newest fits, is that cut."""
    lines: list[str] = []
    for sentence in reversed(snapshot.recent):
        more = folded(clean(sentence), width)
        if lines and len(more) + len(lines) > rows:
            break
        lines = [*more, *lines]
    return [Text(line) for line in lines[:rows]]


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


def title(text: str, width: int, right: str = "") -> Text:
    """Draw a line with a title, and words at its right end, if there is room for both."""
    head, tail = f"── {text} ", f" {right} ──" if right else ""
    tail = tail if len(head) + len(tail) <= width else ""
    return Text(head + "─" * max(0, width - len(head) - len(tail)) + tail, style="dim")


def _peers_total(snapshot: NodeSnapshot) -> int:
    return max(snapshot.peers_total, len(snapshot.peers))


def _peer_blocks(snapshot: NodeSnapshot, width: int) -> list[list[Text]]:
    return [_peer_block(row, width) for row in snapshot.peers] or [[Text("nobody else so far", style="dim")]]


def _peer_lines(snapshot: NodeSnapshot, blocks: list[list[Text]], rows: int) -> list[Text]:
    """Draw peers, each whole, on so many lines; the rest is counted."""
    if not snapshot.peers:
        return blocks[0]
    lines: list[Text] = []
    shown = 0
    for block in blocks:
        left = rows - len(lines) - len(block)
        if left < (_peers_total(snapshot) > shown + 1):
            break
        lines += block
        shown += 1
    more = _peers_total(snapshot) - shown
    if more:
        lines.append(Text(f"and {more} more", style="dim"))
    return lines


def _peer_block(row: PeerRow, width: int) -> list[Text]:
    """Draw a peer; where a line is too narrow, it goes without the id's end, if it has a name, and its roles
    below."""
    roles = ", ".join(w for w in ("" if row.reach == "direct" else clean(row.reach), role_text(row)) if w)
    seen = "never heard" if row.last_seen_s is None else f"{duration(row.last_seen_s)} ago"
    style = "" if row.confirmed else "yellow"
    end = f"…{short_peer(row.peer):<6}"
    for name, short in ((row.name or "-", f"{end} "), (row.name or end, "")):
        figures = (
            f"{fit(name, 12)} {short}step {row.inner_step:<7} {count(row.tokens_per_s):>5} tok/s {seen:>11}"
        )
        if cell_len(figures) + 2 + cell_len(roles) <= width:
            return [Text(f"{figures}  {roles}".rstrip(), style=style)]
    below = [INDENT + line for line in folded(roles, width - len(INDENT))]
    return [Text(line, style=style) for line in (figures, *below)]


def role_text(row: PeerRow) -> str:
    """Word what a member is beside a learner: "syncer of 3", "catching up", "expelled (harm)"."""
    words = [] if row.expelled is None else [f"expelled ({row.expelled.value})"]
    words += [] if row.confirmed else ["catching up"]
    words += [] if row.learning else ["not training"]
    words += [] if row.votes else ["cannot save"]
    words += ["thin uplink"] if row.thin else []
    words += [] if row.weighs is None or row.weighs >= WEIGHS_IN_FULL else [f"weighs {row.weighs:.0%}"]
    words += [f"syncer of {row.offices}"] if row.offices else []
    return ", ".join(words)


def _fragment_lines(snapshot: NodeSnapshot, rows: int, columns: int, width: int) -> list[Text]:
    fragments = list(snapshot.fragments)
    total = len(fragments)
    if total > rows * columns:
        busiest = sorted(fragments, key=lambda row: (row.state == "idle" and not row.pending, row.index))
        fragments = sorted(busiest[: rows * columns], key=lambda row: row.index)
    shown = "" if len(fragments) == total else f", the {len(fragments)} busiest"
    words = f"fragments ({total}{shown}), versions {versions_text(snapshot.fragments)}"
    lines = [title(words + groups_text(snapshot.fragments), width)]
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

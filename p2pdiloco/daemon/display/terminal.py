"""Terminal view of a node: its lines as pure functions of a `NodeSnapshot`, the thread that draws them, and
keys.

Drawn line by line and not with tables, because the whole must fit any terminal from 80x24 up. With too many
fragments or peers the busiest are shown and the rest is counted. `header` packs what a node is and does into
as few lines as the width allows.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

from p2pdiloco.daemon.display.logs import before_end, drain, not_before_end, outlet_of
from p2pdiloco.daemon.display.snapshot import (
    DataRow,
    FragmentRow,
    NodeSnapshot,
    PeerRow,
    copied_text,
    count,
    duration,
    fit,
    folded,
    loss_text,
    offices_of,
    owner_text,
    progress_text,
    ranges,
    short_peer,
    size,
    sparkline,
    transfer_text,
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
        f"step {snapshot.me.inner_step}",
        f"loss {loss_text(snapshot.me.loss)}",
        f"tokens/s {count(snapshot.me.tokens_per_s)}",
        f"peers {snapshot.peers_total}",
        f"versions {versions_text(snapshot.fragments)}",
        f"syncer of {ranges(offices_of(snapshot.fragments, snapshot.answered_by))}",
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
        "inner_step": snapshot.me.inner_step,
        "loss": snapshot.me.loss,
        "heldout_loss": snapshot.heldout_loss,
        "tokens_per_s": snapshot.me.tokens_per_s,
        "step_time_s": snapshot.step_time_s,
        "copied_share": snapshot.copied_share,
        "tokens_total": snapshot.me.tokens_total,
        "run_tokens": snapshot.run_tokens,
        "run_versions": snapshot.run_versions,
        "peers": snapshot.peers_total,
        "version_min": min(numbers, default=None),
        "version_max": max(numbers, default=None),
        "offices": offices_of(snapshot.fragments, snapshot.answered_by),
        "sent_bytes": snapshot.bytes_sent,
        "received_bytes": snapshot.bytes_received,
        "refusals": snapshot.refusals,
        "reach": snapshot.me.reach,
        "votes": snapshot.me.votes,
        "link": snapshot.link,
        "run_share": share,
        "run_left_s": course.left_s,
        "rest": snapshot.rest.reason.value if snapshot.rest is not None else None,
        "month_bytes": snapshot.transfer.sent_bytes + snapshot.transfer.received_bytes
        if snapshot.transfer is not None
        else None,
    }


@dataclass
class LinesView:
    """Rich renderable of a snapshot as lines, with at most one line less than the terminal has."""

    _lines: Callable[[Any, int, int], list[Text]]
    """Drawer of a snapshot, for a width and a height."""
    _meaning: Sequence[str]
    """Sentences on what the words of the view mean."""
    _snapshot: Any
    explained: bool = False
    """True: those are shown in place of the snapshot."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height, width = options.height or console.size.height, options.max_width
        lines = [Text(line) for text in self._meaning for line in folded(text, width)][: max(1, height - 1)]
        if not self.explained:
            lines = self._lines(self._snapshot, width, height)
        yield Text("\n").join(lines)


def view_lines(snapshot: NodeSnapshot, width: int, height: int) -> list[Text]:
    """Draw at most height - 1 lines of at most `width` columns each.

    What does not fit is left out whole: the least important of the header, idle fragments, older sentences,
    and peers, which are counted.
    """
    columns = max(1, width // CELL_WIDTH)
    top = header(snapshot, width, max(2, height - LEAST_BELOW))
    room = max(3, height - 1 - len(top) - 3)
    peers = _peer_blocks(snapshot, width)
    peers_need = sum(map(len, peers)) + (snapshot.peers_total > len(snapshot.peers))
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
        title(f"peers ({snapshot.peers_total})", width, HELP),
        *_peer_lines(snapshot, peers, peer_rows),
        *_fragment_lines(snapshot, fragment_rows, columns, width),
    ]
    if recent:
        lines += [title("latest", width), *recent]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[: max(1, height - 1)]


render = partial(LinesView, view_lines, EXPLAINED)
"""Live view of a snapshot, or what its words mean."""


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
        if left < (snapshot.peers_total > shown + 1):
            break
        lines += block
        shown += 1
    more = snapshot.peers_total - shown
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
    """Word what a member is beside a learner: "syncer of 3", "seat", "catching up", "expelled (harm)"."""
    words = [] if row.expelled is None else [f"expelled ({row.expelled.value})"]
    words += [] if row.confirmed else ["catching up"]
    words += [] if row.learning else ["not training"]
    words += [] if row.votes else ["cannot save"]
    words += ["thin uplink"] if row.thin else []
    words += [] if row.weighs is None or row.weighs >= WEIGHS_IN_FULL else [f"weighs {row.weighs:.0%}"]
    words += [f"syncer of {row.offices}"] if row.offices else ["seat"] if row.seated else []
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
    names = peer_names(snapshot.answered_by, "you", snapshot.peers)
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


STATE_STYLES = {"training": "bold green", "leaving": "bold red"}
OLD_S = 5.0
"""Age from which on a figure is shown with it: younger ones are as new as the picture."""
GAP = "  "
CURVE_CELLS = 7
LEFT_OUT = ("month", "traffic", "tokens", "data", "device", "pace")
"""Parts that are left out first where there is no room."""


def header(snapshot: NodeSnapshot, width: int, most: int) -> list[Text]:
    """Draw at most so many lines. What does not fit is left out whole, the least important first."""
    parts = _parts(snapshot)
    for name in LEFT_OUT:
        if len(packed(parts.values(), width)) <= most:
            break
        parts.pop(name, None)
    return packed(parts.values(), width)[: max(1, most)]


def packed(parts: Iterable[Text], width: int) -> list[Text]:
    """Pack parts into lines, in order; one that is longer than a line goes over several."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(GAP) + part.cell_len <= width:
            lines[-1].append(GAP).append_text(part)
        elif part.cell_len <= width:
            lines.append(part.copy())
        else:
            lines += [Text(line, part.style) for line in folded(part.plain, width)]
    return lines


def _parts(snapshot: NodeSnapshot) -> dict[str, Text]:
    course = snapshot.course
    parts = {
        "name": Text.assemble(
            (clean(snapshot.me.name) or "node", "bold"), f" …{short_peer(snapshot.answered_by)}"
        ),
        "run": Text.assemble("run ", (clean(snapshot.run_name), "bold"), f" {clean(snapshot.run_id[:8])}"),
        "state": Text(snapshot.state, STATE_STYLES.get(snapshot.state, "bold yellow")),
        "copied": Text(copied_text(snapshot.copied_share), "bold yellow"),
        "device": Text(clean(snapshot.device)),
        "data": Text(data_text(snapshot.data) if snapshot.data else ""),
        "step": Text(f"step {snapshot.me.inner_step}{age_text(snapshot.learner_age_s)}"),
        "loss": Text.assemble(
            "loss ",
            (loss_text(snapshot.me.loss, 3), "bold"),
            (f" {sparkline(snapshot.loss_history, CURVE_CELLS)}", "cyan"),
        ),
        "heldout": Text(_heldout(snapshot)),
        "speed": Text(f"{count(snapshot.me.tokens_per_s)} tokens/s"),
        "pace": Text(f"{duration(snapshot.step_time_s)}/step"),
        "traffic": Text(f"up {size(snapshot.bytes_sent)}, down {size(snapshot.bytes_received)}"),
        **{f"warning {number}": text for number, text in enumerate(_warnings(snapshot))},
        "month": Text(transfer_text(snapshot.transfer) if snapshot.transfer is not None else ""),
        "course": Text(progress_text(course) if course.schedule_tokens else "", "bold"),
        "tokens": Text(
            f"tokens {count(snapshot.me.tokens_total)} here, {count(snapshot.run_tokens)} in "
            f"{count(snapshot.run_versions)} versions"
        ),
    }
    return {name: part for name, part in parts.items() if part.plain}


def _warnings(snapshot: NodeSnapshot) -> Sequence[Text]:
    words = [clean(snapshot.rest.words)] if snapshot.rest is not None else []
    words.append(owner_text(snapshot.course))
    if not snapshot.me.votes:
        words.append("the disk takes nothing: no vote")
    words += [clean(snapshot.doubt), clean(snapshot.link)]
    if snapshot.me.reach not in ("", "direct"):
        words += [clean(snapshot.me.reach), clean(snapshot.router)]
    if snapshot.refusals:
        words.append(f"refused {refusals_text(snapshot.refusals)}")
    return [Text(word, "yellow") for word in words]


def _heldout(snapshot: NodeSnapshot) -> str:
    if snapshot.heldout_loss is None:
        return ""
    return f"held-out {loss_text(snapshot.heldout_loss, 3)}{age_text(snapshot.heldout_age_s)}"


def age_text(age_s: float | None) -> str:
    """Word how old a figure is, as " (40.0 s ago)"; empty for one that is new."""
    return "" if age_s is None or age_s < OLD_S else f" ({duration(age_s)} ago)"


def data_text(data: DataRow) -> str:
    """Word how many shards were begun, as "epoch 1, 57/240 shards"."""
    return f"epoch {data.epoch}, {data.begun}/{data.shards} shards"


def refusals_text(refusals: dict[str, int]) -> str:
    """Word refusals, as `4: stale 3, nan 1`: the sum, then the reasons, most frequent first."""
    ordered = sorted(refusals.items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{clean(reason)} {number}" for reason, number in ordered)
    return f"{sum(refusals.values())}: {reasons}"


PERIOD_S = 0.25
STOP_TIMEOUT_S = 1.0


class LiveView:
    """Thread that draws snapshots between `start` and `stop`; afterwards the terminal is as it was, whatever
    happened.

    It draws the newest snapshot a few times a second. A terminal can stop for as long as a person likes
    (Ctrl-S, a paused pager): nothing is drawn meanwhile, as it would come all at once later.

    If drawing fails, the thread gives the terminal back and ends with a traceback through
    `threading.excepthook`. `drawing` is False then, `update` does nothing, and the node goes on.
    """

    def __init__(
        self,
        console: Console | None = None,
        period_s: float = PERIOD_S,
        draw: Callable[[Any, bool], RenderableType] = render,
    ) -> None:
        """`draw`: makes the picture of a snapshot, or what its words mean."""
        self._console = console or Console(stderr=True)
        self._period_s = period_s
        self._render = draw
        self._snapshot: Any = None
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._explains = False

    @property
    def drawing(self) -> bool:
        """True: the view is on the terminal."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin to draw; without effect while drawing."""
        if self.drawing:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._draw, name="live-view", daemon=True)
        self._thread.start()
        before_end(self.stop)

    def update(self, snapshot: Any) -> None:
        """Show this snapshot next. Never blocks."""
        self._snapshot = snapshot
        self._changed.set()

    def explain(self) -> None:
        """Show what the words of the view mean, or the view again."""
        self._explains = not self._explains
        self._changed.set()

    def stop(self) -> None:
        """Draw the newest snapshot a last time and leave it on the terminal. Idempotent.

        Waits at most `STOP_TIMEOUT_S`: a terminal must not keep the node from ending.
        """
        not_before_end(self.stop)
        self._stop.set()
        self._changed.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_TIMEOUT_S)

    def _draw(self) -> None:
        # Logging writes to the recent lines meanwhile (daemon.logs), not through this console.
        with Live(console=self._console, auto_refresh=False, redirect_stdout=False) as live:
            while not self._stop.is_set():
                self._changed.wait()
                self._changed.clear()
                if self._snapshot is not None and not self._is_behind():
                    live.update(self._render(self._snapshot, self._explains), refresh=True)
                self._stop.wait(self._period_s)
            if self._snapshot is not None:
                live.update(self._render(self._snapshot, False), refresh=True)

    def _is_behind(self) -> bool:
        """Tell whether the terminal has not taken the last picture yet."""
        outlet = outlet_of(self._console.file)
        return outlet is not None and outlet.is_behind


def suspend(view: LiveView | Live, keys: Keys) -> None:
    """Stop this process, as Ctrl-Z asks for: the shell has its terminal meanwhile, with its cursor."""
    keys.stop()
    view.stop()
    drain()
    os.kill(os.getpid(), signal.SIGSTOP)  # returns at SIGCONT
    view.start()
    keys.start()


MOST_BYTES = 64
HELP = "q leaves, ? explains"


class Move(Enum):
    """Keys that move in a list, by what terminals send for them (xterm(1), and vi's letters)."""

    UP = ("\x1b[A", "\x1bOA", "k")
    DOWN = ("\x1b[B", "\x1bOB", "j")
    PAGE_UP = ("\x1b[5~", "\x02")
    PAGE_DOWN = ("\x1b[6~", " ", "\x06")
    HOME = ("\x1b[H", "\x1bOH", "\x1b[1~", "g")
    END = ("\x1b[F", "\x1bOF", "\x1b[4~", "G")

    def moved(self, first: int, page: int, total: int) -> int:
        """Compute the first row that is shown after this key, of so many, a page of which fits."""
        last = max(0, total - page)
        steps = {Move.UP: -1, Move.DOWN: 1, Move.PAGE_UP: -page, Move.PAGE_DOWN: page}
        if self in steps:
            return max(0, min(last, first + steps[self]))
        return last if self is Move.END else 0


_SENT = {sent: move for move in Move for sent in move.value}


def told_apart(pressed: str) -> list[Move | str]:
    """Tell keys apart, of which some send several characters; unknown ones of those are left out."""
    found: list[Move | str] = []
    for sent in re.findall(r"\x1b(?:\[[0-9;]*[ -/]*[@-~]|O.)|[^\x1b]", pressed, re.DOTALL):
        if sent in _SENT:
            found.append(_SENT[sent])
        elif len(sent) == 1:
            found.append(sent)
    return found


class Keys:
    """Keys that a person presses between `start` and `stop`, read without waiting and without an echo.

    There are none unless we are in the terminal's foreground.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: of the terminal; None: that of stdin."""
        self._descriptor = descriptor
        self._before: list[Any] | None = None

    def start(self) -> None:
        """Have keys at once, not only whole lines; Ctrl-C and Ctrl-Z stay what they are."""
        if self._descriptor is None:
            with suppress(OSError, ValueError, AttributeError):  # stdin may be closed
                self._descriptor = sys.stdin.fileno()
        if not self._is_ours():
            return
        with suppress(termios.error):
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
            before_end(self.stop)

    def pressed(self) -> str:
        """List the keys that were pressed since the last call."""
        if self._before is None or not self._is_ours():
            return ""
        with suppress(OSError, termios.error):
            if termios.tcgetattr(self._fd)[3] & termios.ICANON:  # stopped by Ctrl-Z, and back
                tty.setcbreak(self._fd, termios.TCSANOW)
            if select.select([self._fd], [], [], 0)[0]:
                return os.read(self._fd, MOST_BYTES).decode("ascii", "ignore")
        return ""

    def stop(self) -> None:
        """Give the terminal back as it was. Idempotent."""
        not_before_end(self.stop)
        before, self._before = self._before, None
        if before is not None and self._is_ours():
            with suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, before)

    @property
    def _fd(self) -> int:
        return -1 if self._descriptor is None else self._descriptor

    def _is_ours(self) -> bool:
        """Tell whether reading it, and changing it, does not stop us, as it does in the background."""
        try:
            return os.isatty(self._fd) and os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

"""View of the demo: one live picture on a terminal, plain lines elsewhere; then the summary."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2pdiloco.daemon.display.snapshot import count, duration, folded, loss_text, ranges, sparkline
from p2pdiloco.daemon.display.terminal import HELP, Keys, suspend
from p2pdiloco.demo.chronicle import Chronicle, NodeTrace
from p2pdiloco.demo.event_log import Line
from p2pdiloco.demo.swarm import stop_here
from p2pdiloco.demo.verdict import DemoSummary, Kill
from p2pdiloco.errors import clean

LINE_EVERY_S = 10.0
KEPT_NOTES = 30
CURVE_CELLS = 20
GAP_CELLS = 2
LEFT_OUT = (4, 6, 5)
"""Columns of the table of nodes that narrow terminals do without: the curve, the speed, the held-out loss."""
EXPLAINED = (
    "q or Ctrl-C: end it all. ?: back to what happened.",
    "step: inner steps of a node. held-out: loss of the merged parameters on text that nobody trains on.",
    "syncer of: fragments, parts of the model, that this node merges. newest merge: learners in it.",
)
STATE_STYLES = {"training": "green", "killed": "bold red", "starting": "yellow", "starting again": "yellow"}


def words_of(line: Line, trace: NodeTrace) -> str:
    """Tell people of a line that its node's `trace` has just taken in; empty if it is not worth it."""
    name, reason = line.node, line.reason
    match line.kind:
        case "progress" if len(trace.lives[-1]) == 1:
            return f"{name} trains, from inner step {line.inner_step}"
        case "join" if reason.startswith("full member"):
            return f"{name} joins: {reason.partition(': ')[2]}"
        case "refusal" if reason in ("digest-differs", "false-state"):
            return f"{name} computes another state of fragment {line.fragment} than its syncer"
        case "fork":
            return f"{name}: fragment {line.fragment} has two heads: {reason}"
        case "learner" if reason.startswith(("ended: ", "lost")) and "stopped" not in reason:
            return f"{name}: learner {reason}"
    return ""


class Screen:
    """start, show often, note what happens, stop."""

    def __init__(self, console: Console, headline: str) -> None:
        self._console = console
        self._headline = headline
        self._live: Live | None = None
        self._notes: deque[tuple[float, str]] = deque(maxlen=KEPT_NOTES)
        self._opened_s = time.monotonic()
        self._next_line_s = 0.0
        self._keys = Keys()
        self._explains = False
        self.is_left = False
        """True: a person pressed q."""
        self.began_s: float | None = None
        """Time at which training began; before that, times count from the start."""

    def start(self) -> None:
        """Say what the demo shows, and begin the picture if this is a terminal."""
        self._console.print(Text(self._headline, style="bold"))
        self._console.print()
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            self._keys.start()

    def stop(self) -> None:
        """Give the terminal back; the last picture stays."""
        self._keys.stop()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def suspend(self) -> None:
        """Stop this process, as Ctrl-Z asks for."""
        if self._live is None:
            stop_here()
        else:
            suspend(self._live, self._keys)

    def note(self, text: str) -> None:
        """Something has happened."""
        self._notes.append((self._elapsed_s(), clean(text)))
        if self._live is None:
            self._console.print(_note(*self._notes[-1]), soft_wrap=True)

    def show(self, chronicle: Chronicle, phase: str, lines: bool = True) -> None:
        """The present state; on no terminal a line now and then, if `lines`."""
        for key in self._keys.pressed():
            self._explains ^= key == "?"
            self.is_left |= key in "qQ"
        if self._live is not None:
            self._live.update(self._picture(chronicle, phase), refresh=True)
        elif lines and self.began_s is not None and self._elapsed_s() >= self._next_line_s:
            self._next_line_s = self._elapsed_s() + LINE_EVERY_S
            self._console.print(Text(_line(chronicle, self._elapsed_s())), soft_wrap=True)

    def _elapsed_s(self) -> float:
        return time.monotonic() - (self._opened_s if self.began_s is None else self.began_s)

    def _picture(self, chronicle: Chronicle, phase: str) -> RenderableType:
        first = Text.assemble((phase, "bold"), f"   {HELP}   {chronicle.updates()} outer updates")
        if (participation := chronicle.participation()) is not None:
            first.append(f", {participation:.0%} of the live learners in the average merge")
        others = 6 + len(chronicle.nodes) + _fragment_rows(chronicle)
        room = max(4, self._console.size.height - others - 1)
        notes = [_note(at_s, text) for at_s, text in list(self._notes)[-room:]]
        width = self._console.size.width
        if self._explains:
            notes = [Text(line) for text in EXPLAINED for line in folded(text, width)]
        parts: list[RenderableType] = [
            first,
            Text(),
            _nodes(chronicle, width),
            Text(),
            _fragments(chronicle, width),
            Text(),
        ]
        return Group(*parts, *notes)


def _note(at_s: float, text: str) -> Text:
    style = "bold red" if "kill -9" in text else "green" if "goes on" in text or "caught up" in text else ""
    return Text.assemble((f"{at_s:6.1f} s  ", "dim"), (text, style))


def _line(chronicle: Chronicle, elapsed_s: float) -> str:
    """A swarm in one line."""
    nodes = [f"{n.name} {_step(n)}" for n in chronicle.nodes.values()]
    heldout = newest_heldout(chronicle)
    words = (
        f"{elapsed_s:6.1f} s  held-out {loss_text(heldout)}  "
        if heldout is not None
        else f"{elapsed_s:6.1f} s  "
    )
    return f"{words}{chronicle.updates()} outer updates  " + "  ".join(nodes)


def _step(node: NodeTrace) -> str:
    if node.state != "training" or node.last is None:
        return node.state
    return f"step {node.last.inner_step} loss {loss_text(node.last.loss)}"


def newest_heldout(chronicle: Chronicle) -> float | None:
    """The newest held-out loss that any node has measured."""
    points = chronicle.heldout_losses()
    return points[-1][1] if points else None


def _nodes(chronicle: Chronicle, width: int) -> Table:
    """A row for every node. Where they do not all fit, columns are left out, and none is cut."""
    headings = ("node", "state", ">step", ">loss", "loss so far", ">held-out", ">tokens/s", "syncer of")
    rows: list[list[Text]] = []
    for node in chronicle.nodes.values():
        losses = [line.loss for line in node.progress if line.loss is not None]
        thinned = losses[:: max(1, len(losses) // CURVE_CELLS)]
        last = node.last
        speed = last.tokens_per_s if last and node.state == "training" else None
        rows.append(
            [
                Text(clean(node.name), style="bold"),
                Text(node.state, style=STATE_STYLES.get(node.state, "")),
                Text(str(node.inner_step)),
                Text(loss_text(last.loss if last else None)),
                Text(sparkline(thinned, CURVE_CELLS), style="cyan"),
                Text(loss_text(node.evaluations[-1].loss if node.evaluations else None)),
                Text(count(speed)),
                Text(ranges(chronicle.offices_of(node.name))),
            ]
        )
    return _fitting(headings, rows, LEFT_OUT, width)


def _fitting(headings: Sequence[str], rows: list[list[Text]], left_out: Sequence[int], width: int) -> Table:
    """Make a table without so many of the columns `left_out`, in this order, that the others fit."""
    wide = [
        max([len(heading.lstrip(">")), *(row[index].cell_len for row in rows)]) + GAP_CELLS
        for index, heading in enumerate(headings)
    ]
    kept = list(range(len(headings)))
    for index in left_out:
        if sum(wide[column] for column in kept) <= width:
            break
        kept.remove(index)
    table = _table(*(headings[index] for index in kept))
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def _fragments(chronicle: Chronicle, width: int) -> Table:
    """Two fragments a line: version, syncer, and how many took part in the newest merge."""
    headings = [">fragment", ">version", "syncer", "newest merge"] * 2
    rows: list[list[Text]] = []
    half = (chronicle.fragments + 1) // 2
    for index in range(_fragment_rows(chronicle)):
        cells: list[Text] = []
        for fragment in (index, index + half):
            if fragment < chronicle.fragments:
                cells += _fragment(chronicle, fragment)
        rows.append(cells + [Text()] * (len(headings) - len(cells)))
    return _fitting(headings, rows, (3, 7), width)


def _fragment_rows(chronicle: Chronicle) -> int:
    return min((chronicle.fragments + 1) // 2, 12)


def _fragment(chronicle: Chronicle, fragment: int) -> list[Text]:
    syncer = chronicle.syncer(fragment) or "-"
    merge = next((line for line in reversed(chronicle.merges) if line.fragment == fragment), None)
    dead = syncer in chronicle.nodes and chronicle.nodes[syncer].state == "killed"
    return [
        Text(str(fragment)),
        Text(str(chronicle.newest(fragment))),
        Text(f"{syncer} (killed)" if dead else syncer, style="bold red" if dead else ""),
        Text(f"{merge.contributors} of {merge.live}" if merge else "-"),
    ]


def _table(*headings: str) -> Table:
    """A heading that starts with ">" is of a column of numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP_CELLS, 0, 0))
    for heading in headings:
        table.add_column(heading.lstrip(">"), justify="right" if heading[0] == ">" else "left", no_wrap=True)
    return table


def render_summary(
    summary: DemoSummary, kills: Sequence[Kill], files: Sequence[str], unit: str
) -> RenderableType:
    """Render the end of the demo. `unit`: of losses."""
    rows = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    fell = Text(f"{summary.loss_before:.3f} → {summary.loss_after:.3f} {unit}", style="bold")
    rows.add_row("held-out loss", fell)
    nodes = "one node" if summary.nodes == 1 else f"{summary.nodes} nodes"
    rows.add_row(
        "trained",
        f"{summary.inner_steps} inner steps, {count(summary.tokens)} tokens, "
        f"{summary.outer_updates} outer updates by {nodes} in {duration(summary.seconds)}",
    )
    if summary.participation is not None:
        rows.add_row(
            "participation", f"{summary.participation:.1%} of the live learners in the average merge"
        )
    who = "a survivor" if kills else "a node"
    if summary.median_inner_step_s is not None:
        rows.add_row(
            "longest pause",
            f"{duration(summary.longest_pause_s)} between two inner steps of {who} "
            f"(median inner step {duration(summary.median_inner_step_s)}); "
            f"{duration(summary.longest_aside_s)} for a measurement or a checkpoint",
        )
    for kill in kills:
        rows.add_row("killed", _recovery(kill))
    agree = f"yes: {summary.versions_compared} versions compared, and the bytes of all final states checked"
    if summary.nodes == 1:
        agree = (
            "the bytes of the final state are those that its digests say (one node: nobody to compare with)"
        )
    rows.add_row("digests agree", Text(agree) if summary.digests_agree else Text("NO", style="bold red"))
    for file in files:
        rows.add_row("written", file)
    parts: list[RenderableType] = [Text(), rows]
    if summary.sample:
        written = Text(summary.sample.rstrip(), style="cyan")
        parts += [Text(), Text("what the model writes by now:", style="dim"), written]
    parts += [Text(f"\nFAILED: {failure}", style="bold red") for failure in summary.failures]
    return Group(*parts, Text())


def _recovery(kill: Kill) -> str:
    words = f"{kill.node}, the syncer of fragments {ranges(kill.fragments)}"
    if kill.resumed_s:
        times = sorted(kill.resumed_s.values())
        words += f": their next versions came after {duration(times[0])}"
        words += f" to {duration(times[-1])}" if len(times) > 1 else ""
    if kill.back_s is not None:
        words += f"; restarted, it trained again after {duration(kill.back_s)}"
    return words

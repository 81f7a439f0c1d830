"""View of the demo: one live picture on a terminal, plain lines elsewhere; then the summary."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2pdiloco.daemon.display.wording import count, duration, loss_text, ranges, sparkline
from p2pdiloco.lab.demo.verdict import DemoSummary, Kill
from p2pdiloco.lab.swarm.chronicle import Chronicle, NodeTrace
from p2pdiloco.lab.swarm.event_log import Line
from p2pdiloco.printable import clean

LINE_EVERY_S = 10.0
KEPT_NOTES = 30
CURVE_CELLS = 20
STATE_STYLES = {"training": "green", "killed": "bold red", "starting": "yellow", "starting again": "yellow"}


def words_of(line: Line, trace: NodeTrace) -> str:
    """Tell people of a line that its node's `trace` has just taken in; empty if it is not worth it."""
    name, reason = line.node, line.reason
    match line.kind:
        case "progress" if len(trace.lives[-1]) == 1:
            return f"{name} trains, from inner step {line.inner_step}"
        case "join" if reason.startswith("full member"):
            return f"{name} joins: {reason.partition(': ')[2]}"
        case "refusal" if reason == "digest-differs":
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
        self.began_s: float | None = None
        """Time at which training began; before that, times count from the start."""

    def start(self) -> None:
        """Say what the demo shows, and begin the picture if this is a terminal."""
        self._console.print(Text(self._headline, style="bold"))
        self._console.print()
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def stop(self) -> None:
        """Give the terminal back; the last picture stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """Something has happened."""
        self._notes.append((self._elapsed_s(), clean(text)))
        if self._live is None:
            self._console.print(_note(*self._notes[-1]), soft_wrap=True)

    def show(self, chronicle: Chronicle, phase: str, lines: bool = True) -> None:
        """The present state; on no terminal a line now and then, if `lines`."""
        if self._live is not None:
            self._live.update(self._picture(chronicle, phase), refresh=True)
        elif lines and self.began_s is not None and self._elapsed_s() >= self._next_line_s:
            self._next_line_s = self._elapsed_s() + LINE_EVERY_S
            self._console.print(Text(_line(chronicle, self._elapsed_s())), soft_wrap=True)

    def _elapsed_s(self) -> float:
        return time.monotonic() - (self._opened_s if self.began_s is None else self.began_s)

    def _picture(self, chronicle: Chronicle, phase: str) -> RenderableType:
        first = Text.assemble((phase, "bold"), f"   {chronicle.updates()} outer updates")
        if (participation := chronicle.participation()) is not None:
            first.append(f", {participation:.0%} of the live learners in the average merge")
        others = 6 + len(chronicle.nodes) + _fragment_rows(chronicle)
        room = max(4, self._console.size.height - others - 1)
        notes = [_note(at_s, text) for at_s, text in list(self._notes)[-room:]]
        return Group(first, Text(), _nodes(chronicle), Text(), _fragments(chronicle), Text(), *notes)


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


def _nodes(chronicle: Chronicle) -> Table:
    table = _table(
        "node",
        "state",
        ">inner step",
        ">loss",
        "loss so far",
        ">held-out",
        ">tokens/s",
        "syncer of fragments",
    )
    for node in chronicle.nodes.values():
        losses = [line.loss for line in node.progress if line.loss is not None]
        thinned = losses[:: max(1, len(losses) // CURVE_CELLS)]
        last = node.last
        speed = last.tokens_per_s if last and node.state == "training" else None
        table.add_row(
            Text(node.name, style="bold"),
            Text(node.state, style=STATE_STYLES.get(node.state, "")),
            str(node.inner_step),
            loss_text(last.loss if last else None),
            Text(sparkline(thinned, CURVE_CELLS), style="cyan"),
            loss_text(node.evaluations[-1].loss if node.evaluations else None),
            count(speed),
            ranges(chronicle.offices_of(node.name)),
        )
    return table


def _fragments(chronicle: Chronicle) -> Table:
    """Two fragments a line: version, syncer, and how many took part in the newest merge."""
    table = _table(*[">fragment", ">version", "syncer", "newest merge"] * 2)
    half = (chronicle.fragments + 1) // 2
    for index in range(_fragment_rows(chronicle)):
        cells: list[Text] = []
        for fragment in (index, index + half):
            if fragment < chronicle.fragments:
                cells += _fragment(chronicle, fragment)
        table.add_row(*cells)
    return table


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
        Text(f"{merge.contributors} of {merge.live} learners" if merge else "-"),
    ]


def _table(*headings: str) -> Table:
    """A heading that starts with ">" is of a column of numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
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

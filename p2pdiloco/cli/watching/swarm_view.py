"""Terminal view of a swarm: pure functions of a `SwarmPicture` and of what a person chose to see."""

from __future__ import annotations

import math
import string
from enum import Enum

from msgspec import Struct
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from p2pdiloco.cli.watching.happenings import silent
from p2pdiloco.cli.watching.picture import MemberRow, SwarmPicture
from p2pdiloco.daemon.display.snapshot import (
    FragmentRow,
    count,
    duration,
    fit,
    folded,
    loss_text,
    owner_text,
    progress_text,
    short_peer,
    sparkline,
)
from p2pdiloco.daemon.display.terminal import (
    HELP,
    OLD_S,
    age_text,
    groups_text,
    packed,
    role_text,
    title,
    versions_text,
)
from p2pdiloco.errors import clean

LETTERS = string.ascii_lowercase + string.ascii_uppercase
CURVE_CELLS = 12
LEAST_HAPPENED, MOST_STRIP = 2, 6
"""Lines of what happened that members make room for; most lines of the strip of fragments."""
WIDE = 78
"""Columns from which on a member has its loss and its step."""
EXPLAINED = (
    "q or Ctrl-C: leave. Arrows, page up and down, home, end: the list of members. s: another order of it. "
    "?: back.",
    "This is the run as the members say that were asked; a letter stands for a member. heard: when "
    "anybody heard of it last. behind: versions that a member lacks that was asked itself.",
    "loss: of training, the mean of the members. held-out: of the run's parameters, on data that nobody "
    "trains on, with its age. In per cent: of the run's schedule.",
    "tokens/s: of the members that are listed, by their own word.",
    "fragments, one column each: · idle, w waiting for contributions, c closing a round, m merging, a taking "
    "an update, ! without a syncer, * anything else; below it the letter of its syncer, ? if not listed.",
    "A line of events begins with the time at which it was seen here.",
)


SIGNS = {"idle": "·", "waiting:": "w", "closing:": "c", "merging": "m", "applying": "a", "copying": "a"}
"""First word on a fragment's state -> its sign in the strip."""


class ListOrder(Enum):
    """Orders of the list of members."""

    WORK = "by work"
    TROUBLE = "trouble first"
    SPEED = "by speed"
    NAME = "by name"

    def next(self) -> ListOrder:
        """Name the order after this one."""
        orders = list(ListOrder)
        return orders[(orders.index(self) + 1) % len(orders)]


class Chosen(Struct, frozen=True):
    """Choice of a person: what to see of the picture."""

    picture: SwarmPicture
    order: ListOrder = ListOrder.WORK
    first: int = 0
    """First member that is shown."""
    silence: str = ""
    """Words on why nothing is new; empty: it is."""


class SwarmView:
    """Rich renderable of a swarm, with at most one line less than the terminal has."""

    def __init__(self, chosen: Chosen, explained: bool) -> None:
        self._chosen, self._explained = chosen, explained

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height, width = options.height or console.size.height, options.max_width
        if self._explained:
            lines = [Text(line) for text in EXPLAINED for line in folded(text, width)][: max(1, height - 1)]
        else:
            lines = swarm_lines(self._chosen, width, height)
        yield Text("\n").join(lines)


def swarm_lines(chosen: Chosen, width: int, height: int) -> list[Text]:
    """Draw at most height - 1 lines of at most `width` columns."""
    picture = chosen.picture
    top = packed(_header(picture, chosen.silence), width)[: max(2, height // 3)]
    strip = _strip(picture, width)
    happened = [line for text in picture.happened[-height:] for line in folded(clean(text), width)]
    room = max(3, height - 1 - len(top) - 2 - len(strip))
    least = min(LEAST_HAPPENED, len(happened))
    members = min(max(1, len(picture.members)), max(1, room - least))
    newest = happened[-max(0, room - members) :] if room > members else []
    lines = [
        *top,
        title(_members_title(chosen, members), width, HELP),
        *_member_lines(chosen, members, width),
        *strip,
        title("events", width),
        *(Text(line) for line in newest or ["none so far"]),
    ]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[: max(1, height - 1)]


def page_rows(picture: SwarmPicture, width: int, height: int) -> int:
    """Count the members that fit."""
    top = packed(_header(picture, ""), width)[: max(2, height // 3)]
    return max(1, height - 3 - len(top) - len(_strip(picture, width)) - LEAST_HAPPENED)


def plain_line(picture: SwarmPicture) -> str:
    """Say it in one line, where there is no terminal."""
    parts = [
        f"run {clean(picture.run_name)}",
        f"members {picture.members_total}",
        f"tokens/s {count(picture.tokens_per_s)}",
        f"loss {loss_text(picture.loss, 3)}",
        f"held-out {loss_text(picture.heldout_loss, 3)}{age_text(picture.heldout_age_s)}",
        f"versions {versions_text(picture.fragments)}",
    ]
    if picture.course.schedule_tokens:
        parts.append(progress_text(picture.course))
    trouble = [f"{_name(member)} {words}" for member in picture.members if (words := trouble_text(member))]
    if trouble:
        parts.append(f"not well: {', '.join(trouble[:8])}" + (" and others" if len(trouble) > 8 else ""))
    return "  ".join(parts)


def trouble_text(member: MemberRow) -> str:
    """Word what keeps a member from more, and how far it is behind; empty: nothing."""
    words = [f"silent {duration(member.age_s)}"] if silent(member) else []
    if member.age_s is None:
        words.append("never heard")
    if member.state not in (None, "training", "catching up"):
        words.append(str(member.state))
    if member.behind:
        words.append(f"{member.behind} behind")
    roles = [word for word in role_text(member.row).split(", ") if word and "syncer of" not in word]
    if member.state is not None and "not training" in roles:
        roles.remove("not training")
    if member.row.reach not in ("", "direct"):
        roles.append(clean(member.row.reach))
    return ", ".join(words + roles)


def ordered(chosen: Chosen) -> list[MemberRow]:
    """Put the members into the order that was chosen."""
    members = list(chosen.picture.members)
    if chosen.order is ListOrder.TROUBLE:
        members.sort(key=lambda m: (not silent(m), not m.behind, not trouble_text(m)))
    elif chosen.order is ListOrder.SPEED:
        members.sort(key=lambda m: -m.row.tokens_per_s)
    elif chosen.order is ListOrder.NAME:
        members.sort(key=lambda m: (_name(m).lower(), m.row.peer))
    return members


def _name(member: MemberRow) -> str:
    return clean(member.row.name) or f"…{short_peer(member.row.peer)}"


def _header(picture: SwarmPicture, silence: str) -> list[Text]:
    course = picture.course
    merged, asked = "no new version", len(picture.asked)
    if picture.merged_age_s is not None:
        merged = f"newest version {duration(picture.merged_age_s)} ago"
    elif picture.watched_s >= OLD_S:
        merged = f"no new version for {duration(picture.watched_s)}"
    parts = [
        Text.assemble("run ", (clean(picture.run_name), "bold"), f" {clean(picture.run_id[:8])}"),
        Text(progress_text(course) if course.schedule_tokens else "", "bold"),
        Text(f"{count(picture.tokens_per_s)} tokens/s", "bold"),
        Text.assemble(
            "loss ",
            (loss_text(picture.loss, 3), "bold"),
            (f" {sparkline(picture.loss_history, CURVE_CELLS)}", "cyan"),
        ),
        Text(
            ""
            if picture.heldout_loss is None
            else f"held-out {loss_text(picture.heldout_loss, 3)}{age_text(picture.heldout_age_s)}"
        ),
        Text(f"{count(picture.run_tokens)} tokens in {count(picture.run_versions)} versions"),
        Text(merged, "" if picture.merged_age_s is not None and picture.merged_age_s < 60 else "yellow"),
        Text(f"as {asked} of them say{'s' if asked == 1 else ''}, {duration(picture.age_s)} ago", "dim"),
        Text(owner_text(course), "yellow"),
        Text(clean(silence), "bold red"),
    ]
    return [part for part in parts if part.plain]


def _members_title(chosen: Chosen, rows: int) -> str:
    picture, shown = chosen.picture, len(chosen.picture.members)
    words = f"members ({picture.members_total}"
    if rows < shown:
        first = _first(chosen, rows)
        words += f", {first + 1}-{min(shown, first + rows)} shown"
    elif shown < picture.members_total:
        words += f", {shown} known"
    return f"{words}) {chosen.order.value}"


def _first(chosen: Chosen, rows: int) -> int:
    return max(0, min(chosen.first, len(chosen.picture.members) - rows))


def _letters(picture: SwarmPicture) -> dict[str, str]:
    """Give each member a letter, by its work, whatever the order on the screen."""
    return {member.row.peer: letter for member, letter in zip(picture.members, LETTERS, strict=False)}


def _member_lines(chosen: Chosen, rows: int, width: int) -> list[Text]:
    members = ordered(chosen)
    if not members:
        return [Text("nobody says who is here", style="dim")]
    letters, first = _letters(chosen.picture), _first(chosen, rows)
    return [_member_line(m, letters.get(m.row.peer, " "), width) for m in members[first : first + rows]]


def _member_line(member: MemberRow, letter: str, width: int) -> Text:
    row = member.row
    seen = "-" if member.age_s is None else duration(member.age_s)
    figures = (
        f"{letter} {fit(row.name or '-', 12)} …{short_peer(row.peer):<6} {count(row.tokens_per_s):>5} tok/s "
    )
    if width >= WIDE:
        figures += f"loss {loss_text(row.loss):>5} step {row.inner_step:<6} "
    figures += f"{seen:>6} "
    office = f"syncer of {row.offices}" if row.offices else ""
    trouble = trouble_text(member)
    words = ", ".join(word for word in (trouble, office) if word)
    style = "red" if silent(member) else "yellow" if trouble else ""
    return Text(fit(f"{figures} {words}", width).rstrip(), style=style)


def _strip(picture: SwarmPicture, width: int) -> list[Text]:
    """Draw fragments, a column each: what goes on, and whose it is."""
    fragments, letters = picture.fragments, _letters(picture)
    words = f"fragments ({len(fragments)}), versions {versions_text(fragments)}{groups_text(fragments)}"
    lines = [title(words, width)]
    if not fragments:
        return [*lines, Text("no state yet", style="dim")]
    label = f"{fragments[-1].index}"
    cells = max(1, width - len(label) - 1)
    newest = max(row.number for row in fragments)
    shown = min(MOST_STRIP // 2, math.ceil(len(fragments) / cells))
    for part in range(shown):
        rows = fragments[part * cells : (part + 1) * cells]
        states, syncers = Text(f"{rows[0].index:>{len(label)}} "), Text(" " * (len(label) + 1))
        for row in rows:
            sign = _sign(row)
            style = "bold red" if sign == "!" else "yellow" if row.number < newest - 1 else "cyan"
            states.append(sign, style if sign != "·" or style == "yellow" else "dim")
            syncers.append(letters.get(row.syncer, "?" if row.syncer else " "), "dim")
        lines += [states, syncers]
    left = len(fragments) - shown * cells
    return [*lines, Text(f"and {left} more", style="dim")] if left > 0 else lines


def _sign(row: FragmentRow) -> str:
    if not row.syncer:
        return "!"
    word = row.state.partition(" ")[0]
    return SIGNS.get(word, "*")

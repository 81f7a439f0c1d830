"""`p2pdiloco top`: the whole swarm, live, as several members see it.

A visit goes on until somebody has seen enough. `AskedMembers` asks a few members in turn, each as often as
its budget for strangers allows (`daemon.budgets`), so none ever refuses. A member that does not answer is
replaced by another one that the DHT lists. `SwarmPicture` puts the answers together, `Happenings` are
sentences from what changed between two pictures, and `SwarmView` draws.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import string
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from statistics import median_high
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace
from rich.console import Console
from rich.text import Text

from p2pdiloco.cli.status_command import Search, at_home, visit, visiting, with_owners_rows
from p2pdiloco.config.settings import TopSettings, WatchSettings
from p2pdiloco.daemon.budgets import LISTING_S, REPORT_BYTES
from p2pdiloco.daemon.display import logs
from p2pdiloco.daemon.display.snapshot import (
    FragmentRow,
    NodeState,
    PeerRow,
    StatusReport,
    count,
    duration,
    fit,
    folded,
    loss_text,
    mean_loss,
    owner_text,
    progress_text,
    proposed_text,
    ranges,
    short_peer,
    sparkline,
)
from p2pdiloco.daemon.display.terminal import (
    HELP,
    OLD_S,
    Keys,
    LinesView,
    LiveView,
    Move,
    age_text,
    groups_text,
    packed,
    peer_names,
    role_text,
    suspend,
    title,
    told_apart,
    versions_text,
)
from p2pdiloco.daemon.network.discovery import ask_status
from p2pdiloco.errors import RemoteError, TransportError, clean
from p2pdiloco.ports import Transport
from p2pdiloco.util import Frozen, Now

# The visit.

PERIOD_S = 0.25
VIEW_OLD_S = 8.0
"""Age of the newest answer from which on it is said that nobody answers."""


def run(settings: TopSettings) -> int:
    """Show the swarm until told to stop. Returns the exit status.

    Raises:
        UserError: as `status_command.run`.
    """
    complete = None if settings.join else partial(with_owners_rows, folder=settings.data_dir)
    settings = at_home(settings)
    lives = sys.stdout.isatty() and not Console().is_dumb_terminal
    if lives:
        logs.install()  # a terminal that takes nothing must not keep us from ending
    try:
        visit(_top(settings, _live if lives else _plain, complete))
    except BrokenPipeError:  # whoever read has seen enough
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return 0


def silence_text(picture: SwarmPicture) -> str:
    """Word that nobody answers any more; empty: somebody does."""
    if picture.age_s <= VIEW_OLD_S:
        return ""
    return f"nobody has answered for {duration(picture.age_s)}: looking for members"


Complete = Callable[[StatusReport], StatusReport]
Show = Callable[["AskedMembers", TopSettings], Coroutine[None, None, None]]


async def _top(settings: TopSettings, show: Show, complete: Complete | None = None) -> None:
    async with asked_members(settings, complete) as (transport, asked), asked.watched(transport):
        await show(asked, settings)


@asynccontextmanager
async def asked_members(
    settings: WatchSettings, complete: Complete | None = None
) -> AsyncIterator[tuple[Transport, AskedMembers]]:
    """Visit a run: the transport, and the members to ask, of whom one has answered. Raises: as `visiting`."""
    async with visiting(settings.join, settings.run, settings.timeout_s) as (transport, search, report):
        asked = AskedMembers(search, report.run_id, time.monotonic, complete)
        asked.take(report)
        yield transport, asked


async def _plain(asked: AskedMembers, settings: TopSettings) -> None:
    """Write a line now and then, and what happens at once."""
    told_s, happenings = -1e18, Happenings(time.monotonic())
    while True:
        picture, lines = happenings.look(asked, time.monotonic())
        if time.monotonic() - told_s >= settings.every_s:
            told_s = time.monotonic()
            lines.append(silence_text(picture) or plain_line(picture))
        clock = time.strftime("%H:%M:%S")
        for line in lines:
            print(clean(f"{clock} {line}"), flush=True)
        await asyncio.sleep(PERIOD_S)


async def _live(asked: AskedMembers, _settings: TopSettings) -> None:
    """Draw, and obey keys, until one of them says to leave."""
    loop = asyncio.get_running_loop()
    console = Console()
    view, keys, happenings = LiveView(console, draw=SwarmView), Keys(), Happenings(time.monotonic())
    chosen = ViewChoice(happenings.look(asked, time.monotonic())[0])
    view.start()
    keys.start()
    loop.add_signal_handler(signal.SIGTSTP, suspend, view, keys)
    try:
        while True:
            picture, _ = happenings.look(asked, time.monotonic())
            chosen = replace(chosen, picture=picture, silence=silence_text(picture))
            for key in told_apart(keys.pressed()):
                if key in ("q", "Q"):
                    return
                if key == "?":
                    view.explain()
                chosen = after_key(chosen, key, *console.size)
            view.update(chosen)
            await asyncio.sleep(PERIOD_S)
    finally:
        loop.remove_signal_handler(signal.SIGTSTP)
        keys.stop()
        view.stop()


def after_key(chosen: ViewChoice, key: Move | str, width: int, height: int) -> ViewChoice:
    """Do what a key says to the list of members."""
    if isinstance(key, Move):
        page = page_rows(chosen.picture, width, height)
        return replace(chosen, first=key.moved(chosen.first, page, len(chosen.picture.members)))
    if key in ("s", "S"):
        orders = list(ORDERS)
        order = orders[(orders.index(chosen.order) + 1) % len(orders)]
        return replace(chosen, order=order, first=0)
    return chosen


# Members that are asked.

WITNESSES = 4
LEAST_S, SHARE = 2.0, 0.5
"""Shortest pause between two questions to one member, and the part of its budget that is used."""
BYTES_PER_S = SHARE * REPORT_BYTES / LISTING_S
LOOK_AGAIN_S, LOOK_SOON_S = 20.0, 3.0
"""Pause between two looks at the list of members; and while witnesses are missing."""
DOUBT_S, MOST_DOUBT_S = 4.0, 60.0
"""Time for which who did not answer is left alone: twice as long each time."""
TICK_S = 0.25
MAX_KNOWN = 256


class HeardReport(Frozen):
    """Word of one member."""

    report: StatusReport
    at_s: float


class _KnownMember(Struct):
    """State of a member that can be asked."""

    addresses: tuple[str, ...] = ()
    next_s: float = 0.0
    doubt_s: float = DOUBT_S
    is_asked: bool = False
    why: str = ""
    """Reason why it does not answer; empty: it does, or was not asked."""


@dataclass
class AskedMembers:
    """Members that are asked, and what they said last."""

    _search: Search
    _run: str
    """Id of the run."""
    _now: Now
    _complete: Complete | None = None
    """Adds what only the owner of the node here may know; it blocks."""

    def __post_init__(self) -> None:
        self._known = {peer: _KnownMember() for peer in self._search.joined}
        self._chosen: list[str] = []
        self._look_s = 0.0
        self.answers: dict[str, HeardReport] = {}
        """Last answers, of those too that do not answer any more."""

    @property
    def silent(self) -> dict[str, str]:
        """Members that answered once and do not now, and why."""
        return {peer: self._known[peer].why for peer in self.answers if self._known[peer].why}

    def take(self, report: StatusReport, size_bytes: int = 0) -> None:
        """Take an answer in."""
        peer, now = report.answered_by, self._now()
        known = self._known.setdefault(peer, _KnownMember())
        pause_s = max(LEAST_S, size_bytes / BYTES_PER_S) * random.uniform(1.0, 1.3)  # each at its own time
        known.next_s, known.why, known.doubt_s = now + pause_s, "", DOUBT_S
        self.answers[peer] = HeardReport(report, now)
        if peer not in self._chosen:
            self._chosen.append(peer)

    @asynccontextmanager
    async def watched(self, transport: Transport) -> AsyncIterator[None]:
        """Ask meanwhile."""
        watching = asyncio.create_task(self.watch(transport))
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def watch(self, transport: Transport) -> None:
        """Ask for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                if self._now() >= self._look_s:
                    self._look_s = self._now() + LOOK_AGAIN_S
                    group.create_task(self._look(transport))
                for peer in self._due():
                    self._known[peer].is_asked = True
                    group.create_task(self._ask(transport, peer))
                await asyncio.sleep(TICK_S)

    def _due(self) -> list[str]:
        """Choose whom to ask now: the witnesses, in place of those that fail others that may be asked."""
        now = self._now()
        self._chosen = [peer for peer in self._chosen if not self._known[peer].why]
        free = [
            peer
            for peer, known in self._known.items()
            if peer not in self._chosen and not known.is_asked and now >= known.next_s
        ]
        # Those that failed come last.
        free.sort(key=lambda peer: bool(self._known[peer].why))
        asked = sum(known.is_asked for peer, known in self._known.items() if peer not in self._chosen)
        more = free[: max(0, WITNESSES - len(self._chosen) - asked)]
        due = [p for p in self._chosen if not self._known[p].is_asked and now >= self._known[p].next_s]
        return [*due, *more]

    async def _ask(self, transport: Transport, peer: str) -> None:
        known = self._known[peer]
        try:
            if known.addresses:
                await transport.connect(peer, known.addresses)
            report, size_bytes = await ask_status(transport, peer, self._run)
            if self._complete is not None and peer in self._search.joined:
                report = await asyncio.to_thread(self._complete, report)
            self.take(report, size_bytes)
        except (RemoteError, TransportError) as error:
            # What p2pd says of a dial is longer than a line, and tells nobody more.
            known.why = "not reached" if isinstance(error, TransportError) else str(error)[:120]
            known.next_s = self._now() + known.doubt_s
            known.doubt_s = min(2 * known.doubt_s, MOST_DOUBT_S)
            self._look_s = min(self._look_s, self._now() + LOOK_SOON_S)
        finally:
            known.is_asked = False

    async def _look(self, transport: Transport) -> None:
        with suppress(TransportError):
            for peer, addresses in (await self._search.members(transport, self._run)).items():
                if peer in self._known or len(self._known) < MAX_KNOWN:
                    self._known.setdefault(peer, _KnownMember()).addresses = addresses


# The picture.

KEEP_S = 20.0
"""Age from which an answer says nothing of others any more."""
MOST_HISTORY = 120


class MemberRow(PeerRow, frozen=True, kw_only=True):
    """Row of one member, as whoever heard of it last has it."""

    state: NodeState | None = None
    """State by its own word; None: it was not asked."""
    behind: int | None = None
    """Versions that it is behind, of all fragments together; None: it was not asked."""


class SwarmPicture(StatusReport, frozen=True, kw_only=True):
    """Picture of a run at one moment: the newest report, with what others and the past add to it."""

    members: tuple[MemberRow, ...] = ()
    """Members, those that worked most first."""
    asked: tuple[str, ...] = ()
    """Peers whose answers these are."""
    age_s: float = 0.0
    """Age of the newest answer."""
    loss_history: tuple[float, ...] = ()
    merged_age_s: float | None = None
    """Time since the newest version came, as far as it was watched; None: none came yet."""
    watched_s: float = 0.0
    happened: tuple[str, ...] = ()
    """Sentences on what happened, oldest first."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the members that are shown train on in a second."""
        return sum(member.tokens_per_s for member in self.members)

    @property
    def waiting(self) -> str:
        """Words on seats that wait for the word of the run's owner, if it looks from its own node."""
        return proposed_text(self.proposed, self.run_name)


def picture_of(answers: Mapping[str, HeardReport], now: float) -> SwarmPicture:
    """Put answers together, one or more.

    What a member says of itself counts before what others say of it, and newer before older. A member that
    one of those asked calls expelled is shown so. Anybody can claim to be a member: of three or more that say
    how far a fragment is, the one that claims most is not believed.
    """
    ordered = sorted(answers.values(), key=lambda answer: -answer.at_s)
    fresh = [answer for answer in ordered if now - answer.at_s <= KEEP_S] or ordered[:1]
    reports = [answer.report for answer in fresh]
    fragments = _fragments(reports)
    members = _members(fresh, fragments, now)
    measured = [r for r in reports if r.heldout_loss is not None]
    heldout = min(measured, key=lambda r: r.heldout_age_s or 0.0, default=reports[0])
    found = asdict(reports[0]) | {
        "members": members,
        "members_total": max(len(members), median_high(report.members_total for report in reports)),
        "fragments": fragments,
        "run_tokens": sum(row.tokens for row in fragments) // max(1, len(fragments)),
        "run_versions": sum(row.number for row in fragments),
        "loss": mean_loss(member for member in members if member.confirmed),
        "heldout_loss": heldout.heldout_loss,
        "heldout_age_s": heldout.heldout_age_s,
        "proposed": next((report.proposed for report in reports if report.proposed), ()),
    }
    asked = tuple(report.answered_by for report in reports)
    return SwarmPicture(**found, asked=asked, age_s=now - fresh[0].at_s)


def _fragments(reports: Sequence[StatusReport]) -> tuple[FragmentRow, ...]:
    rows: dict[int, list[tuple[FragmentRow, StatusReport]]] = {}
    for report in reports:
        for row in report.fragments:
            rows.setdefault(row.index, []).append((row, report))
    return tuple(_fragment(rows[index]) for index in sorted(rows))


def _fragment(rows: Sequence[tuple[FragmentRow, StatusReport]]) -> FragmentRow:
    """Choose the newest, but not what one of three claims alone; a round is as its syncer says."""
    ordered = sorted(rows, key=lambda pair: (-pair[0].tokens, -pair[0].number))
    row = ordered[1 if len(ordered) >= 3 else 0][0]
    own = next((other for other, report in rows if report.answered_by == row.syncer), None)
    state = own.state if own is not None and own.syncer == row.syncer else row.state
    return replace(row, state=state, pending="")


def _members(
    answers: Sequence[HeardReport], fragments: Sequence[FragmentRow], now: float
) -> tuple[MemberRow, ...]:
    heads = {row.index: row.number for row in fragments}
    found: dict[str, MemberRow] = {}
    for answer in answers:
        age = now - answer.at_s
        for row in answer.report.members:
            if row.peer == answer.report.answered_by:
                continue
            seen = None if row.last_seen_s is None else row.last_seen_s + age
            other = found.get(row.peer)
            if other is None or _older(other) > (inf if seen is None else seen):
                found[row.peer] = MemberRow(**asdict(row) | {"last_seen_s": seen})
    for answer in answers:
        report, age = answer.report, now - answer.at_s
        for row in report.members:
            if row.peer == report.answered_by:
                lag = sum(max(0, heads.get(head.index, 0) - head.number) for head in report.fragments)
                seen = min(age, _older(found[row.peer])) if row.peer in found else age
                own = asdict(row) | {"last_seen_s": seen}
                found[row.peer] = MemberRow(**own, state=report.state, behind=lag)
    for row in (row for answer in answers for row in answer.report.members if row.expelled is not None):
        found[row.peer] = replace(found[row.peer], expelled=row.expelled)
    return tuple(sorted(found.values(), key=lambda m: (-m.tokens_total, m.peer)))


def _older(member: MemberRow) -> float:
    return inf if member.last_seen_s is None else member.last_seen_s


# Happenings.

SILENT_S = 5.0
"""Silence from which on a member is said to be silent. Members count on nobody any more after three."""
MOST_HAPPENINGS = 200


def is_silent(member: MemberRow) -> bool:
    """Tell whether nobody has heard of a member for long."""
    return member.last_seen_s is not None and member.last_seen_s > SILENT_S


class Happenings:
    """Sentences on what changed, with the time; and what was watched over time."""

    def __init__(self, now: float) -> None:
        self._began_s = now
        self._before: SwarmPicture | None = None
        self._names: dict[str, str] = {}
        self._lines: deque[str] = deque(maxlen=MOST_HAPPENINGS)
        self._losses: list[float] = []
        self._merged_s: float | None = None
        self._silent: dict[str, str] = {}

    def look(self, asked: AskedMembers, now: float) -> tuple[SwarmPicture, list[str]]:
        """Take a picture; list what is new since the last look."""
        picture = picture_of(asked.answers, now)
        new = self.add(picture, asked.silent, now)
        return self.told(picture, now), new

    def add(self, picture: SwarmPicture, silent_witnesses: Mapping[str, str], now: float) -> list[str]:
        """Take a picture in; list the sentences on what is new."""
        self._names |= peer_names("", "-", picture.members)
        before, self._before = self._before, picture
        new = list(self._changes(before, picture)) if before is not None else []
        for peer in silent_witnesses.keys() - self._silent.keys():
            new.append(f"{self._name(peer)} does not answer us: {clean(silent_witnesses[peer])}")
        for peer in self._silent.keys() - silent_witnesses.keys():
            new.append(f"{self._name(peer)} answers us again")
        self._silent = dict(silent_witnesses)
        if before is not None and picture.run_versions > before.run_versions:
            self._merged_s = now - picture.age_s
        if picture.loss is not None and (before is None or picture.run_versions != before.run_versions):
            self._losses = [*self._losses, picture.loss][-MOST_HISTORY:]
        clock = time.strftime("%H:%M:%S")
        self._lines.extend(f"{clock} {text}" for text in new)
        return new

    def told(self, picture: SwarmPicture, now: float) -> SwarmPicture:
        """Make the picture with what was watched over time."""
        return replace(
            picture,
            happened=tuple(self._lines),
            loss_history=tuple(self._losses),
            merged_age_s=None if self._merged_s is None else now - self._merged_s,
            watched_s=now - self._began_s,
        )

    def _name(self, peer: str) -> str:
        return self._names.get(peer) or short_peer(peer)

    def _changes(self, before: SwarmPicture, now: SwarmPicture) -> Iterator[str]:
        yield from self._of_members(before, now)
        yield from self._of_offices(before, now)
        if now.course.rests != before.course.rests:
            words = {"no": "the run goes on", "paused": "the run is paused", "ended": "the run has ended"}
            yield words[now.course.rests]
        if (owner := owner_text(now.course)) and owner != owner_text(before.course):
            yield owner

    def _of_members(self, before: SwarmPicture, now: SwarmPicture) -> Iterator[str]:
        old = {member.peer: member for member in before.members}
        here = {member.peer: member for member in now.members}
        for peer, member in here.items():
            name, earlier = self._name(peer), old.get(peer)
            if earlier is None:
                yield f"{name} is here" + ("" if member.confirmed else ", catching up")
                continue
            if is_silent(member) and not is_silent(earlier):
                yield f"{name} is silent, for {duration(member.last_seen_s)}"
            elif is_silent(earlier) and not is_silent(member):
                yield f"{name} is heard again"
            if member.confirmed and not earlier.confirmed:
                yield f"{name} is a full member"
            if member.votes != earlier.votes:
                yield f"{name} {'can save votes again' if member.votes else 'cannot save: no vote'}"
            if member.state != earlier.state and None not in (member.state, earlier.state):
                yield f"{name}: {member.state}"
        for peer in old.keys() - here.keys():
            yield f"{self._name(peer)} is gone"

    def _of_offices(self, before: SwarmPicture, now: SwarmPicture) -> Iterator[str]:
        old = {row.index: row for row in before.fragments}
        moved: dict[tuple[str, str], list[int]] = {}
        for row in now.fragments:
            earlier = old.get(row.index)
            if earlier is not None and earlier.syncer != row.syncer:
                moved.setdefault((earlier.syncer, row.syncer), []).append(row.index)
        for (was, syncer), indices in moved.items():
            which = f"fragment{'s' if len(indices) > 1 else ''} {ranges(indices)}"
            if not syncer:
                yield f"{which}: the office of {self._name(was)} is open, an election is due"
            elif was:
                yield f"{which}: {self._name(syncer)} is syncer, after {self._name(was)}"
            else:
                yield f"{which}: {self._name(syncer)} was elected syncer"


# Terminal view: pure functions of a `SwarmPicture` and of what a person chose to see.

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


ORDERS: dict[str, Callable[[MemberRow], Any]] = {
    "by work": lambda member: (-member.tokens_total, member.peer),
    "trouble first": lambda member: (not is_silent(member), not member.behind, not trouble_text(member)),
    "by speed": lambda member: -member.tokens_per_s,
    "by name": lambda member: (_name(member).lower(), member.peer),
}
"""Orders of the list of members, each with what it goes by."""


class ViewChoice(Frozen):
    """Choice of a person: what to see of the picture."""

    picture: SwarmPicture
    order: str = "by work"
    first: int = 0
    """First member that is shown."""
    silence: str = ""
    """Words on why nothing is new; empty: it is."""


def swarm_lines(chosen: ViewChoice, width: int, height: int) -> list[Text]:
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


SwarmView = partial(LinesView, swarm_lines, EXPLAINED)
"""View of a `ViewChoice`, or what its words mean."""


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
    if picture.waiting:
        parts.append(picture.waiting)
    trouble = [f"{_name(member)} {words}" for member in picture.members if (words := trouble_text(member))]
    if trouble:
        parts.append(f"not well: {', '.join(trouble[:8])}" + (" and others" if len(trouble) > 8 else ""))
    return "  ".join(parts)


def trouble_text(member: MemberRow) -> str:
    """Word what keeps a member from more, and how far it is behind; empty: nothing."""
    words = [f"silent {duration(member.last_seen_s)}"] if is_silent(member) else []
    if member.last_seen_s is None:
        words.append("never heard")
    if member.state not in (None, "training", "catching up"):
        words.append(str(member.state))
    if member.behind:
        words.append(f"{member.behind} behind")
    roles = [word for word in role_text(member).split(", ") if word and "syncer of" not in word]
    if member.state is not None and "not training" in roles:
        roles.remove("not training")
    if member.reach not in ("", "direct"):
        roles.append(clean(member.reach))
    return ", ".join(words + roles)


def _name(member: MemberRow) -> str:
    return clean(member.name) or f"…{short_peer(member.peer)}"


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
        Text(picture.waiting, "yellow"),
        Text(clean(silence), "bold red"),
    ]
    return [part for part in parts if part.plain]


def _members_title(chosen: ViewChoice, rows: int) -> str:
    picture, shown = chosen.picture, len(chosen.picture.members)
    words = f"members ({picture.members_total}"
    if rows < shown:
        first = _first(chosen, rows)
        words += f", {first + 1}-{min(shown, first + rows)} shown"
    elif shown < picture.members_total:
        words += f", {shown} known"
    return f"{words}) {chosen.order}"


def _first(chosen: ViewChoice, rows: int) -> int:
    return max(0, min(chosen.first, len(chosen.picture.members) - rows))


def _letters(picture: SwarmPicture) -> dict[str, str]:
    """Give each member a letter, by its work, whatever the order on the screen."""
    return {member.peer: letter for member, letter in zip(picture.members, LETTERS, strict=False)}


def _member_lines(chosen: ViewChoice, rows: int, width: int) -> list[Text]:
    members = sorted(chosen.picture.members, key=ORDERS[chosen.order])
    if not members:
        return [Text("nobody says who is here", style="dim")]
    letters, first = _letters(chosen.picture), _first(chosen, rows)
    return [_member_line(m, letters.get(m.peer, " "), width) for m in members[first : first + rows]]


def _member_line(member: MemberRow, letter: str, width: int) -> Text:
    seen = "-" if member.last_seen_s is None else duration(member.last_seen_s)
    figures = f"{letter} {fit(member.name or '-', 12)} …{short_peer(member.peer):<6} "
    figures += f"{count(member.tokens_per_s):>5} tok/s "
    if width >= WIDE:
        figures += f"loss {loss_text(member.loss):>5} step {member.inner_step:<6} "
    figures += f"{seen:>6} "
    office = f"syncer of {member.offices}" if member.offices else ""
    trouble = trouble_text(member)
    words = ", ".join(word for word in (trouble, office) if word)
    style = "red" if is_silent(member) else "yellow" if trouble else ""
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
            sign = SIGNS.get(row.state.partition(" ")[0], "*") if row.syncer else "!"
            style = "bold red" if sign == "!" else "yellow" if row.number < newest - 1 else "cyan"
            states.append(sign, style if sign != "·" or style == "yellow" else "dim")
            syncers.append(letters.get(row.syncer, "?" if row.syncer else " "), "dim")
        lines += [states, syncers]
    left = len(fragments) - shown * cells
    return [*lines, Text(f"and {left} more", style="dim")] if left > 0 else lines

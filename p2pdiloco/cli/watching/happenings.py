"""Happenings in a swarm: sentences from what changed between two pictures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping

from msgspec import structs

from p2pdiloco.cli.watching.picture import MOST_HISTORY, MemberRow, SwarmPicture
from p2pdiloco.daemon.display.snapshot import duration, owner_text, ranges, short_peer
from p2pdiloco.daemon.display.terminal import peer_names
from p2pdiloco.errors import clean

SILENT_S = 5.0
"""Silence from which on a member is said to be silent. Members count on nobody any more after three."""
MOST = 200


def silent(member: MemberRow) -> bool:
    """Tell whether nobody has heard of a member for long."""
    return member.age_s is not None and member.age_s > SILENT_S


class Happenings:
    """Sentences on what changed, with the time; and what was watched over time."""

    def __init__(self, now: float) -> None:
        self._began_s = now
        self._before: SwarmPicture | None = None
        self._names: dict[str, str] = {}
        self._lines: deque[str] = deque(maxlen=MOST)
        self._losses: list[float] = []
        self._merged_s: float | None = None
        self._silent: dict[str, str] = {}

    def add(self, picture: SwarmPicture, silent_witnesses: Mapping[str, str], now: float) -> list[str]:
        """Take a picture in; list the sentences on what is new."""
        rows = [member.row for member in picture.members]
        self._names |= peer_names("", "-", rows)
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
        return structs.replace(
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
        old = {member.row.peer: member for member in before.members}
        here = {member.row.peer: member for member in now.members}
        for peer, member in here.items():
            name, earlier = self._name(peer), old.get(peer)
            if earlier is None:
                yield f"{name} is here" + ("" if member.row.confirmed else ", catching up")
                continue
            if silent(member) and not silent(earlier):
                yield f"{name} is silent, for {duration(member.age_s)}"
            elif silent(earlier) and not silent(member):
                yield f"{name} is heard again"
            if member.row.confirmed and not earlier.row.confirmed:
                yield f"{name} is a full member"
            if member.row.votes != earlier.row.votes:
                yield f"{name} {'can save votes again' if member.row.votes else 'cannot save: no vote'}"
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

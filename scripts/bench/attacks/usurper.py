"""An admitted member that wants all offices: with heads that it does not have, requests for all votes, and no
version; or by its own vote alone, with versions of its own work."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from msgspec import structs

from p2pdiloco.core.api.messages import Progress, VoteRequest
from p2pdiloco.core.api.types import Head
from p2pdiloco.core.context import Electorate
from p2pdiloco.core.election import Office, Turn
from p2pdiloco.core.membership import Heartbeats
from p2pdiloco.core.publisher import Publisher
from p2pdiloco.core.voting import Candidacy, VoteJudge

FAR_AHEAD = 1000
MORE_TOKENS = 10**7
ASK_S = 0.25
STAND_S = 0.5


def above(head: Head) -> Head:
    """Make a heavier head that nobody has."""
    return Head(head.number + FAR_AHEAD, os.urandom(32), head.tokens + MORE_TOKENS, head.term)


def usurp(lies: Callable[[str], bool], boasts: bool) -> None:
    """Put this into the process; `lies` tells whether it has begun. `boasts`: it asks for offices that are
    held, too, with heads that it does not have."""
    progress, request, why_open = Heartbeats.progress, Candidacy.request, Office.why_open
    look, grants, begin = Turn.look, VoteJudge.grants, Publisher.begin
    asked: dict[int, float] = {}

    def false_progress(self: Heartbeats) -> Progress:
        said = progress(self)
        if not lies("heartbeats"):
            return said
        return structs.replace(said, heads=tuple((index, above(head)) for index, head in said.heads))

    def false_request(self: Candidacy) -> VoteRequest:
        said = request(self)
        return structs.replace(said, head=above(said.head)) if lies("candidacies") else said

    def always_open(self: Office, now: float, candidate: str = "") -> str:
        return "mine" if lies("looks") and not self.holding else why_open(self, now, candidate)

    def my_turn(self: Turn, waits: bool, now: float) -> bool:
        if not lies("turns"):
            return look(self, waits, now)
        self.due_s = asked.get(id(self), 0.0) + ASK_S
        if now < self.due_s:
            return False
        asked[id(self)] = now
        return True

    def no_vote(self: VoteJudge, *request: Any) -> bool:
        return False if lies("votes refused") else grants(self, *request)

    def no_version(self: Publisher, *job: Any) -> None:
        if not lies("rounds"):
            begin(self, *job)

    patches: list[tuple[type, str, Any]] = [(Turn, "look", my_turn), (VoteJudge, "grants", no_vote)]
    patches.append((Publisher, "begin", no_version))
    if boasts:
        patches += [(Heartbeats, "progress", false_progress), (Candidacy, "request", false_request)]
        patches.append((Office, "why_open", always_open))
    for owner, name, value in patches:
        setattr(owner, name, value)


def elect_itself(lies: Callable[[str], bool]) -> None:
    """Hold all offices by its own vote, asked of nobody else; `lies` tells whether it has begun."""
    why_open, look, won = Office.why_open, Turn.look, Candidacy.won
    asked, reachable = Electorate.asked, Electorate.reachable

    def always_open(self: Office, now: float, candidate: str = "") -> str:
        return "mine" if lies("looks") and not self.holding else why_open(self, now, candidate)

    def my_turn(self: Turn, waits: bool, now: float) -> bool:
        mine = look(self, waits, now)
        if lies("turns"):
            self.due_s = now + STAND_S
        return mine or lies("turns")

    def elected(self: Candidacy, now: float) -> bool:
        return bool(self.votes) if lies("offices") else won(self, now)

    def nobody(self: Electorate, now: float) -> Any:
        return [] if lies("unasked") else asked(self, now)

    def alone(self: Electorate, now: float) -> int:
        return 1 if lies("counts") else reachable(self, now)

    patches: list[tuple[type, str, Any]] = [(Office, "why_open", always_open), (Turn, "look", my_turn)]
    patches += [(Candidacy, "won", elected), (Electorate, "asked", nobody), (Electorate, "reachable", alone)]
    for owner, name, value in patches:
        setattr(owner, name, value)

"""One member of ten with modified code, which tells no lie that can be proved: what it takes from others."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from sim_kit import Commits, calm_plan

from p2pdiloco.core.api.effects import CommitVersion, Effect
from p2pdiloco.core.api.messages import Message, Progress
from p2pdiloco.core.election.turn import Turn
from p2pdiloco.lab.simulation.node.host import Host
from p2pdiloco.lab.simulation.world.withholder import Kept, Withholder
from p2pdiloco.lab.simulation.world.world import World

FROM_S = 20.0
LIAR, VICTIM = "n9", "n0"
TOLD = frozenset(f"n{number}" for number in range(5))
"""Those to whom it says that it does not vote. So they count nine voters, and the other four count ten."""


class TwoFaces(Withholder):
    """Member with a face for each half of the others; it withholds nothing."""

    def __init__(self, face: dict[str, Any]) -> None:
        super().__init__(Kept.WORK, from_s=1e9)
        self._face, self._now = face, 0.0

    def sees(self, host: Host, effect: Effect) -> None:
        self._now = host.now

    def says(self, peer: str, message: Message) -> Message:
        lies = peer in TOLD and self._now >= FROM_S and isinstance(message, Progress)
        return replace(message, **self._face) if lies else message


class Seen:
    """What was made, and merged, while it lied."""

    def __init__(self, liar: Withholder, until_s: float, act: Callable[[Host, Effect], None]) -> None:
        plan = calm_plan(10, until_s=until_s, seed=8)
        world = World(dataclasses.replace(plan, config=msgspec.structs.replace(plan.config, group_size=64)))
        world.perjurers[LIAR] = liar
        self.made, self.merged, self._until_s = Counter[str](), Counter[str](), until_s
        self._seen: set[bytes] = set()
        self._do, commits = act, Commits(world)
        commits.act = self._act
        result = world.run()
        assert result.ok, result.detail or result.stuck

    def _act(self, host: Host, effect: Effect) -> None:
        self._do(host, effect)
        if not isinstance(effect, CommitVersion) or not FROM_S + 5.0 < host.now < self._until_s:
            return
        header = effect.version.header
        if header.digest() not in self._seen:
            self._seen.add(header.digest())
            self.made[header.syncer] += 1
            self.merged.update(part.learner for part in header.contributors)


@pytest.mark.parametrize("face", [{"votes": False, "stands": False}, {"confirmed": False}])
def test_who_says_to_some_that_it_does_not_vote_keeps_the_others_out_of_no_round(
    face: dict[str, Any],
) -> None:
    """Of nine voters five are a majority, and of ten they are none."""
    merged = Seen(TwoFaces(face), 60.0, lambda _host, _effect: None).merged
    del merged[LIAR]
    assert len(merged) == 9 and min(merged.values()) > 0.75 * max(merged.values()), merged


@pytest.mark.parametrize("again", [False, True])
def test_who_stands_out_of_turn_does_not_keep_a_learner_out_for_ever(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands whenever an office is open, whatever its rank is, and pauses for nobody. `again`: it asks for
    its own office again after each version, before the term is over."""
    look = Turn.look

    def hurried(self: Turn, waits: bool, now: float) -> bool:
        if self._shared.me != LIAR or waits:
            return look(self, waits, now)
        self.due_s = now
        return True

    def act(host: Host, effect: Effect) -> None:
        if again and host.peer == LIAR and isinstance(effect, CommitVersion):
            host.core.fragments[effect.version.header.fragment].office.lay_down("it wants a new term")

    monkeypatch.setattr(Turn, "look", hurried)
    seen = Seen(Withholder(Kept.WORK, VICTIM, from_s=FROM_S), 100.0, act)
    versions = seen.made.total()
    assert 0 < seen.made[LIAR] < 0.4 * versions, "before, more than nine of ten"
    assert seen.merged[VICTIM] > 0.6 * versions, "before, one of ten"

"""Syncers that withhold, and one member of ten with other modified code, none of whose lies can be proved: it
costs a bounded time, and no work of anybody."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from sim_kit import Commits, calm_plan, played_well

from p2pdiloco.core.api.events import CommitVersion, Effect, Record
from p2pdiloco.core.api.messages import Message, Progress
from p2pdiloco.core.contributions import LEFT_OUT
from p2pdiloco.core.election import Turn
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_liars import WithheldKind, Withholder
from p2pdiloco_lab.simulation.sim_world import World

pytestmark = pytest.mark.long

UNTIL_S = 70.0
FROM_S = 15.0
LIAR, VICTIM = "n1", "n0"


class Seen:
    """What happened in a calm world of five, one of which withholds when it is a syncer."""

    def __init__(self, kind: WithheldKind | None, term_versions: int, seed: int = 8) -> None:
        plan = calm_plan(5, until_s=UNTIL_S, seed=seed)
        config = msgspec.structs.replace(plan.config, group_size=64, term_versions=term_versions)
        world = World(dataclasses.replace(plan, config=config))
        self.liar = Withholder(kind, (VICTIM,), FROM_S) if kind is not None else None
        if self.liar is not None:
            world.perjurers[LIAR] = self.liar
        self.made: list[tuple[float, str]] = []
        self.suspicions: list[tuple[str, str]] = []
        commits = Commits(world, self._act)
        played_well(world)  # nothing lost, nothing twice, all merged in the end
        first: dict[tuple[int, int], float] = {}
        for at_s, peer, fragment, number in commits.seen:
            if peer != LIAR and at_s < UNTIL_S:
                first.setdefault((fragment, number), at_s)
        times = [sorted(at_s for (f, _), at_s in first.items() if f == fragment) for fragment in range(2)]
        self.longest_s = max(after - before for each in times for before, after in itertools.pairwise(each))

    def _act(self, host: Host, effect: Effect) -> None:
        if isinstance(effect, Record) and effect.kind == "publish":
            self.made.append((host.now, host.peer))
        if isinstance(effect, Record) and effect.kind == "suspicion":
            self.suspicions.append((host.peer, effect.reason))

    def made_by_the_liar(self) -> int:
        """Versions that it made since it withholds."""
        return sum(peer == LIAR and at_s > FROM_S for at_s, peer in self.made)


def test_a_syncer_that_gives_its_versions_to_nobody_costs_one_patience() -> None:
    calm, seen = Seen(None, 6), Seen(WithheldKind.VERSIONS, 6)
    assert seen.made_by_the_liar() and calm.longest_s < 4.0
    assert seen.longest_s < calm.longest_s + 7.0, "5 s of patience, and an election"
    assert len(seen.made) > 0.85 * len(calm.made)


def test_a_learner_whose_work_is_left_out_finds_that_and_loses_nothing() -> None:
    seen = Seen(WithheldKind.WORK, 16)
    assert seen.liar is not None and seen.liar.swallowed > 2 and seen.made_by_the_liar() > 4
    assert (VICTIM, LEFT_OUT) in seen.suspicions
    assert {peer for peer, why in seen.suspicions if why == LEFT_OUT} == {VICTIM}
    assert seen.longest_s < 5.0, "the others do not wait"


# --- one of ten ---------------------------------------------------------------------------------------------

SINCE_S = 20.0
TENTH = "n9"
TOLD = frozenset(f"n{number}" for number in range(5))
"""Those to whom it says that it does not vote. So they count nine voters, and the other four count ten."""


class TwoFaces(Withholder):
    """Member with a face for each half of the others; it withholds nothing."""

    def __init__(self, face: dict[str, Any]) -> None:
        super().__init__(WithheldKind.WORK, from_s=1e9)
        self._face, self._now = face, 0.0

    def sees(self, host: Host, effect: Effect) -> None:
        self._now = host.now

    def says(self, peer: str, message: Message) -> Message:
        lies = peer in TOLD and self._now >= SINCE_S and isinstance(message, Progress)
        return replace(message, **self._face) if lies else message


class OfTen:
    """What was made, and merged, while it lied."""

    def __init__(self, liar: Withholder, until_s: float, act: Callable[[Host, Effect], None]) -> None:
        plan = calm_plan(10, until_s=until_s, seed=8)
        world = World(dataclasses.replace(plan, config=msgspec.structs.replace(plan.config, group_size=64)))
        world.perjurers[TENTH] = liar
        self.made, self.merged, self._until_s = Counter[str](), Counter[str](), until_s
        self._seen: set[bytes] = set()
        self._do = act
        world.on_effect = self._act
        played_well(world)

    def _act(self, host: Host, effect: Effect) -> None:
        self._do(host, effect)
        if not isinstance(effect, CommitVersion) or not SINCE_S + 5.0 < host.now < self._until_s:
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
    merged = OfTen(TwoFaces(face), 60.0, lambda _host, _effect: None).merged
    del merged[TENTH]
    assert len(merged) == 9 and min(merged.values()) > 0.75 * max(merged.values()), merged


@pytest.mark.parametrize("again", [False, True])
def test_who_stands_out_of_turn_does_not_keep_a_learner_out_for_ever(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands whenever an office is open, whatever its rank is, and pauses for nobody. `again`: it asks for
    its own office again after each version, before the term is over."""
    look = Turn.look

    def hurried(self: Turn, waits: bool, now: float) -> bool:
        if self._shared.me != TENTH or waits:
            return look(self, waits, now)
        self.due_s = now
        return True

    def act(host: Host, effect: Effect) -> None:
        if again and host.peer == TENTH and isinstance(effect, CommitVersion):
            host.core.fragments[effect.version.header.fragment].office.lay_down("it wants a new term")

    monkeypatch.setattr(Turn, "look", hurried)
    seen = OfTen(Withholder(WithheldKind.WORK, (VICTIM,), SINCE_S), 100.0, act)
    versions = seen.made.total()
    assert 0 < seen.made[TENTH] < 0.4 * versions, "before, more than nine of ten"
    assert seen.merged[VICTIM] > 0.6 * versions, "before, one of ten"

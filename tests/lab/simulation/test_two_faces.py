"""A member that says of itself one thing to some and another to others: it keeps nobody out of a round."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from sim_kit import Commits, calm_plan

from p2pdiloco.core.api.effects import CommitVersion, Effect
from p2pdiloco.core.api.messages import Message, Progress
from p2pdiloco.lab.simulation.node.host import Host
from p2pdiloco.lab.simulation.world.withholder import Kept, Withholder
from p2pdiloco.lab.simulation.world.world import World

UNTIL_S, FROM_S = 60.0, 20.0
LIAR = "n9"
TOLD = frozenset(f"n{number}" for number in range(5))
"""Those to whom it says that it does not vote. So they count nine voters, and the other four count ten."""


class TwoFaces(Withholder):
    """Member with a face for each half of the others; it withholds nothing."""

    def __init__(self, face: dict[str, Any]) -> None:
        super().__init__(Kept.WORK, from_s=2 * UNTIL_S)
        self._face, self._now = face, 0.0

    def sees(self, host: Host, effect: Effect) -> None:
        self._now = host.now

    def says(self, peer: str, message: Message) -> Message:
        lies = peer in TOLD and self._now >= FROM_S and isinstance(message, Progress)
        return replace(message, **self._face) if lies else message


def merged(face: dict[str, Any]) -> Counter[str]:
    """Count the contributions of each honest member that were merged while that member lied."""
    plan = calm_plan(10, until_s=UNTIL_S, seed=8)
    world = World(dataclasses.replace(plan, config=msgspec.structs.replace(plan.config, group_size=64)))
    world.perjurers[LIAR] = TwoFaces(face)
    found, seen, commits = Counter[str](), set[bytes](), Commits(world)

    def act(host: Host, effect: Effect) -> None:
        if isinstance(effect, CommitVersion) and FROM_S + 5.0 < host.now < UNTIL_S:
            header = effect.version.header
            if header.digest() not in seen:
                seen.add(header.digest())
                found.update(part.learner for part in header.contributors)

    commits.act = act
    result = world.run()
    assert result.ok, result.detail or result.stuck
    del found[LIAR]
    return found


@pytest.mark.parametrize("face", [{"votes": False, "stands": False}, {"confirmed": False}])
def test_who_says_to_some_that_it_does_not_vote_keeps_the_others_out_of_no_round(
    face: dict[str, Any],
) -> None:
    """Of nine voters five are a majority, and of ten they are none."""
    found = merged(face)
    assert len(found) == 9 and min(found.values()) > 0.75 * max(found.values()), found

"""Deliberate bugs in who counts, and where the simulator should miss it."""

from __future__ import annotations

from mutation_kit import Patch, mutation
from p2pdiloco.core.members.standing import Standing


@mutation("strangers", 2, 5, "stuck")
def everybody_votes_who_says_so(patch: Patch) -> None:
    patch.set(Standing, "deciding", lambda self, name, peers: peers)


@mutation("strangers", 2, 6, "stuck")
def newcomers_are_waited_for_in_vain_for_ever(patch: Patch) -> None:
    patch.set(Standing, "_attending", lambda self, learners, marks: learners)

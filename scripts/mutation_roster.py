"""Deliberate bugs in who counts, and where the simulator should miss it."""

from __future__ import annotations

from mutation_kit import Patch, mutation
from p2pdiloco.core.context import Electorate
from p2pdiloco.core.fork_choice import ForkChoice
from p2pdiloco.core.roster import Roster


@mutation("strangers", 2, 5, "stuck")
def everybody_votes_who_says_so(patch: Patch) -> None:
    patch.set(Roster, "of", lambda self, name, peers: peers)


@mutation("strangers", 2, 6, "stuck")
def newcomers_are_waited_for_in_vain_for_ever(patch: Patch) -> None:
    patch.set(Electorate, "reachable", lambda self, now: len(self.expected(now)))


@mutation("old", 6, 6, "backed")
def a_state_is_copied_of_whoever_is_ahead(patch: Patch) -> None:
    patch.set(ForkChoice, "may_copy", lambda self, version, giver, now: True)


@mutation("quiet", 8, 10, "kept")
def a_state_is_taken_that_few_of_all_seats_have(patch: Patch) -> None:
    patch.set(ForkChoice, "must_be_tried", lambda self, version: False)

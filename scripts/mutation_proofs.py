"""Deliberate bugs in what is done about lies that can be proved, and where the simulator should miss it."""

from __future__ import annotations

from typing import Any

import msgspec

from mutation_kit import Patch, each_effect, mutation
from p2pdiloco.core import proofs
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.types import signed_bytes
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.context import FalseStates
from p2pdiloco.core.follower import ShownVersions
from p2pdiloco.core.node import Core
from p2pdiloco.core.proofs import Gossip
from p2pdiloco.core.roster import Roster
from p2pdiloco.core.voting import SeenVotes


@mutation("liars", 4, 12, "only-liars")
def two_versions_are_not_compared(patch: Patch) -> None:
    patch.set(ShownVersions, "seen", lambda self, giver, version: None)


@mutation("liars", 4, 12, "only-liars", first_seed=14)
def two_votes_are_not_compared(patch: Patch) -> None:
    patch.set(SeenVotes, "_compare", lambda self, vote, others, giver: False)


@mutation("liars", 4, 6, "only-liars")
def who_finds_a_proof_tells_nobody(patch: Patch) -> None:
    patch.set(proofs, "audience", lambda shared, now: [])
    patch.set(Gossip, "heard", lambda self, sender, message, now: None)
    carry = Roster.to_carry
    patch.set(Roster, "to_carry", lambda self, number, after, proofs: carry(self, number, after, ()))


@mutation("liars", 6, 1, "stuck", first_seed=57)
def a_state_that_differs_is_always_thought_our_own_fault(patch: Patch) -> None:
    judge = FalseStates.judge

    def trusting(self: FalseStates, applied: ev.UpdateApplied, *asked: Any) -> Any:
        return judge(self, msgspec.structs.replace(applied, certain=False), *asked)

    patch.set(FalseStates, "judge", trusting)


@mutation("calm", 3, 2, "one-version")
def a_syncer_saves_two_versions_of_one_parent(patch: Patch) -> None:
    def alter(core: Core, effect: Any) -> list[Any]:
        if not isinstance(effect, ev.Persist) or not isinstance(effect.record, ev.UpdateRecord):
            return [effect]
        version = effect.record.version
        header = msgspec.structs.replace(version.header, state_digest=bytes(32))
        other = SignedVersion(header, core.shared.crypto.sign(signed_bytes("version", header)))
        record = msgspec.structs.replace(effect.record, version=other)
        return [ev.Persist(-1, record, ()), effect]

    each_effect(patch, alter)

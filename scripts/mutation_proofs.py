"""Deliberate bugs in what is done about lies that can be proved, and where the simulator should miss it."""

from __future__ import annotations

from typing import Any

import msgspec

from mutation_kit import Patch, mutation
from p2pdiloco.core import proofs
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.types import signed_bytes
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.follower import Follower
from p2pdiloco.core.proofs import Gossip
from p2pdiloco.core.roster import Roster
from p2pdiloco.core.voting import SeenVotes
from p2pdiloco_lab.simulation.sim_host import DiskWriter


@mutation("liars", 4, 12, "only-liars")
def two_versions_are_not_compared(patch: Patch) -> None:
    patch.set(Follower, "_compare", lambda self, giver, version: None)


@mutation("liars", 4, 12, "only-liars", first_seed=14)
def two_votes_are_not_compared(patch: Patch) -> None:
    patch.set(SeenVotes, "_compare", lambda self, vote, others, giver: False)


@mutation("liars", 4, 2, "only-liars", first_seed=20)
def who_finds_a_proof_tells_nobody(patch: Patch) -> None:
    patch.set(proofs, "audience", lambda shared, now: [])
    patch.set(Gossip, "heard", lambda self, sender, message, now: None)
    carry = Roster.to_carry
    patch.set(Roster, "to_carry", lambda self, number, after, proofs: carry(self, number, after, ()))


@mutation("calm", 3, 2, "one-version")
def a_syncer_saves_two_versions_of_one_parent(patch: Patch) -> None:
    persist = DiskWriter.persist

    def both(self: DiskWriter, effect: ev.Persist, answer: Any) -> None:
        record = effect.record
        if isinstance(record, ev.UpdateRecord):
            header = msgspec.structs.replace(record.version.header, state_digest=bytes(32))
            signature = self._host.core.shared.crypto.sign(signed_bytes("version", header))
            other = ev.UpdateRecord(SignedVersion(header, signature), record.ticket)
            persist(self, ev.Persist(other, ()), lambda _answer: None)
        persist(self, effect, answer)

    patch.set(DiskWriter, "persist", both)

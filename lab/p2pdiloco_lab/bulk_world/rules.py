"""Rules that hold in every bulk world, whatever goes wrong in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import ContributionHeader
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.daemon import wire
from p2pdiloco.tensors.merge import Payload, digest_of
from p2pdiloco_lab.bulk_world.leftovers import left_over, too_large
from p2pdiloco_lab.simulation.rules.violation import Violation

if TYPE_CHECKING:
    from p2pdiloco_lab.bulk_world.member import BulkMember
    from p2pdiloco_lab.bulk_world.world import BulkWorld

LIARS_WORDS = frozenset({"wrong-digest", "digest-differs", "version-signature", "garbage", "wrong-version"})
"""Offences that only a liar commits."""
LEFT_OUT_S = 60.0
"""Time for which whoever gave a part of something that was wrong is not asked as a helper."""
KEEP_S = 100.0
"""Time for which what came of an update is kept at least."""
DEGREE = 2
LARGE_BYTES = 256 * 1024
"""Size from which on an update is passed on."""
Key = tuple[str, int, bytes]
"""BulkMember, its life, digest of a version's header."""


class Rules:
    """Looks at what is delivered, asked and left over. The first broken rule ends the world."""

    def __init__(self, world: BulkWorld) -> None:
        self._world = world
        self.liars = any(fault.kind == "lies" for fault in world.plan.faults)
        self._came: Counter[tuple[Key, str]] = Counter()
        """Bytes of a version's update or state."""
        self._since_s: dict[tuple[Key, str], float] = {}
        self._damaged: list[tuple[str, str, int, int, int, int, float]] = []
        """Lies that were taken: liar, member, its life, fragment, number, which fetch, when."""
        self._delivered: dict[tuple[str, int, int, int], int] = {}
        """BulkMember, life, fragment, number -> the fetch in which an update came."""
        self.insisted: Counter[tuple[int, int]] = Counter()
        """(fragment, number) -> requests for its update that its syncer has to answer with bytes."""

    def broken(self, rule: str, detail: str) -> None:
        """A rule does not hold."""
        self._world.fail(Violation(rule, detail))

    def error(self, peer: str, error: BaseException) -> None:
        """A task or a handler ended with an error that nobody expected."""
        if isinstance(error, Violation):
            self._world.fail(error)
        else:
            self.broken("no-error", f"{peer}: {error!r}")

    # --- what is delivered -----------------------------------------------------------------------------

    def update_delivered(self, member: BulkMember, version: SignedVersion, payload: Payload) -> None:
        """An update goes to the core side."""
        header = version.header
        if version != self._world.ledger.versions.get((header.fragment, header.number)):
            self.broken("true-version", f"{member.name} took version {header.number} that nobody made")
        if digest_of(payload) != header.update_digest:
            self.broken("sound", f"{member.name} took an update {header.number} with a wrong digest")
        fetch = member.fetching.get(header.fragment, 0)
        self._delivered[member.name, member.life, header.fragment, header.number] = fetch
        self._only_missing(member, header, "update", header.update_bytes)

    def same_state(self, member: BulkMember, version: SignedVersion, digest: bytes) -> None:
        """The state that an update leads to is everybody's."""
        if digest != version.header.state_digest:
            self.broken("equal-state", f"{member.name} reached another state {version.header.number}")

    def committed(self, member: BulkMember, version: SignedVersion) -> None:
        """A version is a member's state now."""
        header = version.header
        self.same_state(member, version, member.vault.state_digest_of(header.fragment, header.number))
        known = self._world.ledger.states.get((header.fragment, header.number))
        if known is None or [*map(bytes, member.vault.state_buffers(header.fragment))] != list(known):
            self.broken("sound", f"{member.name} took a state {header.number} with other bytes")
        self._only_missing(member, header, "state", 8 * self._world.ledger.layouts[0].numel)
        outgrown = too_large(member)
        if outgrown:
            self.broken("bounded", f"{member.name}: {outgrown}")

    def contribution_delivered(self, member: BulkMember, label: ContributionHeader, payload: Payload) -> None:
        """A contribution goes to the core side."""
        if digest_of(payload) != label.payload_digest:
            self.broken("sound", f"{member.name} took a contribution of {label.learner} with a wrong digest")
        if member.inbox.count(label) != 1:
            self.broken("once", f"{member.name} got {label.stamp} of {label.learner} again")

    def answered(self, member: BulkMember, syncer: str, label: ContributionHeader, verdict: Verdict) -> None:
        """A learner got the syncer's word."""
        there = self._world.members.get(syncer)
        lost = (
            there is None or there.life != self._world.lives[syncer] or there.born_s > self._world.now - 30.0
        )
        if verdict.taken and not lost and there is not None and not there.inbox.count(label):
            self.broken("true-word", f"{syncer} told {member.name} that {label.stamp} is there")

    def broken_off(self, member: BulkMember, label: ContributionHeader, verdict: Verdict) -> None:
        """A push did not end well."""
        if verdict.counted and not self.liars:
            self.broken("honest", f"{member.name} found a contribution of {label.learner} {verdict}")

    def failed(self, member: BulkMember, fragment: int, event: ev.FetchFailed) -> None:
        """A fetch did not end well."""
        if not event.failure.innocent and not self.liars:
            self.broken("honest", f"{member.name} found what {event.peer} gave of {fragment} {event.detail}")

    # --- how much is moved -----------------------------------------------------------------------------

    def came(self, member: BulkMember, version: VersionHeader, nbytes: int) -> None:
        """Count bytes of a version that were pulled."""
        state = member.is_copying(version.fragment)
        key = (member.name, member.life, version.digest()), "state" if state else "update"
        self._came[key] += nbytes
        self._since_s.setdefault(key, self._world.now)

    def _only_missing(self, member: BulkMember, header: VersionHeader, kind: str, size: int) -> None:
        """Check that what is here was not asked for again. Excepted is what was forgotten for its age or for
        want of memory, and, where somebody lies, what was spoiled."""
        key = (member.name, member.life, header.digest()), kind
        came, since_s = self._came.pop(key, 0), self._since_s.pop(key, self._world.now)
        aged = kind == "update" and self._world.now - since_s > KEEP_S
        if came > size and not (member.spec.tight or aged or self.liars):
            what = f"{kind} {header.number} of fragment {header.fragment}"
            self.broken("only-missing", f"{member.name} pulled {came} bytes of {what}, which has {size}")

    def gave(self, member: BulkMember) -> None:
        """Check that nobody gives a large update of its own much more than twice where nothing goes wrong."""
        made = [v.header for v in self._world.ledger.versions.values() if v.header.syncer == member.name]
        if self._world.plan.faults or not made or made[0].update_bytes < LARGE_BYTES:
            return
        most = sum(h.update_bytes * (DEGREE + self.insisted[h.fragment, h.number]) for h in made)
        given = member.transfers.fanout.given_bytes
        if given > most:
            self.broken("fan-out", f"{member.name} gave {given} bytes of its updates, at most {most}")

    # --- who is asked ----------------------------------------------------------------------------------

    def asked(self, member: BulkMember, sender: str, pull: wire.PullUpdate | wire.PullState) -> None:
        """A member is asked for an update or a state."""
        if isinstance(pull, wire.PullState):
            return
        if pull.insist or not pull.relays:
            self.insisted[pull.fragment, pull.number] += 1
        asker = self._world.members.get(sender)
        if not pull.version or asker is None:
            return
        for liar, victim, life, fragment, number, fetch, at_s in self._damaged:
            same = (liar, victim, life) == (member.name, sender, asker.life) and fragment == pull.fragment
            if not same or number >= pull.number or self._world.now - at_s > LEFT_OUT_S:
                continue
            if self._delivered.get((victim, life, fragment, number)) == fetch:
                self.broken("left-out", f"{sender} asks {liar}, which gave it a damaged update {number}")

    def lied(
        self, member: BulkMember, sender: str, pull: wire.PullUpdate | wire.PullState
    ) -> Callable[[], None]:
        """A member gives something damaged. Returns what to call when it was taken."""
        asker = self._world.members[sender]
        fetch, life, number = asker.fetching.get(pull.fragment, 0), asker.life, pull.number

        def taken() -> None:
            if isinstance(pull, wire.PullUpdate) and pull.version:
                at_s = self._world.now
                entry = member.name, sender, life, pull.fragment, number, fetch, at_s
                self._damaged.append(entry)

        return taken

    # --- the end ---------------------------------------------------------------------------------------

    def at_rest(self, member: BulkMember) -> None:
        """Long after the last transfer nothing is held or remembered that belongs to one."""
        if not member.inbox.empty:
            self.broken("rest", f"{member.name} has contributions that nobody merges")
        self.gave(member)
        found = left_over(member)
        if found:
            self.broken("rest", f"{member.name}: {found}")
        strange = LIARS_WORDS & set(member.transport.refusals)
        if strange and not self.liars:
            self.broken("honest", f"{member.name} refused somebody: {', '.join(sorted(strange))}")

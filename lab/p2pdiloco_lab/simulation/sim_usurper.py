"""Members that sign versions without an office."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from p2pdiloco.core.api.events import CommitVersion, Effect
from p2pdiloco.core.api.messages import Announce, Message, Progress
from p2pdiloco.core.api.types import (
    MAX_INNER_STEPS,
    MOST_PERIODS,
    UNMEASURED,
    WHOLE_RUN,
    Certificate,
    Contributor,
    Head,
    Stamp,
    Vote,
    VoteBody,
    signed_bytes,
)
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain import Chain, founding, limits_after, plan_after, scale_after
from p2pdiloco_lab.simulation.lineage import FragmentLineage, HashCrypto, MergedPart, OuterUpdate
from p2pdiloco_lab.simulation.seed_plan import UsurperKind
from p2pdiloco_lab.simulation.sim_disk import LoggedUpdate
from p2pdiloco_lab.simulation.sim_liars import FALSE_FROM_S, LieKind, Perjurer

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.sim_disk import Store
    from p2pdiloco_lab.simulation.sim_host import Host
    from p2pdiloco_lab.simulation.sim_network import GivenState
    from p2pdiloco_lab.simulation.sim_world import World

EVERY_S = 0.5
"""Time between two versions that it makes."""


class Base(NamedTuple):
    """Version of which another one is made."""

    chain: Chain
    state: FragmentLineage

    @staticmethod
    def of(store: Store) -> Base:
        """The head that a node holds."""
        return Base(Chain((store.version,), store.watermarks, 64), store.state)


class Usurper(Perjurer):
    """Member with an honest core. Beside that it signs versions without an office, each with work of its own
    only, and never two of one parent: that would be a proof."""

    def __init__(self, world: World, peer: str, kind: UsurperKind, begins_s: float = FALSE_FROM_S) -> None:
        super().__init__(world, peer, LieKind.OFFICES)
        self._usurps, self._begins_s, self._steps = kind, begins_s, 0
        self._parents: set[bytes] = set()
        self._before: dict[int, Base] = {}
        """Parents of its heads, by fragment."""
        self._first: dict[int, Base] = {}
        """Versions on which its core first stood that others made, by fragment."""
        self._shown: dict[int, tuple[SignedVersion, Base]] = {}
        """Newest versions that are no children of heads, by fragment: it says that these are its own."""
        self.made: set[bytes] = set()
        """Digests of its versions."""
        world.clock.at(begins_s, self._usurp)

    def sees(self, host: Host, effect: Effect) -> None:
        """Remember what its core goes on from."""
        if isinstance(effect, CommitVersion):
            fragment = effect.version.header.fragment
            self._before[fragment] = before = Base.of(host.stores[fragment])
            if before.chain.head.number:
                self._first.setdefault(fragment, before)

    def says(self, peer: str, message: Message) -> Message:
        """Name its own versions."""
        if not isinstance(message, Progress):
            return message
        shown = ((fragment, version.header.head()) for fragment, (version, _) in self._shown.items())
        return replace(message, heads=tuple(sorted({**dict(message.heads), **dict(shown)}.items())))

    def gives(self, peer: str, found: LoggedUpdate) -> LoggedUpdate:
        """Its labels are true."""
        return found

    def gives_state(self, peer: str, given: GivenState) -> GivenState:
        """Give its own version's state."""
        shown = self._shown.get(given.version.header.fragment)
        if shown is None:
            return given
        return given._replace(version=shown[0], state=shown[1].state, watermarks=shown[1].chain.marks.table)

    def works_on(self, fragment: int) -> bool:
        """Tell whether it contributes to that fragment."""
        begun = self._world.clock.now >= self._begins_s
        return self._usurps is not UsurperKind.IDLE and not (begun and self._usurps is UsurperKind.SIBLING)

    def _usurp(self) -> None:
        self._world.clock.after(EVERY_S, self._usurp)
        host = self._world.hosts.get(self._peer)
        if host is None or not host.up:
            return
        for fragment, store in enumerate(host.stores):
            base, head = self._base(fragment, store), store.version.header.head()
            while base is not None and base.chain.head.digest not in self._parents:
                self._parents.add(base.chain.head.digest)
                term = head.term + (self._usurps is not UsurperKind.TERM)
                version, update, made = self._child(fragment, base, term)
                self.made.add(version.header.digest())
                store.log[version.header.number] = version, update
                if self._usurps.forks:
                    self._shown[fragment] = version, made
                if self._usurps.is_history and version.header.head().weight <= head.weight:
                    base = made
                    continue
                self._announce(host, version)
                break

    def _announce(self, host: Host, version: SignedVersion) -> None:
        announced = Announce(version.header.fragment, version.header.head(), self._peer)
        for other in self._world.up_hosts():
            if other is not host:
                self._world.network.send(host, other.peer, announced)

    def _base(self, fragment: int, store: Store) -> Base | None:
        """Choose what its next version is a child of."""
        if self._usurps is UsurperKind.SIBLING:
            return self._before.get(fragment)
        if self._usurps is UsurperKind.TERM and store.version.header.syncer == self._peer:
            return None  # two of one parent, if it goes on with its own term
        if not self._usurps.is_history:
            return Base.of(store)
        if fragment in self._shown:
            return self._shown[fragment][1]
        if self._usurps is UsurperKind.BRANCH:
            return self._first.get(fragment)
        config, state = self._world.plan.config, self._world.genesis[fragment]
        chain = Chain((config.genesis_versions[fragment],), founding(config.seats).table, 64)
        return Base(chain, state)

    def _child(self, fragment: int, base: Base, term: int) -> tuple[SignedVersion, OuterUpdate, Base]:
        config, chain = self._world.plan.config, base.chain
        number, part = chain.head.number + 1, self._part(fragment, chain)
        steps = MergedPart(self._peer, part.stamp, 10**9 + self._steps, 10**9 + self._steps + 1)
        update = OuterUpdate.of(fragment, number, (steps,), b"", part.inner_steps)
        weighed, marks = scale_after(chain, (part,), config), chain.marks_with(number, (part,))
        epoch, groups = plan_after(chain.header, marks, number, config)
        state = base.state.apply(update)
        header = VersionHeader(
            run=config.run,
            group=WHOLE_RUN,
            fragment=fragment,
            number=number,
            parent=chain.head.digest,
            term=term,
            syncer=self._peer,
            tokens=weighed.tokens,
            state_digest=state.digest,
            update_digest=update.digest,
            update_bytes=1000,
            codec=config.update_codec,
            contributors=(part,),
            epoch=epoch,
            groups=groups,
            unit=weighed.unit,
            norm=0.0,
            reach=weighed.reach,
            table=marks.digest,
            limits=limits_after(chain, config, [self._peer]),
            finality=chain.finality_after(marks),
            elected=self._own_vote(fragment, chain.head, term),
        )
        version = self._signed(header)
        return version, update, Base(Chain((version,), marks.table, 64), state)

    def _own_vote(self, fragment: int, base: Head, term: int) -> Certificate:
        """Elect itself."""
        run, me = self._world.plan.config.run, self._peer
        body = VoteBody(run, WHOLE_RUN, fragment, term, me, me, base.number, base.digest)
        vote = Vote(body, HashCrypto(me).sign(signed_bytes("vote", body)))
        return Certificate(WHOLE_RUN, fragment, term, me, (vote,))

    def _part(self, fragment: int, chain: Chain) -> Contributor:
        """Label work of its own: as long as can be where the version must be heavier than another one."""
        config, mark = self._world.plan.config, chain.marks.stamp(self._peer)
        self._steps += 1
        inner_steps = min(MOST_PERIODS * config.inner_steps, MAX_INNER_STEPS) if self._usurps.forks else 1
        stamp = Stamp(self._world.hosts[self._peer].incarnation, mark.sequence + 1)
        payload = hashlib.sha256(b"%d" % self._steps).digest()
        tokens = inner_steps * config.tokens_per_step
        part = Contributor(self._peer, stamp, tokens, inner_steps, mark, payload_digest=payload)
        signature = HashCrypto(self._peer).sign(signed_bytes("work", part.work(config.run, fragment)))
        trust = chain.marks.mean(self._peer).trust(UNMEASURED)
        return replace(part, signature=signature, trust=trust, votes=self._peer in chain.marks.seats)


def usurpers(world: World) -> dict[str, Usurper]:
    """Make those of the plan."""
    return {peer: Usurper(world, peer, kind) for peer, kind in world.plan.usurpers}

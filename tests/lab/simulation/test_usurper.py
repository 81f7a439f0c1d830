"""One member that was elected by nobody extends everybody's chain."""

from __future__ import annotations

import dataclasses
import hashlib

from known_flaws import given, known_flaw
from msgspec.structs import replace
from sim_kit import calm_plan

from p2pdiloco.core.api.effects import CommitVersion, Effect
from p2pdiloco.core.api.messages import Announce
from p2pdiloco.core.api.types import UNMEASURED, WHOLE_RUN, Contributor, Stamp, signed_bytes
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain import scale
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.chain.plan import plan_after
from p2pdiloco.lab.simulation.node.host import Host
from p2pdiloco.lab.simulation.node.lineage import MergedPart, OuterUpdate
from p2pdiloco.lab.simulation.world.crypto import HashCrypto
from p2pdiloco.lab.simulation.world.disk import LoggedUpdate
from p2pdiloco.lab.simulation.world.perjurer import LieTold, Perjurer
from p2pdiloco.lab.simulation.world.world import World

LIAR = "n5"
BEGINS_S, UNTIL_S, EVERY_S = 20.0, 40.0, 0.5


class Usurper(Perjurer):
    """A member with an honest core. Beside that it signs versions without an office, each with a step of work
    of its own, and never two of one parent: that would be a proof."""

    def __init__(self, world: World) -> None:
        super().__init__(world, LIAR, LieTold.LABELS)
        self._parents: set[bytes] = set()
        self._steps = 0
        self.made: set[bytes] = set()
        world.clock.at(BEGINS_S, self._usurp)

    def sees(self, host: Host, effect: Effect) -> None:
        """Its core does nothing of interest."""

    def gives(self, peer: str, found: LoggedUpdate) -> LoggedUpdate:
        """Its labels are true."""
        return found

    def _usurp(self) -> None:
        self._world.clock.after(EVERY_S, self._usurp)
        host = self._world.hosts[LIAR]
        for fragment, store in enumerate(host.stores):
            chain = Chain((store.version,), store.watermarks, 64)
            if chain.head.digest in self._parents:
                continue
            self._parents.add(chain.head.digest)
            version, update = self._child(fragment, chain)
            self.made.add(version.header.digest())
            store.log[version.header.number] = version, update
            for other in self._world.up_hosts():
                if other is not host:
                    announced = Announce(fragment, version.header.head(), LIAR)
                    self._world.network.send(host, other.peer, announced)

    def _child(self, fragment: int, chain: Chain) -> tuple[SignedVersion, OuterUpdate]:
        config, number = self._world.plan.config, chain.head.number + 1
        host, part = self._world.hosts[LIAR], self._part(fragment, chain)
        steps = MergedPart(LIAR, part.stamp, 10**9 + self._steps, 10**9 + self._steps + 1)
        update = OuterUpdate.of(fragment, number, (steps,), b"", 1)
        weighed, marks = scale.after(chain, (part,), config), chain.marks.after(number, (part,))
        epoch, groups = plan_after(chain.header, marks, number, config)
        header = VersionHeader(
            run=config.run,
            group=WHOLE_RUN,
            fragment=fragment,
            number=number,
            parent=chain.head.digest,
            term=chain.head.term + 1,
            syncer=LIAR,
            tokens=weighed.tokens,
            state_digest=host.stores[fragment].state.apply(update).digest,
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
            limits=scale.limits_after(chain, config, [LIAR]),
        )
        return self._signed(header), update

    def _part(self, fragment: int, chain: Chain) -> Contributor:
        config, mark = self._world.plan.config, chain.watermark(LIAR)
        self._steps += 1
        stamp = Stamp(self._world.hosts[LIAR].incarnation, mark.sequence + 1)
        payload = hashlib.sha256(b"%d" % self._steps).digest()
        part = Contributor(LIAR, stamp, config.tokens_per_step, 1, mark, payload_digest=payload)
        signature = HashCrypto(LIAR).sign(signed_bytes("work", part.work(config.run, fragment)))
        trust = chain.marks.mean(LIAR).trust(UNMEASURED)
        return replace(part, signature=signature, trust=trust, votes=LIAR in chain.marks.voters)


@known_flaw(
    "no version proves its syncer's office: one of six that nobody elected makes all versions of the run"
)
def test_a_member_that_nobody_elected_makes_no_version_and_delays_no_round() -> None:
    plan = calm_plan(6, until_s=UNTIL_S, quorum=2)
    plan = dataclasses.replace(plan, config=replace(plan.config, group_size=64, audited=True), faults=False)
    world = World(plan)
    usurper = Usurper(world)
    world.perjurers = {LIAR: usurper}
    world.watch._liars = world.backing._liars = frozenset({LIAR})
    taken: dict[bytes, float] = {}

    def commits(host: Host, effect: Effect) -> None:
        if isinstance(effect, CommitVersion) and host.peer != LIAR:
            taken.setdefault(effect.version.header.digest(), host.now)

    world.on_effect = commits
    world.clock.run_until(UNTIL_S)
    honest = [at_s for digest, at_s in taken.items() if digest not in usurper.made]
    calm = sum(10.0 < at_s < BEGINS_S for at_s in honest)
    given(calm >= 5 and usurper.made, "no versions before, or none of the usurper's")
    assert not usurper.made & taken.keys()
    assert sum(at_s > UNTIL_S - 10.0 for at_s in honest) >= 0.8 * calm

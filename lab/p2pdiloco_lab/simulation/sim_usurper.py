"""Members that sign versions without an office."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from msgspec.structs import replace

from p2pdiloco.core.api.events import Effect
from p2pdiloco.core.api.messages import Announce
from p2pdiloco.core.api.types import UNMEASURED, WHOLE_RUN, Contributor, Stamp, signed_bytes
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain import Chain, limits_after, plan_after, scale_after
from p2pdiloco_lab.simulation.lineage import HashCrypto, MergedPart, OuterUpdate
from p2pdiloco_lab.simulation.sim_disk import LoggedUpdate
from p2pdiloco_lab.simulation.sim_liars import FALSE_FROM_S, LieKind, Perjurer

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.sim_host import Host
    from p2pdiloco_lab.simulation.sim_world import World

EVERY_S = 0.5
"""Time between two versions that it makes."""


class Usurper(Perjurer):
    """Member with an honest core. Beside that it signs versions without an office, each with a step of work
    of its own, and never two of one parent: that would be a proof."""

    def __init__(self, world: World, peer: str, begins_s: float = FALSE_FROM_S) -> None:
        super().__init__(world, peer, LieKind.OFFICES)
        self._parents: set[bytes] = set()
        self._steps = 0
        self.made: set[bytes] = set()
        """Digests of its versions."""
        world.clock.at(begins_s, self._usurp)

    def sees(self, host: Host, effect: Effect) -> None:
        """Its core does nothing of interest."""

    def gives(self, peer: str, found: LoggedUpdate) -> LoggedUpdate:
        """Its labels are true."""
        return found

    def _usurp(self) -> None:
        self._world.clock.after(EVERY_S, self._usurp)
        host = self._world.hosts.get(self._peer)
        if host is None or not host.up:
            return
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
                    announced = Announce(fragment, version.header.head(), self._peer)
                    self._world.network.send(host, other.peer, announced)

    def _child(self, fragment: int, chain: Chain) -> tuple[SignedVersion, OuterUpdate]:
        config, number = self._world.plan.config, chain.head.number + 1
        host, part = self._world.hosts[self._peer], self._part(fragment, chain)
        steps = MergedPart(self._peer, part.stamp, 10**9 + self._steps, 10**9 + self._steps + 1)
        update = OuterUpdate.of(fragment, number, (steps,), b"", 1)
        weighed, marks = scale_after(chain, (part,), config), chain.marks.after(number, (part,))
        epoch, groups = plan_after(chain.header, marks, number, config)
        header = VersionHeader(
            run=config.run,
            group=WHOLE_RUN,
            fragment=fragment,
            number=number,
            parent=chain.head.digest,
            term=chain.head.term + 1,
            syncer=self._peer,
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
            limits=limits_after(chain, config, [self._peer]),
        )
        return self._signed(header), update

    def _part(self, fragment: int, chain: Chain) -> Contributor:
        config, mark = self._world.plan.config, chain.marks.stamp(self._peer)
        self._steps += 1
        stamp = Stamp(self._world.hosts[self._peer].incarnation, mark.sequence + 1)
        payload = hashlib.sha256(b"%d" % self._steps).digest()
        part = Contributor(self._peer, stamp, config.tokens_per_step, 1, mark, payload_digest=payload)
        signature = HashCrypto(self._peer).sign(signed_bytes("work", part.work(config.run, fragment)))
        trust = chain.marks.mean(self._peer).trust(UNMEASURED)
        return replace(part, signature=signature, trust=trust, votes=self._peer in chain.marks.seats)


def usurpers(world: World) -> dict[str, Usurper]:
    """Choose them: the last ones, a third of all at most."""
    peers = [spec.peer for spec in world.plan.nodes]
    last = peers[len(peers) - min(world.plan.mix.usurpers, len(peers) // 3) :]
    return {peer: Usurper(world, peer) for peer in last}

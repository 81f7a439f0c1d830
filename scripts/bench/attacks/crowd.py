"""`python -m attacks.crowd WORK`: a crowd, identities of one process that trains nothing.

All of them ride (`attacks.rider`), and vote where anybody asks. Then they do what the kind of the crowd says.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import uvloop

from attacks.attacker import carry_out
from attacks.heads import Forged
from attacks.lies import most_steps
from attacks.rider import CrowdWork, Followed, Rider
from attacks.stranger import HEARTBEAT_S, Attack
from p2pdiloco.config.manifest import load_signed
from p2pdiloco.core.api.evidence import Accusation, FalseVersion, short_of
from p2pdiloco.core.api.messages import Stated
from p2pdiloco.core.api.types import NEVER, signed_bytes
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon import wire
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.identity import verify
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import plan_fragments

MOST_UPDATE_BYTES = 1 << 24
PULL_S = 4.0
LOOK_S = 0.1
LISTED_EVERY_S = 15.0
STRIKES_AT = 0.6
"""Share of its time after which a crowd strikes at the latest, however few of it were merged."""
BEHIND = 8
"""Versions by which it may be behind, and reads them one by one: members keep some."""
OUT_OF_REACH = 10
"""Versions by which an accused one is behind: nobody audits what is more than eight behind."""
ACCUSES_EVERY_S = 2.0


class Crowd(Attack):
    """Crowd that is merged, and does no more; others begin with this."""

    def __init__(self, work: CrowdWork) -> None:
        self._work = work
        self._manifest = load_signed(Path(work.manifest), verify)[1]
        self.riders = [Rider(work, place, self._manifest) for place in range(work.riders)]
        self.strangers = [*self.riders]
        layouts = plan_fragments(task_of(self._manifest).specs(), self._manifest.sync.fragments)
        self.fragments = [Followed(layout.index, layout.numel) for layout in layouts]
        self._codec = codec(self._manifest.codec.update)

    def works_on(self, rider: Rider, fragment: int) -> bool:
        """Tell whether a rider contributes to a fragment."""
        return True

    def many_enough(self) -> bool:
        """Tell whether all were merged wherever they work."""
        return all(
            at.index in rider.merged
            for rider in self.riders
            for at in self.fragments
            if self.works_on(rider, at.index)
        )

    async def strike(self) -> None:
        """Do what this kind of crowd does, once all of it were merged."""

    # --- riding ------------------------------------------------------------------------------------------

    async def attack(self) -> None:
        """See `Attack`."""
        for rider in self.riders:
            await rider.show_paper()
        await self.riders[0].look()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._be_listed())
            group.create_task(self._beat())
            for at in self.fragments:
                group.create_task(self._follow(at))
            group.create_task(self._wait_and_strike())

    async def _be_listed(self) -> None:
        while True:
            await asyncio.gather(*(rider.be_listed() for rider in self.riders))
            await asyncio.sleep(LISTED_EVERY_S)

    async def _beat(self) -> None:
        while True:
            heads = {at.index: at.versions[-1].header.head() for at in self.fragments if at.versions}
            await asyncio.gather(*(rider.beat_once(heads) for rider in self.riders))
            await asyncio.sleep(HEARTBEAT_S)

    async def _wait_and_strike(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STRIKES_AT * self._work.seconds):
                await self._until_many_enough()
        self.riders[0].done["struck after s"] = round(loop.time() - began)
        self.riders[0].done["seats in fragments"] = sum(len(rider.seats_in) for rider in self.riders)
        await self.strike()

    async def _until_many_enough(self) -> None:
        while True:
            if self.many_enough():
                return
            await asyncio.sleep(LOOK_S)

    # --- following ---------------------------------------------------------------------------------------

    async def _follow(self, at: Followed) -> None:
        """Read every version of a fragment, and have all riders contribute upon the newest."""
        async with asyncio.TaskGroup() as group:
            while True:
                heads = [r.heads[at.index] for r in self.riders if at.index in r.heads]
                newest = max((head.number for head in heads), default=0)
                near = at.versions and newest - at.number <= BEHIND
                number = at.number + 1 if near else newest
                if number > newest or not number or not await self._read(at, number):
                    await asyncio.sleep(LOOK_S)
                elif number == newest:
                    for rider in self.riders:
                        if self.works_on(rider, at.index):
                            group.create_task(rider.contribute(at))

    async def _read(self, at: Followed, number: int) -> bool:
        request = wire.encode(wire.PullUpdate(self._work.run, at.index, number, insist=True))
        for rider, peer in zip(itertools.cycle(self.riders), self._work.members):
            try:
                found = await rider.transport.pull(peer, request, MOST_UPDATE_BYTES, PULL_S)
                if not isinstance(found, tuple):
                    continue
                version = wire.decode(found[0], wire.UpdateHeader).version
                update = torch.zeros(at.numel)
                self._codec.decode(found[1], update)
            except (RemoteError, TransportError) as error:
                rider.done[f"read: {type(error).__name__}"] += 1
                continue
            at.versions.append(version)
            at.update = update
            for each in self.riders:
                if each.take_in(version):
                    asyncio.get_running_loop().create_task(each.show_paper(tuple(self._work.members)))
            return True
        return False


class Claimers(Crowd):
    """Crowd whose labels claim about as much work as labels can, from the first contribution on."""

    def __init__(self, work: CrowdWork) -> None:
        super().__init__(work)
        for rider in self.riders:
            rider.claims = most_steps


class Mutes(Crowd):
    """Crowd that is merged, and then sends heartbeats only."""

    async def strike(self) -> None:
        """See `Crowd`."""
        for rider in self.riders:
            rider.mute = True


class Accusers(Crowd):
    """Crowd that accuses every honest member of a version too old to be made again."""

    async def strike(self) -> None:
        """See `Crowd`."""
        while True:
            for version in self._old_versions().values():
                subject = FalseVersion(short_of(version))
                for rider in self.riders:
                    signature = rider.identity.sign(signed_bytes("accusation", subject))
                    await rider.say(Stated(Accusation(subject, rider.id, signature)), "accusation")
            await asyncio.sleep(ACCUSES_EVERY_S)

    def _old_versions(self) -> dict[str, SignedVersion]:
        found: dict[str, SignedVersion] = {}
        for at in self.fragments:
            for version in at.versions:
                header = version.header
                if header.syncer in self._work.members and header.number <= at.number - OUT_OF_REACH:
                    found[header.syncer] = version
        return found


class Forgers(Crowd):
    """Crowd in which each works in one fragment, another one each as far as there are so many, and all stand
    on states that they forged there."""

    def works_on(self, rider: Rider, fragment: int) -> bool:
        """See `Crowd`."""
        return rider.place % len(self.fragments) == fragment

    def many_enough(self) -> bool:
        """Tell whether all were merged in their fragments."""
        return all(rider.merged for rider in self.riders)

    async def strike(self) -> None:
        """See `Crowd`."""
        for rider, at in zip(self.riders, self.fragments, strict=False):
            head = at.versions[-1].header.head()
            forged = Forged(rider, head, at.index, at.numel, self._manifest)
            table = forged.table(NEVER)
            made = forged, forged.version(None, table), table
            for each in self.riders:
                each.forged[at.index] = made


KINDS: dict[str, Callable[[CrowdWork], Crowd]] = {
    "rides": Crowd,
    "claims": Claimers,
    "forges": Forgers,
    "accuses": Accusers,
    "falls-silent": Mutes,
}


async def main(work: CrowdWork) -> None:
    """Attack."""
    await carry_out(KINDS[work.attack](work), work)


if __name__ == "__main__":
    logging.disable()
    torch.set_num_threads(1)
    uvloop.run(main(msgspec.json.decode(sys.argv[1], type=CrowdWork)))

"""A member above the leaves, to whom another group's syncer offers a partial merge."""

from __future__ import annotations

from typing import Any

import msgspec
from core_swarm import Swarm
from kit import OF_SWARM, RUN, config, digest, genesis, sign, signed_part
from partials_kit import partials_of
from scenes import next_part

from p2pdiloco.core import chain
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.types import Contributor
from p2pdiloco.core.api.versions import PartialHeader, SignedPartial
from p2pdiloco.core.delegate import UpperElectorate

Effects = list[ev.Effect]


class Above:
    """A member with a seat above the leaves, in office there or not, and another group's syncer."""

    def __init__(self, holding: bool = True, **run: Any) -> None:
        groups = {
            "genesis_versions": (genesis(0, 3),),
            "group_size": 2,
            "term_versions": 20,
            "seats": OF_SWARM[:6],
        }
        self.swarm = swarm = Swarm(config(**(groups | run)))
        for index in range(6):
            swarm.join(f"m{index}", genesis=index == 0)
        swarm.run(20.0)
        swarm.contribute()
        swarm.run(8.0)
        self.core, self.seat, self.child, self.sender = next(
            (member.core, seat, child, peer)
            for member in swarm.members.values()
            for seat in member.core.fragments[0].posts.taken[1:]
            if seat.office.holding == holding and isinstance(seat.electorate, UpperElectorate)
            for child, peer in sorted(seat.electorate.holders(swarm.now).items())
            if peer != member.peer
        )
        self.chain = self.core.fragments[0].chain

    def parts(self, group: str = "") -> tuple[Contributor, ...]:
        """The next contributions of all learners of that group."""
        assert isinstance(self.seat.electorate, UpperElectorate)
        header, shared = self.chain.header, self.core.shared
        leaves = shared.listing.leaves(chain.plan_of(header, shared.config))
        learners = sorted(
            peer for leaf in self.seat.electorate.children[group or self.child] for peer in leaves[leaf]
        )
        return tuple(signed_part(next_part(self.chain, learner)) for learner in learners)

    def label(self, **odd: Any) -> PartialHeader:
        """Acceptable, but for what is odd."""
        values: dict[str, Any] = {
            "run": RUN,
            "group": self.child,
            "fragment": 0,
            "syncer": self.sender,
            "number": self.chain.head.number,
            "digest": self.chain.head.digest,
            "parts": self.parts(),
            "due": True,
            "payload_digest": digest("sums"),
            "payload_bytes": 400,
            "limits": chain.limits_after(self.chain, self.swarm.config),
        }
        header = PartialHeader(**(values | odd))
        plan = chain.plan_of(self.chain.header, self.swarm.config)
        below = partials_of(plan, header.parts, header.limits, header.group)
        return msgspec.structs.replace(header, below=odd.get("below", below))

    def offer(self, header: PartialHeader, transfer: int = 9000, sender: str = "", by: str = "") -> Effects:
        """It is offered, and whatever follows from that is not done."""
        sender = sender or self.sender
        signed = SignedPartial(header, sign(by or sender, "partial", header))
        return self.core.handle(ev.Offered(transfer, sender, signed), self.swarm.now)

    def arrives(self, transfer: int = 9000) -> Effects:
        """Its payload is here."""
        return self.core.handle(ev.PayloadReceived(transfer, 7000 + transfer), self.swarm.now)

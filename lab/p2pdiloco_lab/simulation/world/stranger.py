"""A stranger that says anything: heavier heads which it never gives, a vote which it never casts, a learner
which answers no call, offices and candidacies. It begins once somebody votes by the chain: before,
everybody's word counts (`core.members.standing`)."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

from p2pdiloco.core.api.messages import Message, Progress, VoteRequest
from p2pdiloco.core.api.types import WHOLE_RUN, Head, Reach
from p2pdiloco_lab.simulation.world.plan import stream

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.world.world import World

EVERY_S = 0.5
FAR_AHEAD = 1000
"""Versions by which some of its heads are ahead: those are asked for as states, the others as updates."""
FROM_S = 8.0


class Stranger:
    """Peer whose words are all that there is of it. An endpoint of the network, and no host."""

    up = True

    def __init__(self, world: World, number: int) -> None:
        self.peer = f"stranger{number}"
        self._world = world
        self._rng: random.Random = stream(world.plan.seed, self.peer)
        world.network.endpoints[self.peer] = self
        world.bulk.boasters.add(self.peer)
        world.clock.at(FROM_S + self._rng.uniform(0.0, EVERY_S), self._boast)

    def receive(self, sender: str, message: Message) -> None:
        """Say nothing."""

    def send_failed(self, peer: str) -> None:
        """Try again with the next heartbeat."""

    def _boast(self) -> None:
        self._world.clock.after(EVERY_S, self._boast)
        hosts = list(self._world.up_hosts())
        if not all(any(mark.voter for mark in store.watermarks) for host in hosts for store in host.stores):
            return
        for host in hosts:
            heads = tuple(
                (fragment, self._above(store.version.header.head(), fragment))
                for fragment, store in enumerate(host.stores)
            )
            self._world.network.send(self, host.peer, self._progress(heads))
            fragment, head = self._rng.choice(heads)
            term = head.term + self._rng.randint(1, 3)
            self._world.network.send(self, host.peer, VoteRequest(WHOLE_RUN, fragment, term, head, "boasts"))

    def _above(self, head: Head, fragment: int) -> Head:
        number = head.number + (1 if fragment % 2 else FAR_AHEAD)
        digest = hashlib.sha256(f"{self.peer}/{fragment}/{number}".encode()).digest()
        return Head(number, digest, head.tokens + 1_000_000, head.term)

    @staticmethod
    def _progress(heads: tuple[tuple[int, Head], ...]) -> Progress:
        return Progress(
            incarnation=1,
            step_time_s=0.1,
            inner_step=1,
            tokens_total=1,
            tokens_per_s=1.0,
            loss=None,
            learning=True,
            confirmed=True,
            stands=True,
            heads=heads,
            offices=tuple((WHOLE_RUN, fragment, head.term + 1) for fragment, head in heads),
            saved=False,
            reach=Reach.DIRECT,
            thin=False,
            votes=True,
        )

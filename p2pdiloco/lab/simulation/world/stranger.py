"""A stranger that boasts: it claims a heavier head of every fragment than anybody has, and gives none."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

from p2pdiloco.core.api.messages import Message, Progress
from p2pdiloco.core.api.reach import Reach
from p2pdiloco.core.api.types import Head
from p2pdiloco.lab.simulation.world.plan import stream

if TYPE_CHECKING:
    from p2pdiloco.lab.simulation.world.world import World

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
        for host in self._world.up_hosts():
            heads = tuple(
                (fragment, self._above(store.version.header.head(), fragment))
                for fragment, store in enumerate(host.stores)
            )
            self._world.network.send(self, host.peer, self._progress(heads))
        self._world.clock.after(EVERY_S, self._boast)

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
            learning=False,
            confirmed=True,
            stands=False,
            heads=heads,
            offices=(),
            saved=False,
            reach=Reach.DIRECT,
            thin=False,
            votes=False,
        )

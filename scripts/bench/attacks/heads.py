"""Attacks with heads: heavier ones whose states are forged, and ones that are never delivered."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import torch
from msgspec.structs import replace

from attacks.stranger import HEARTBEAT_S, Attack, Stranger, Work
from p2pdiloco.config.manifest import Manifest, load_signed
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.api.types import (
    NEVER,
    WHOLE_RUN,
    Contributor,
    Head,
    Seat,
    Stamp,
    Watermark,
    signed_bytes,
    table_digest,
)
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.daemon import wire
from p2pdiloco.identity import verify
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.codecs import bytes_of, state_digest
from p2pdiloco.tensors.layout import plan_fragments

FAR_AHEAD = 1000
MORE_TOKENS = 10**7
STEPS = 40_000
"""Inner steps of its one contribution."""
END_OF_COUNTS = 1 << 62


class Forged:
    """A state of one fragment that nobody trained, signed by the stranger alone."""

    def __init__(self, stranger: Stranger, head: Head, fragment: int, numel: int, manifest: Manifest) -> None:
        self.number = head.number + FAR_AHEAD
        self._stranger, self._before, self._fragment = stranger, head, fragment
        self._codec, self._step_tokens = manifest.codec.update, manifest.inner.tokens_per_step
        self.theta, self.momentum = torch.randn(numel) * 0.5, torch.zeros(numel)

    def filled(self, value: float) -> Forged:
        """Put one value everywhere."""
        self.theta.fill_(value)
        return self

    def table(self, stamp: Stamp) -> tuple[Watermark, ...]:
        """Make a table in which the stranger alone has a seat, and the members' marks have this stamp."""
        marks = [Watermark(peer, stamp, self.number) for peer in self._stranger.work.members]
        mine = Watermark(self._stranger.id, Stamp(1, 1), self.number, 1, self.number, Seat(1, 1))
        return tuple(sorted([*marks, mine], key=lambda mark: mark.learner))

    def version(self, tokens: int | None, table: tuple[Watermark, ...]) -> SignedVersion:
        """Sign it, as made of one contribution of the stranger's."""
        stranger, run = self._stranger, self._stranger.work.run
        work = Contributor(stranger.id, Stamp(1, 1), STEPS * self._step_tokens, STEPS)
        says = signed_bytes("work", work.work(run, self._fragment))
        work = replace(work, signature=stranger.identity.sign(says))
        header = VersionHeader(
            run=run,
            group=WHOLE_RUN,
            fragment=self._fragment,
            number=self.number,
            parent=os.urandom(32),
            term=self._before.term + 1,
            syncer=self._stranger.id,
            tokens=self._before.tokens + MORE_TOKENS if tokens is None else tokens,
            state_digest=state_digest(self.number, self.theta, self.momentum),
            update_digest=os.urandom(32),
            update_bytes=self.theta.numel(),
            codec=self._codec,
            contributors=(work,),
            table=table_digest(table),
        )
        return SignedVersion(header, self._stranger.identity.sign(signed_bytes("version", header)))


State = tuple[Forged, SignedVersion, tuple[Watermark, ...]]


class ForgedHead(Attack):
    """A heavier head with one self-signed header, and a random state behind it."""

    value: float | None = None
    tokens: int | None = None
    stamp = NEVER

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._manifest = load_signed(Path(work.manifest), verify)[1]

    async def attack(self) -> None:
        """See `Attack`."""
        stranger = self._stranger
        await stranger.look()
        states: dict[int, State] = {}
        for layout in plan_fragments(task_of(self._manifest).specs(), self._manifest.sync.fragments):
            before = stranger.heads[layout.index]
            forged = Forged(stranger, before, layout.index, layout.numel, self._manifest)
            if self.value is not None:
                forged.filled(self.value)
            table = forged.table(self.stamp)
            states[layout.index] = forged, forged.version(self.tokens, table), table
        stranger.gives = lambda _peer, pull: self._give(states, pull)
        heads = {index: version.header.head() for index, (_, version, _) in states.items()}
        await stranger.be_listed()
        while True:
            await stranger.beat(heads)
            await asyncio.sleep(HEARTBEAT_S)

    def _give(self, states: dict[int, State], pull: wire.Pull) -> PullSource | Refusal:
        if not isinstance(pull, wire.PullState):
            return wire.refuse(PullRefusal.GONE)
        forged, version, table = states[pull.fragment]
        self._stranger.done["states given"] += 1
        header = wire.encode(wire.StateHeader(version, table))
        return PullSource(header, (bytes_of(forged.theta), bytes_of(forged.momentum)), lambda: None)


class HugeValues(ForgedHead):
    """Heavier head as before, with values behind it that end every learner."""

    value = 1e29


class EndOfCounts(ForgedHead):
    """Heavier head as before, with tokens and watermarks at the end of their range."""

    tokens = END_OF_COUNTS
    stamp = Stamp(END_OF_COUNTS, 1)


class NeverDelivered(Attack):
    """Heavier heads, a step and a thousand ahead, whose pulls are answered with `busy`."""

    async def attack(self) -> None:
        """See `Attack`."""
        stranger = self._stranger
        await stranger.look()
        await stranger.be_listed()
        while True:
            await stranger.beat(
                {fragment: above(head, fragment) for fragment, head in stranger.heads.items()}
            )
            await asyncio.sleep(HEARTBEAT_S)


def above(head: Head, fragment: int) -> Head:
    """Make a heavier head that nobody has."""
    number = head.number + (1 if fragment % 2 else FAR_AHEAD)
    return Head(number, os.urandom(32), head.tokens + MORE_TOKENS, head.term)

"""An admitted member that withholds: versions from everybody, or their bytes for long, or one learner's work
from its versions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, cast

from msgspec import structs

from p2pdiloco.adapters import streams
from p2pdiloco.adapters.framing import GIVE, MAX_HEADER_BYTES, U32
from p2pdiloco.core.api.messages import Progress
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.api.types import Head
from p2pdiloco.core.inbox import Held, LearnerInbox
from p2pdiloco.core.membership import Heartbeats, News
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.ports import PullSource, Refusal

VERSIONS = wire.PullUpdate | wire.PullState
BYTE_EVERY_S = 1.0
MORE_TOKENS = 10**6


def withhold(lies: Callable[[str], bool]) -> None:
    """Give nobody an update or a state; `lies` tells whether it has begun."""
    honest = Transfers.on_pull

    async def busy(self: Transfers, sender: str, pull: wire.Bulk) -> PullSource | Refusal:
        if isinstance(pull, VERSIONS) and lies("versions withheld"):
            return wire.refuse(PullRefusal.BUSY)
        return await honest(self, sender, pull)

    Transfers.on_pull = busy  # type: ignore[method-assign]


def omit(lies: Callable[[str], bool]) -> None:
    """Merge nothing of the first learner that comes, though it is here."""
    honest = LearnerInbox.ready
    victim: list[str] = []

    def without(self: LearnerInbox) -> list[Held]:
        ready = honest(self)
        others = [held.child for held in ready if not held.own]
        if not others or not lies("contributions left out"):
            return ready
        victim[:] = victim or others[:1]
        return [held for held in ready if held.child not in victim]

    LearnerInbox.ready = without  # type: ignore[method-assign, assignment]


def trickle(lies: Callable[[str], bool]) -> None:
    """Name a heavier head than any, of the next number, and give what is asked for byte by byte."""
    progress, beat, serve = Heartbeats.progress, News.beat, streams._serve_pull
    named: dict[tuple[int, int], bytes] = {}

    def above(index: int, head: Head) -> tuple[int, Head]:
        digest = named.setdefault((index, head.number), os.urandom(32))
        return index, Head(head.number + 1, digest, head.tokens + MORE_TOKENS, head.term)

    def false_progress(self: Heartbeats) -> Progress:
        said = progress(self)
        if not lies("heartbeats"):
            return said
        return structs.replace(said, heads=tuple(above(*each) for each in said.heads))

    def false_beat(self: News) -> Any:
        if not lies("beats"):
            return beat(self)
        return tuple(above(index, chain.head) for index, chain in enumerate(self._chains))

    async def slow(channel: Any, sender: str, handlers: Any, request: Any, most: Any) -> Any:
        asked = wire.decode(request, cast(Any, wire.Pull))
        if not isinstance(asked, VERSIONS) or not lies("pulls"):
            return await serve(channel, sender, handlers, request, most)
        await channel.write(bytes([GIVE]) + U32.pack(MAX_HEADER_BYTES))
        while True:
            await channel.write(b"\0")
            await asyncio.sleep(BYTE_EVERY_S)

    Heartbeats.progress, News.beat = false_progress, false_beat  # type: ignore[method-assign]
    streams._serve_pull = slow

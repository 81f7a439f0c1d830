"""Asking one peer for an outer update, or for what is not here yet of it, if there is memory for it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any, cast

import msgspec

from p2pdiloco.core.capacity import Meter
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.chain_view import ChainView
from p2pdiloco.daemon.bulk.pushes_in import PushesIn
from p2pdiloco.daemon.bulk.updates.fetching import Fetch, Unfinished, UnfinishedUpdates, Watcher
from p2pdiloco.daemon.payloads.memory import Memory
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Refusal, Transport

PAUSE_S = 15.0
"""Longest pause in a stream before it counts as cut."""
NAMED_PAUSE_S = 6.0
"""Longest pause of a peer that a holder named: there are others. Longer than `arriving.WAIT_S`."""


class Pulling:
    """Requests for updates, one peer at a time, and what is kept of those that were cut."""

    def __init__(
        self, chain: ChainView, transport: Transport, memory: Memory, pushes_in: PushesIn, downlink: Meter
    ) -> None:
        """`pushes_in`: what it keeps of others' cut streams makes room. `downlink`: meter that runs while
        bytes come, not while we ask."""
        self.chain = chain
        self._transport = transport
        self._memory = memory
        self._pushes_in = pushes_in
        self._downlink = downlink
        self.unfinished = UnfinishedUpdates(asyncio.get_running_loop().time)
        self.bytes_in = 0

    @property
    def me(self) -> str:
        """Our peer id."""
        return self._transport.peer_id

    def have_bytes(self, fragment: int) -> int:
        """Return how much of a fragment's update is here when no pull is under way."""
        return self.unfinished.have_bytes(fragment)

    async def pull(self, peer: str, request: wire.PullUpdate, watcher: Watcher) -> Fetch | wire.Elsewhere:
        """Pull the payload, after what is here of it already. `watcher` hears of what comes.

        Raises:
            TransportError, RemoteError.
        """
        fragment, limit = request.fragment, self.chain.most_update_bytes(request.fragment)
        self.unfinished.forget_old()
        self._pushes_in.forget_old()
        before = self.unfinished.take(fragment)  # what is reserved for the whole counts it from here on
        if not self._memory.fits_fetch(limit):
            self.unfinished.forget_all()
            self._pushes_in.forget_all()
        try:
            with self._memory.fetching(limit):
                taken, before = before, None
                return await self._pull_rest(peer, request, limit, taken, watcher)
        finally:
            self.unfinished.keep(fragment, before)  # there was no room

    async def _pull_rest(
        self,
        peer: str,
        request: wire.PullUpdate,
        limit: int,
        before: Unfinished | None,
        watcher: Watcher,
    ) -> Fetch | wire.Elsewhere:
        fragment = request.fragment
        if before is not None:
            request = msgspec.structs.replace(request, have_bytes=before.have_bytes, have=before.digest)
        with ExitStack() as stack:
            fetch = Fetch(
                request, limit, before, watcher, lambda: stack.enter_context(self._downlink.moving())
            )
            refusal = await self._into(fetch, peer, request, before)
        if refusal is not None:
            self.unfinished.keep(fragment, before)
            answer = wire.decode(refusal.answer, cast(Any, wire.Refused | wire.Elsewhere))
            if isinstance(answer, wire.Elsewhere):
                return answer
            raise wire.PullRefused(answer.reason)
        if fetch.complete:
            self.unfinished.forget(fragment)
        else:
            self.unfinished.keep(fragment, fetch.unfinished)
        return fetch

    async def _into(
        self, fetch: Fetch, peer: str, request: wire.PullUpdate, before: Unfinished | None
    ) -> Refusal | None:
        fragment = request.fragment
        try:
            pause_s = NAMED_PAUSE_S if request.version else PAUSE_S
            return await self._transport.pull_into(peer, wire.encode(request), fetch, pause_s)
        except (TransportError, asyncio.CancelledError):
            self.unfinished.keep(fragment, fetch.unfinished)
            raise
        except RemoteError:
            if not fetch.received_bytes:  # busy, say: another holder may have the rest
                self.unfinished.keep(fragment, before)
            raise
        finally:
            self.bytes_in += fetch.received_bytes

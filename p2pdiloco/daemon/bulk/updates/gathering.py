"""Getting an outer update from whoever has it: the holder that the core names may name others.

Those are tried in turn, and whoever they name. Who delivered fast before comes first, equals in an order that
differs between askers. They are tried as long as something comes, for two minutes at most; while nothing
comes, for a third of what the holder said that it would take; in a bounded number of requests. Then we come
back to the holder and insist. What came so far stays, whoever gave it. Bytes of several peers that turn out
wrong say nothing against the holder: it is asked once more, for all of them.

Rules: docs/protocol/following.md, section 4.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from p2pdiloco.core.api.reasons import FetchFailure, PullRefusal, Verdict, VersionFault
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.failing import failure_of
from p2pdiloco.daemon.bulk.rates import Rates
from p2pdiloco.daemon.bulk.updates.arriving import WAIT_S
from p2pdiloco.daemon.bulk.updates.fetching import Fetch, Watcher
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.util import BoundedDict

MAX_PULLS = 40
"""Number of requests to others for one update."""
MAX_PATIENCE_S = 120.0
LEAST_STALL_S = WAIT_S + 3.0
"""Least time that we wait while nothing comes; a third of the patience, if that is more. An honest peer
that has nothing new takes less to say "later"."""
FULL = 0.9
"""Share of that time after which a peer that had it to itself, and gave nothing, is left out."""
FORGIVE_S = 60.0
"""Time for which a peer is left out that was named and was not reached, gave something wrong, or nothing
in time."""
NO_WORSE = (FetchFailure.GONE, FetchFailure.NOT_READY, FetchFailure.BUSY)
"""Reasons for which a named peer refuses and is no worse for it."""
MAX_PEERS = 256
MEASURED_BYTES = 64 * 1024


class NotAsSigned(RemoteError):
    """Error: an update is not what its syncer signed. Where several gave of it, that is not the holder's
    fault."""

    def __init__(self, why: Verdict | VersionFault) -> None:
        super().__init__(why.value)


class LeftOut:
    """Peers that are left out for `FORGIVE_S`: what they gave may be wrong, or did not come in time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: BoundedDict[str, float] = BoundedDict(MAX_PEERS)

    def add(self, *peers: str) -> None:
        """Leave these peers out from now on."""
        for peer in peers:
            self._until[peer] = self._now() + FORGIVE_S

    def forgive(self, *peers: str) -> None:
        """Count on these peers again: it was somebody else."""
        for peer in peers:
            self._until.pop(peer, None)

    def __contains__(self, peer: str) -> bool:
        return self._until.get(peer, -math.inf) > self._now()


class Pulls(Protocol):
    """Requests to one peer (`daemon.bulk.updates.pulling`)."""

    @property
    def me(self) -> str:
        """Our peer id."""

    async def pull(self, peer: str, request: wire.PullUpdate, watcher: Watcher) -> Fetch | wire.Elsewhere:
        """Pull what is not here yet of an update. Raises: TransportError, RemoteError."""

    def have_bytes(self, fragment: int) -> int:
        """Return how much of a fragment's update is here when no pull is under way."""


class Gathering:
    """Fetching of updates, with a memory of who was fast and who did not deliver."""

    def __init__(self, pulls: Pulls, now: Callable[[], float]) -> None:
        self._pulls = pulls
        self._now = now
        self._rates = Rates(now)
        self._failed = LeftOut(now)
        self.from_others = 0
        """Number of updates of which nothing came from the holder that was asked first."""

    async def fetch(
        self,
        holder: str,
        request: wire.PullUpdate,
        check: Callable[[Fetch], Awaitable[None]],
        watcher: Watcher,
    ) -> Fetch:
        """Fetch all of an update, checked; `watcher` hears of what comes.

        Raises:
            TransportError, RemoteError: from the holder, or `check`.
        """
        found = await self._ask(holder, request, watcher)
        givers: set[str] = set()
        others = None
        if isinstance(found, wire.Elsewhere):
            others = await self._elsewhere(holder, request, found, givers, watcher)
            fetch = others or await self._insist(holder, request, watcher)
        else:
            fetch = _all_of(found)
        try:
            await check(fetch)
        except NotAsSigned:
            if not (others or fetch.header.offset):
                raise  # all of it came from the holder
            self._failed.add(*givers)
            fetch, others = await self._insist(holder, request, watcher), None
            await check(fetch)
        self.from_others += others is not None
        return fetch

    async def _insist(self, holder: str, request: wire.PullUpdate, watcher: Watcher) -> Fetch:
        found = await self._ask(holder, msgspec.structs.replace(request, insist=True), watcher)
        if isinstance(found, wire.Elsewhere):
            raise wire.PullRefused(PullRefusal.BUSY)
        return _all_of(found)

    async def _elsewhere(
        self,
        holder: str,
        request: wire.PullUpdate,
        answer: wire.Elsewhere,
        givers: set[str],
        watcher: Watcher,
    ) -> Fetch | None:
        """Fetch all of the version that the holder named from others (`givers`); None: not in time."""
        wanted = msgspec.structs.replace(request, version=answer.version)
        known = {holder, self._pulls.me}
        queue = self._ordered(answer.peers, known, request)
        patience_s = min(answer.patience_ms / 1000, MAX_PATIENCE_S)
        stall_s = max(LEAST_STALL_S, patience_s / 3)
        heard_s = self._now()
        last = heard_s + MAX_PATIENCE_S
        for _ in range(MAX_PULLS):
            if not queue:
                return None
            peer, have = queue.pop(0), self._pulls.have_bytes(request.fragment)
            asked_s, until_s = self._now(), min(last, heard_s + stall_s)
            try:
                async with asyncio.timeout_at(until_s):
                    found = await self._ask(peer, wanted, watcher)
            except TimeoutError:
                if self._pulls.have_bytes(request.fragment) == have:
                    if until_s - asked_s >= FULL * stall_s:  # not who had what others left of it
                        self._failed.add(peer)  # the others of the queue were not asked
                    return None
                givers.add(peer)
                if self._now() < last:
                    queue.insert(0, peer)
                    heard_s = self._now()
                    continue
                return None
            except TransportError:
                self._failed.add(peer)
                continue
            except RemoteError as error:
                failure = failure_of(error)
                if failure is FetchFailure.LATER:
                    queue.append(peer)
                elif failure not in NO_WORSE:
                    self._failed.add(peer)
                continue
            if isinstance(found, wire.Elsewhere):
                queue = self._ordered(found.peers, known, request) + queue
                continue
            givers.add(peer)
            if found.complete:
                return found
            if not found.received_bytes:
                self._failed.add(peer)
                continue
            heard_s = self._now()
            queue.insert(0, peer)
        return None

    async def _ask(self, peer: str, request: wire.PullUpdate, watcher: Watcher) -> Fetch | wire.Elsewhere:
        asked_s = self._now()
        found = await self._pulls.pull(peer, request, watcher)
        if isinstance(found, Fetch) and found.received_bytes >= MEASURED_BYTES:
            # With the round trip, as in `daemon.bulk.states.copying`: of two with the same bandwidth the
            # nearer one is faster. Not with what it waited for itself: that is its place in the tree, this
            # time.
            waited_s = min(found.header.waited_ms / 1000, max(0.0, found.began_s - asked_s))
            self._rates.measured(peer, found.received_bytes, self._now() - asked_s - waited_s)
        return found

    def _ordered(self, peers: Sequence[str], known: set[str], request: wire.PullUpdate) -> list[str]:
        """Order the peers that are new as we try them; from now on they are known."""
        fresh = {peer for peer in peers if peer not in known and peer not in self._failed}
        known.update(fresh)
        unknown = max((self._rates.of(peer, 1.0) for peer in fresh), default=1.0)

        def key(peer: str) -> tuple[int, bytes]:
            rate = self._rates.of(peer, unknown)
            mine = hashlib.sha256(f"{self._pulls.me}/{peer}/{request.fragment}/{request.number}".encode())
            return -round(math.log2(max(rate, 1.0))), mine.digest()

        return sorted(fresh, key=key)


def _all_of(fetch: Fetch) -> Fetch:
    if not fetch.complete:
        raise RemoteError("garbage", "a part where all was asked for")
    return fetch

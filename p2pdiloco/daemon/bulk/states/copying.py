"""Copying a fragment's state from several holders of one version, straight into the vault's spare.

The holder that the core names is asked first; its header says which version is copied. Then up to three
others that hold the same one give pieces, the fastest first as far as we know. A piece that crawls while
somebody else has nothing to do is taken from its giver. A holder that fails costs what it had not sent yet of
one piece. What came stays, also when all fail: whoever is asked next goes on with it, as long as the version
is to be had and nothing else was made in the spare.

The digest of the whole decides. Where several gave and it is wrong, all is asked for once more, from the
holder that the core named, and only that counts against it. The others help nobody for a while, unless it was
the holder.

Rules: docs/protocol/following.md, section 5.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from p2pdiloco.core.api import effects as ef
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.chain_view import Versions
from p2pdiloco.daemon.bulk.rates import Rates
from p2pdiloco.daemon.bulk.states.donating import SHARE
from p2pdiloco.daemon.bulk.states.pieces import StateCopy, StatePart
from p2pdiloco.daemon.bulk.updates.gathering import LeftOut
from p2pdiloco.daemon.payloads.compute import Compute
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Refusal, Transport

MAX_HOLDERS = 4
"""Number of holders of one fragment's state that are asked at one time."""
MAX_STREAMS = 16
"""Number of streams at one time, of all fragments."""
LOOK_S = 0.5
"""Time after which a worker that has nothing to do looks again whether somebody is too slow."""
SILENT_S = 3.0
"""Time in which a holder must begin to give a piece, or lose it to who has nothing to do."""
PAUSE_S = 15.0


class _PieceSink:
    """Sink of one piece."""

    def __init__(self, copying: Copying, copy: StateCopy, part: StatePart, peer: str, fragment: int) -> None:
        self._copying, self._copy, self._part, self._peer = copying, copy, part, peer
        self._fragment = fragment
        self.first = not copy.begun.is_set()
        self.received_bytes = 0

    def begin(self, header: bytes, payload_bytes: int) -> None:
        copy, part = self._copy, self._part
        found = wire.decode(header, wire.StateHeader)
        version = found.version.header
        if version.fragment != self._fragment:
            raise RemoteError("wrong-fragment")
        goes_on = (version.state_digest, found.offset) == (copy.digest, part.have)
        if not goes_on and (not self.first or found.offset):
            raise RemoteError("garbage", "goes on with something else than was asked for")
        if self.first:
            if not self._copying.versions.signed(found.version):
                raise RemoteError("version-signature")
            if not goes_on:
                copy.anew(part)
        if payload_bytes > part.end - part.have:
            raise RemoteError("oversized", f"payload of {payload_bytes} bytes, asked for less")
        part.began(self._copying.now())
        copy.begins(self._peer, found if self.first else None)

    def write(self, offset: int, chunk: memoryview) -> None:
        part = self._part
        self._copy.loan.write(part.began_at + offset, chunk)
        part.came(part.began_at + offset + len(chunk))
        self.received_bytes += len(chunk)


class Copying:
    """Transfer of states on the newcomer's side."""

    def __init__(
        self,
        versions: Versions,
        transport: Transport,
        compute: Compute,
        now: Callable[[], float],
    ) -> None:
        self.versions = versions
        self._transport = transport
        self._compute = compute
        self.now = now
        self._kept: dict[int, StateCopy] = {}
        self._streams: Counter[str] = Counter()
        self._freed = asyncio.Event()
        self._rates = Rates(now)
        self._left_out = LeftOut(now)
        self.bytes_in = 0
        self.from_others_bytes = 0
        """Bytes of them that came from others than the core named."""

    def here_bytes(self, fragment: int) -> int:
        """Count what is here of a fragment's state, as far as it is being copied."""
        copy = self._kept.get(fragment)
        return 0 if copy is None else copy.here_bytes

    async def fetch(self, effect: ef.FetchState) -> wire.StateHeader:
        """Fetch a whole state into the spare, checked. Raises: TransportError, RemoteError."""
        named = effect.peer
        while not self._free(named):
            self._freed.clear()
            await self._freed.wait()
        self._take_place(named)
        try:
            return await self._fetch(effect)
        finally:
            self._leave_place(named)

    async def _fetch(self, effect: ef.FetchState) -> wire.StateHeader:
        fragment, named = effect.fragment, effect.peer
        suspects: set[str] = set()
        for alone in (False, True):
            copy = await self._begin(fragment, anew=alone)
            await self._complete(copy, effect, alone)
            assert copy.header is not None
            del self._kept[fragment]
            version = copy.header.version.header
            try:
                take = self._compute.vault.take_loan
                if await self._compute.run(take, fragment, version.number, copy.loan) == copy.digest:
                    return copy.header
                raise RemoteError("digest-differs")
            except RemoteError:
                if copy.givers == {named}:
                    self._left_out.forgive(*suspects)  # it was the holder
                    raise
                suspects = copy.givers - {named}
                self._left_out.add(*suspects)
        raise RemoteError("digest-differs")

    async def _begin(self, fragment: int, anew: bool) -> StateCopy:
        """Take up what is here of a state of this fragment, or nothing of it."""
        before = None if anew else self._kept.get(fragment)
        loan = await self._compute.run(self._compute.vault.lend_spare, fragment, before and before.loan)
        if before is None or before.loan is not loan:
            before = StateCopy(self.versions.state_bytes(fragment), loan)
        before.ask_anew()
        self._kept[fragment] = before
        return before

    async def _complete(self, copy: StateCopy, effect: ef.FetchState, alone: bool) -> None:
        """Fetch until all of it is here. Raises: TransportError, RemoteError (of the holder that was
        named)."""
        error: BaseException = TransportError("too slow")
        workers: dict[asyncio.Future[None], str] = {
            asyncio.ensure_future(self._work(copy, effect.peer, effect)): effect.peer
        }
        begun = asyncio.ensure_future(copy.begun.wait())
        waiting: set[asyncio.Future[Any]] = {begun}
        asked = {effect.peer}
        try:
            while workers and not copy.complete:
                done, _ = await asyncio.wait(waiting | set(workers), return_when=asyncio.FIRST_COMPLETED)
                waiting.difference_update(done)
                for task in [worker for worker in workers if worker in done]:
                    peer, found = workers.pop(task), task.exception()
                    if found is not None and not isinstance(found, TransportError | RemoteError):
                        raise found
                    if found is not None and peer == effect.peer:
                        error = found
                if begun.done() and not alone:  # who fails is replaced
                    for peer in self._helpers(copy, effect.fragment, asked)[: MAX_HOLDERS - len(workers)]:
                        if self._free(peer):  # others have taken places since
                            asked.add(peer)
                            workers[self._help(copy, peer, effect)] = peer
        finally:
            begun.cancel()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(begun, *workers, return_exceptions=True)
        if not copy.complete:
            raise error

    def _help(self, copy: StateCopy, peer: str, effect: ef.FetchState) -> asyncio.Future[None]:
        self._take_place(peer)
        worker = asyncio.ensure_future(self._work(copy, peer, effect))
        worker.add_done_callback(lambda _: self._leave_place(peer))
        return worker

    def _helpers(self, copy: StateCopy, fragment: int, asked: set[str]) -> list[str]:
        """List others that hold the same version and were not asked yet, fast and unknown ones first."""
        assert copy.header is not None
        if not copy.missing:
            return []
        digest = copy.header.version.header.digest()
        able = [
            peer
            for peer in self.versions.holders(fragment, digest)
            if peer not in asked
            and peer != self._transport.peer_id
            and peer not in self._left_out
            and self._free(peer)
        ]
        able.sort(key=lambda peer: (self._streams[peer], -self._rates.of(peer, float("inf"))))
        return able

    def _free(self, peer: str) -> bool:
        return self._streams[peer] < SHARE and self._streams.total() < MAX_STREAMS

    def _take_place(self, peer: str) -> None:
        self._streams[peer] += 1

    def _leave_place(self, peer: str) -> None:
        self._streams[peer] -= 1
        if not self._streams[peer]:
            del self._streams[peer]
        self._freed.set()

    async def _work(self, copy: StateCopy, peer: str, effect: ef.FetchState) -> None:
        """Fetch pieces from one holder. Raises: TransportError, RemoteError."""
        while not copy.complete:
            part = copy.take()
            if part is None:
                copy.changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await copy.changed.wait()
                self._take_over(copy, peer)
            elif not await self._pull(copy, part, peer, effect):
                return

    def _take_over(self, copy: StateCopy, peer: str) -> None:
        """Give a piece back of which the rest comes sooner from this peer than from who gives it."""
        mine, now = self._rates.of(peer, 0.0), self.now()
        for part in copy.active:
            if part.began_s:
                slow = part.rate(now) < mine / 4 and now - part.began_s > LOOK_S
            else:
                slow = now - part.asked_s > SILENT_S
            if slow and part.pull is not None and not part.stolen and not copy.missing:
                part.steal()
                return

    async def _pull(self, copy: StateCopy, part: StatePart, peer: str, effect: ef.FetchState) -> bool:
        """Pull one piece. False: it was taken from this holder, which is too slow.

        Raises:
            TransportError, RemoteError.
        """
        sink = _PieceSink(self, copy, part, peer, effect.fragment)
        answer = await self._into(sink, copy, part, peer, effect)
        if answer is None:
            return False
        if isinstance(answer, Refusal):
            raise wire.refused(answer)
        if not sink.received_bytes:
            raise RemoteError("garbage", "nothing where something was asked for")
        return True

    async def _into(
        self, sink: _PieceSink, copy: StateCopy, part: StatePart, peer: str, effect: ef.FetchState
    ) -> Refusal | bool | None:
        """Pull one piece into the sink. None: it was taken from this holder. Raises: TransportError,
        RemoteError."""
        request = wire.PullState(
            self.versions.run,
            effect.fragment,
            effect.number,
            part.have,
            copy.digest,
            part.end - part.have,
            exact=not sink.first,
        )
        encoded = wire.encode(request)
        pull = asyncio.ensure_future(self._transport.pull_into(peer, encoded, sink, PAUSE_S))
        part.asked(pull, self.now())
        try:
            return await pull or True
        except asyncio.CancelledError:
            if _ends():
                raise
            if part.stolen:
                return None
            raise TransportError("cut") from None
        finally:
            if not pull.done():
                pull.cancel()
                await asyncio.gather(pull, return_exceptions=True)
            self.bytes_in += sink.received_bytes
            self.from_others_bytes += sink.received_bytes if peer != effect.peer else 0
            if sink.received_bytes:
                # With the round trip: of two with the same bandwidth the nearer one is faster.
                self._rates.measured(peer, sink.received_bytes, self.now() - part.asked_s)
            copy.done(part)


def _ends() -> bool:
    """Tell whether the current task is to end, not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

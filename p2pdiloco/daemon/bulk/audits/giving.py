"""Giving contributions to members that audit a version: our own ones, and those that we merged lately.

Less urgent than anything else that goes out.

Rules: docs/protocol/audits.md, section 2.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.audits.merged import MergedPayloads
from p2pdiloco.daemon.bulk.chain_view import ChainView
from p2pdiloco.daemon.bulk.states.courtesy import Courtesy
from p2pdiloco.daemon.payloads.memory import Memory
from p2pdiloco.daemon.wire import refuse
from p2pdiloco.errors import StorageError
from p2pdiloco.ports import Buffer, PullSource, Refusal
from p2pdiloco.tensors.merge import Payload, size_of
from p2pdiloco.util import BoundedDict

MAX_GIVEN, OF_ONE_PEER = 8, 4
"""Number of contributions that go out at one time, and of those to one peer."""
COPIES = 4
"""Number of times that a peer gets the same one."""
MAX_REMEMBERED = 8192


class GivingContributions:
    """Service of contributions, for members only."""

    def __init__(self, chain: ChainView, merged: MergedPayloads, memory: Memory, courtesy: Courtesy) -> None:
        self._chain, self._merged = chain, merged
        self._memory, self._courtesy = memory, courtesy
        self._to: Counter[str] = Counter()
        """Number of contributions that are going out, by peer."""
        self._had: BoundedDict[tuple[str, bytes], int] = BoundedDict(MAX_REMEMBERED)
        """Number of times that each peer got each of them."""
        self.held_bytes = 0
        """Bytes of memory of what was read from the disk to be given."""
        self.bytes_out = 0

    async def serve(self, sender: str, pull: wire.PullContribution) -> PullSource | Refusal:
        """Serve a payload. The caller has checked run and fragment."""
        if not self._chain.is_member(sender):
            return refuse(PullRefusal.NOT_A_MEMBER)
        key = sender, pull.payload_digest
        busy = self._to.total() >= MAX_GIVEN or self._to[sender] >= OF_ONE_PEER
        if busy or self._had.get(key, 0) >= COPIES:
            return refuse(PullRefusal.BUSY)
        self._to[sender] += 1
        read_bytes = 0

        def release() -> None:
            self._to -= Counter([sender])
            self.held_bytes -= read_bytes

        try:
            found = await self._find(pull)
            if found is None:
                release()
                return refuse(PullRefusal.NOT_HERE)
            if not isinstance(found, Buffer):
                size = size_of(found)
                if not self._memory.fits_push(size):
                    release()
                    return refuse(PullRefusal.BUSY)
                read_bytes = size
                self.held_bytes += size
            payload = await read(found)
        except StorageError:
            release()
            return refuse(PullRefusal.NOT_HERE)
        except BaseException:
            release()
            raise
        self._had[key] = self._had.get(key, 0) + 1
        self.bytes_out += memoryview(payload).nbytes
        return PullSource(b"", (payload,), release, pace=self._courtesy.pace)

    async def _find(self, pull: wire.PullContribution) -> Payload | None:
        merged = self._merged.get(pull.fragment, pull.payload_digest)
        if merged is not None:
            return merged
        return await self._chain.contribution_of(pull.fragment, pull.payload_digest)


async def read(payload: Payload) -> Buffer:
    """Return the bytes of a payload, read from the disk if they are there. Raises: StorageError."""
    if isinstance(payload, Buffer):
        return payload
    room = bytearray(payload.nbytes)
    await asyncio.to_thread(payload.read, 0, memoryview(room))
    return room

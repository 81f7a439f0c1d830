"""Giving states out, in pieces: whoever copies a fragment asks several holders for parts of one version.

Rules: docs/protocol/following.md, section 5.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.states.courtesy import Courtesy
from p2pdiloco.daemon.bulk.updates.fetching import known_bytes
from p2pdiloco.daemon.payloads.compute import Compute
from p2pdiloco.daemon.wire import refuse
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco.tensors.outer_update import Pin

MAX_PINS = 16
"""Number of states that are being read by others at one time."""
SHARE = 4
"""Number of them for one peer."""
LEASE_S = 20.0
"""Time for which a state stays pinned for a peer that does not read it."""


class _Lease:
    """State that is pinned for one peer."""

    def __init__(self, peer: str, header: wire.StateHeader, pin: Pin) -> None:
        self.peer = peer
        self.header = header
        self.pin = pin
        self.streams = 0
        self.last_s = 0.0


class Donating:
    """Transfer of states on the donor's side."""

    def __init__(self, compute: Compute, courtesy: Courtesy, now: Callable[[], float]) -> None:
        self._compute = compute
        self._courtesy = courtesy
        self._now = now
        self._leases: list[_Lease] = []
        """Leases; the one read last comes last."""
        self._pinning: list[str] = []
        """Peers for which a state is about to be pinned."""
        self._timer: asyncio.TimerHandle | None = None
        self.bytes_out = 0

    @property
    def pins(self) -> int:
        """Number of states that are pinned for others."""
        return len(self._leases) + len(self._pinning)

    async def serve(self, sender: str, pull: wire.PullState) -> PullSource | Refusal:
        """Serve a piece of a state, or all the rest. The caller has checked run and fragment."""
        self.expire()
        lease = self._of(sender, pull)
        if lease is None:
            if not self._room(sender):
                return refuse(PullRefusal.BUSY)
            lease = await self._pin(sender, pull.fragment)
        header = lease.header.version.header
        if header.number < pull.number or (pull.exact and header.state_digest != pull.have):
            self._drop(lease)
            return refuse(PullRefusal.GONE if pull.exact else PullRefusal.BEHIND)
        return self._give(lease, pull)

    def _of(self, sender: str, pull: wire.PullState) -> _Lease | None:
        """Find what is pinned for that peer already, if it wants that one."""
        for lease in self._leases:
            header = lease.header.version.header
            if lease.peer == sender and header.fragment == pull.fragment and header.state_digest == pull.have:
                return lease
        return None

    def _room(self, sender: str) -> bool:
        """Tell whether another state may be pinned for that peer; if need be instead of one that nobody
        reads."""
        mine = self._pinning.count(sender) + sum(lease.peer == sender for lease in self._leases)
        idle = [x for x in self._leases if not x.streams and (mine < SHARE or x.peer == sender)]
        if mine < SHARE and self.pins < MAX_PINS:
            return True
        if idle:
            self._drop(idle[0])
        return bool(idle)

    async def _pin(self, sender: str, fragment: int) -> _Lease:
        self._pinning.append(sender)
        pinning: asyncio.Future[Any] = asyncio.ensure_future(self._compute.run(self._compute.pin, fragment))
        try:
            header, pin = await asyncio.shield(pinning)
        except asyncio.CancelledError:
            pinning.add_done_callback(lambda done: self._unpin(sender, done))
            raise
        self._pinning.remove(sender)
        lease = _Lease(sender, header, pin)
        lease.last_s = self._now()
        self._leases.append(lease)
        return lease

    def _unpin(self, sender: str, pinning: asyncio.Future[Any]) -> None:
        """Release a state that nobody waits for any more."""
        self._pinning.remove(sender)
        if not pinning.cancelled() and pinning.exception() is None:
            pinning.result()[1].release()

    def _give(self, lease: _Lease, pull: wire.PullState) -> PullSource:
        size = sum(buffer.nbytes for buffer in lease.pin.buffers)
        offset = known_bytes(pull, lease.header.version.header.state_digest, size)
        end = min(size, offset + pull.most_bytes) if pull.most_bytes else size
        header = msgspec.structs.replace(lease.header, offset=offset)
        lease.streams += 1
        self.bytes_out += end - offset
        self._leases.remove(lease)
        self._leases.append(lease)
        loop = asyncio.get_running_loop()

        def release() -> None:
            lease.streams -= 1
            lease.last_s = self._now()
            if self._timer is None:
                self._timer = loop.call_later(LEASE_S, self._on_timer)

        pieces = _piece(lease.pin.buffers, offset, end)
        return PullSource(wire.encode(header), pieces, release, pace=self._courtesy.pace)

    def _on_timer(self) -> None:
        self._timer = None
        self.expire()
        if self._leases:
            self._timer = asyncio.get_running_loop().call_later(LEASE_S, self._on_timer)

    def expire(self) -> None:
        """Give up what nobody goes on with."""
        late = self._now() - LEASE_S
        for lease in [x for x in self._leases if not x.streams and x.last_s < late]:
            self._drop(lease)

    def _drop(self, lease: _Lease) -> None:
        if not lease.streams and lease in self._leases:
            self._leases.remove(lease)
            lease.pin.release()


def _piece(buffers: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Cut the buffers' bytes from start to end."""
    found, base = [], 0
    for buffer in buffers:
        part = buffer[max(0, start - base) : max(0, end - base)]
        base += buffer.nbytes
        if part.nbytes:
            found.append(part)
    return found

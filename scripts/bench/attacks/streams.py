"""Attacks with streams: slow ones with announced headers, and pulls of all that there is."""

from __future__ import annotations

import asyncio
import itertools

from attacks.stranger import Attack, Stranger, Work
from p2pdiloco.adapters.framing import MAX_HEADER_BYTES, OTHERS_HEADER_BYTES, PUSH, U32
from p2pdiloco.daemon import wire
from p2pdiloco.errors import TransportError

SLOW_STREAMS = (48, 16)
"""Streams of each identity to every member."""
BYTE_S = 4.0
OPEN_S = 3.0
AGAIN_S = 0.5
PULLERS = 4
MOST_BYTES = 1 << 28


class SlowStreams(Attack):
    """Streams that announce a header, of 6 MiB or what a stranger's may be, and send a byte now and then."""

    def __init__(self, work: Work) -> None:
        super().__init__(work, len(SLOW_STREAMS))

    async def attack(self) -> None:
        """See `Attack`."""
        async with asyncio.TaskGroup() as group:
            for stranger, count in zip(self.strangers, SLOW_STREAMS, strict=True):
                for peer, number in itertools.product(stranger.work.members, range(count)):
                    size = OTHERS_HEADER_BYTES if number % 2 else MAX_HEADER_BYTES
                    group.create_task(self._slow(stranger, peer, size))

    async def _slow(self, stranger: Stranger, peer: str, size: int) -> None:
        """Keep one stream open, and open another when it is ended."""
        while True:
            try:
                reader, writer = await stranger.transport._open(peer, OPEN_S)
            except TransportError as error:
                stranger.done[f"open: {type(error).__name__}"] += 1
                await asyncio.sleep(AGAIN_S)
                continue
            stranger.done["streams opened"] += 1
            try:
                writer.write(bytes([PUSH]) + U32.pack(size))
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    async with asyncio.timeout(BYTE_S):
                        if not await reader.read(256):
                            break
                        stranger.done["streams answered"] += 1
            except TimeoutError:
                continue  # a whole pause without a word: it is open
            except (OSError, RuntimeError):
                stranger.done["streams ended"] += 1
            finally:
                writer.close()
            await asyncio.sleep(AGAIN_S)


class BulkPulls(Attack):
    """Pulls of states and manifests, one after the other, several at a time."""

    async def attack(self) -> None:
        """See `Attack`."""
        await self._stranger.look()
        async with asyncio.TaskGroup() as group:
            for peer in self._stranger.work.members:
                for _ in range(PULLERS):
                    group.create_task(self._pull(peer))

    async def _pull(self, peer: str) -> None:
        stranger, run = self._stranger, self._stranger.work.run
        for fragment in itertools.cycle(sorted(stranger.heads)):
            for request in (wire.PullState(run, fragment, 0), wire.PullManifest(run)):
                with stranger.counting(type(request).__name__):
                    answer = await stranger.transport.pull(peer, wire.encode(request), MOST_BYTES, 5.0)
                    if isinstance(answer, tuple):
                        stranger.done["bytes taken"] += len(answer[0]) + len(answer[1])
            await asyncio.sleep(0)

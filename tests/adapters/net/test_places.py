"""Places for incoming streams: members', others', and one peer's share."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest
from net_helpers import until

from p2pdiloco.adapters.streams import (
    POOL_SHARES,
    STREAMS_OF_MEMBERS,
    STREAMS_OF_OTHERS,
    Busy,
    Places,
    StreamRefusal,
)


class Door:
    """Streams that stay until the test ends."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.gave_way = 0
        self.places = Places(self._count)
        self._stack = stack

    def _count(self) -> None:
        self.gave_way += 1

    async def come(self, peer: str, member: bool) -> StreamRefusal | asyncio.Task[None]:
        inside: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def stay() -> None:
            try:
                with self.places.taken(peer, member):
                    inside.set_result(None)
                    await asyncio.Event().wait()
            except Busy as error:
                inside.set_exception(error)

        async def end(task: asyncio.Task[None]) -> None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        task = asyncio.create_task(stay())
        self._stack.push_async_callback(end, task)
        try:
            await inside
        except Busy as error:
            assert error.reason == "busy"
            return StreamRefusal(error.counted)
        return task


async def test_others_take_no_place_of_a_member() -> None:
    async with AsyncExitStack() as stack:
        door = Door(stack)
        for i in range(STREAMS_OF_OTHERS):
            assert isinstance(await door.come(f"stranger {i}", False), asyncio.Task)
        assert await door.come("one more", False) is StreamRefusal.OTHERS_FULL
        for i in range(STREAMS_OF_MEMBERS):
            assert isinstance(await door.come(f"member {i % 8}", True), asyncio.Task)
        assert await door.come("member 0", True) is StreamRefusal.MEMBERS_FULL
        assert door.gave_way == 0, "nobody has more than a share"
    assert len(door.places) == 0


@pytest.mark.parametrize(("member", "most"), [(True, STREAMS_OF_MEMBERS), (False, STREAMS_OF_OTHERS)])
async def test_who_has_more_than_a_share_gives_way(member: bool, most: int) -> None:
    share = most // POOL_SHARES
    async with AsyncExitStack() as stack:
        door = Door(stack)
        greedy = [await door.come("greedy", member) for _ in range(most - share)]
        assert await door.come("greedy", member) is StreamRefusal.ONE_PEERS_SHARE
        for i in range(share):
            await door.come(f"other {i}", member)
        for i in range(most - share - share):
            assert isinstance(await door.come(f"late {i % 2}", member), asyncio.Task)
            assert door.gave_way == i + 1
            newest = greedy.pop()
            assert isinstance(newest, asyncio.Task)
            await until(newest.cancelled)
        assert isinstance(await door.come("latest", member), StreamRefusal), "a share is its own"
        assert len(door.places) == most

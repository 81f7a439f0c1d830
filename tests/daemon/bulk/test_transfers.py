"""Streams that p2pd's death cancels in the middle leave nothing behind: no waiting inbox, no pinned state."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from chain_kit import PaperChain

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.pushes import Landing
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.daemon.network.link import LinkMeters
from p2pdiloco.daemon.payloads import Tickets


class StuckCompute:
    """A worker that is busy until it is let go."""

    def __init__(self, result: Any = None) -> None:
        self.free = asyncio.Event()
        self.vault = SimpleNamespace(layouts=[None], check_payload=None)
        self.pin = None
        self._result = result

    async def run(self, *_: Any) -> Any:
        await self.free.wait()
        return self._result


def transfers(compute: StuckCompute, posted: list[ev.Event]) -> Transfers:
    transport: Any = SimpleNamespace(peer_id="me")
    paper: Any = compute
    return Transfers(PaperChain(), transport, paper, Tickets(), posted.append, LinkMeters(transport))


async def cancelled(work: Any) -> None:
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_contribution_cut_while_it_is_judged_is_reported_as_cut() -> None:
    posted: list[ev.Event] = []
    header = SimpleNamespace(fragment=0, codec="int8", payload_digest=bytes(32))
    await cancelled(transfers(StuckCompute(), posted).pushes_in.payload_arrived(7, header, Landing(4, None)))  # type: ignore[arg-type]
    assert posted == [ev.PayloadBroken(7, Verdict.CUT)]


async def test_a_state_that_nobody_waits_for_any_more_is_unpinned() -> None:
    released = asyncio.Event()
    pin = SimpleNamespace(buffers=[], release=released.set)
    compute = StuckCompute((None, pin))
    served = transfers(compute, [])
    await cancelled(served.on_pull("peer", wire.PullState("run", 0, 0)))
    assert not released.is_set() and served.donating.pins == 1, "the worker is still at it"
    compute.free.set()
    await released.wait()
    assert served.donating.pins == 0

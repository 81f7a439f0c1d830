"""Names of the DNS that led nowhere at a start: they are looked up again, until somebody behind them is here.

A machine that starts its services may have no network yet, and the name server may be away for hours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.adapters.endpoint import report_bug
from p2pdiloco.config.values import peer_in
from p2pdiloco.daemon.apart import apart
from p2pdiloco.errors import TransportError, UserError
from p2pdiloco.ports import Transport

logger = logging.getLogger(__name__)
PAUSE_S = 30.0


def look_up_again(transport: Transport, names: Sequence[str]) -> asyncio.Task[None]:
    """Start to look these names up now and then, and to dial whom they list, until one of those is reached.
    Returns the task, to be cancelled at the end."""
    task = asyncio.create_task(_look_up(transport, names))
    task.add_done_callback(_report_end)
    return task


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        report_bug("looking up of names", error)


async def _look_up(transport: Transport, names: Sequence[str]) -> None:
    reached = not names
    while not reached:
        await asyncio.sleep(PAUSE_S)
        try:
            found = await apart(partial(peers_behind, names))
        except UserError as error:  # it was logged at the start
            logger.debug("%s", error)
            continue
        others = [address for address in found if peer_in(address) != transport.peer_id]
        dials = (transport.connect(peer_in(address), [address]) for address in others)
        results = await asyncio.gather(*dials, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, TransportError):
                raise result
        reached = not others or None in results
        if reached:
            logger.info("%s: found now", " ".join(names))

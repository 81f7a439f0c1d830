"""Runs of the local network: announced while a program with --lan runs, found where nobody says whom to join.

Both are off unless wished for: an announcement tells everybody in the network, of a café too, that this
machine takes part in a run, and in which. What is found is a claim of strangers: the manifest says what is
true, and without a person at a terminal only a run that is named by its id is joined.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from msgspec import structs

from p2pdiloco.adapters.multiaddrs import DIGITS, Announcer, Nearby, check_lan, look_nearby
from p2pdiloco.config.settings import RUN_ID, NodeSettings
from p2pdiloco.config.values import expanded
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.question import at_terminal
from p2pdiloco.daemon.display.wording import counted
from p2pdiloco.daemon.finding.peers_file import join_file, peers_file
from p2pdiloco.errors import UserError
from p2pdiloco.ports import Transport

logger = logging.getLogger("p2pdiloco")
LOOK_EVERY_S = 5.0


async def announce_runs(
    transport: Transport, runs: Callable[[], Sequence[wire.RunSummary]], wanted: bool
) -> None:
    """Announce this peer and its runs in the local network until cancelled, if that is wanted. A network that
    does not let us is said once."""
    if not wanted:
        return
    announcer = Announcer(transport.peer_id, transport.addresses())
    try:
        while True:
            try:
                await announcer.announce([summary.run for summary in runs()])
            except Exception as error:  # noqa: BLE001 - the library's own errors have no common base
                logger.warning("this node cannot be announced in the local network: %r", error)
                await asyncio.Event().wait()
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        await announcer.close()


def with_nearby(settings: NodeSettings, say: Callable[[str], None]) -> NodeSettings:
    """Fill in peers of the local network, with --lan, or where a person at a terminal names nobody to join.

    Raises: UserError (the library is not here; several runs are found, or none is named and nobody is asked).
    """
    if settings.lan:
        check_lan()
    if settings.join or settings.genesis or settings.run_file is not None:
        return settings
    data_dir = expanded(settings.data_dir)
    was_somewhere = peers_file(data_dir).exists() or join_file(data_dir).exists()
    if not settings.lan and (not at_terminal() or was_somewhere):
        return settings
    if settings.lan and not RUN_ID.fullmatch(settings.run) and (settings.yes or not at_terminal()):
        raise UserError(
            "--lan finds what strangers of this network announce, and nobody is asked whether to join it",
            "name the run by its id: --run ID",
        )
    try:
        found = look_nearby()
    except UserError:
        if settings.lan:
            raise
        return settings  # nobody asked for it
    return _joined(settings, found, say)


def _joined(settings: NodeSettings, found: Sequence[Nearby], say: Callable[[str], None]) -> NodeSettings:
    named = RUN_ID.fullmatch(settings.run)
    wanted = settings.run[:DIGITS] if named else ""
    fits = [near for near in found if any(run.startswith(wanted) for run in near.runs)]
    runs = sorted({run for near in fits for run in near.runs if run.startswith(wanted)})
    if not fits:
        say("no run was found in this network")
        return settings
    if len(runs) > 1 and not settings.run:
        raise UserError(
            f"there are {len(runs)} runs in this network: {', '.join(runs)}", "choose one: --run ID"
        )
    peers = counted(len(fits), "peer")
    say(f"found in this network: {peers} of {counted(len(runs), 'run')}, {', '.join(runs)}")
    join = tuple(address for near in fits for address in near.addresses)
    return structs.replace(settings, join=join, run=settings.run or runs[0])

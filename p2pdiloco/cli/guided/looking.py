"""Looking at a run before joining it: its manifest, and what it would take of this machine."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.cli.visitor import visit, visitor
from p2pdiloco.config.manifest import run_id
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.admission import check_owner
from p2pdiloco.daemon.member import Approval
from p2pdiloco.daemon.run_files.known_runs import PublishedRun, RunSearch, peers_of
from p2pdiloco.errors import RemoteError, TransportError, UserError
from p2pdiloco.ports import Transport

PATIENCE_S = 30.0
PAUSE_S = 0.5


def look_at(settings: NodeSettings) -> PublishedRun:
    """Fetch the manifest of the run that these settings mean, from the peers that they name.

    Raises: UserError (nobody answers, or nobody knows the run; or it is of another owner than the link says).
    """
    logging.getLogger().setLevel(logging.ERROR)  # what is worth a line becomes an error here
    join = peers_behind(settings.join)
    if not join:
        raise UserError("there is no peer to ask")
    try:
        run = visit(_look(join, settings.run))
    except TimeoutError:
        raise UserError(f"nobody told about the run within {PATIENCE_S:g} s") from None
    except (RemoteError, TransportError) as error:
        raise UserError(f"the run cannot be looked at: {error}") from error
    check_owner(settings, run)
    return run


async def _look(join: tuple[str, ...], wanted: str) -> PublishedRun:
    async with asyncio.timeout(PATIENCE_S), visitor(join) as transport:
        return await _manifest(transport, RunSearch(transport, wanted, peers_of(join)))


async def _manifest(transport: Transport, search: RunSearch) -> PublishedRun:
    while True:
        chosen = await search.look()
        found = await search.manifest(chosen) if chosen is not None else None
        if found is not None:
            signed, manifest = found
            return PublishedRun(id=run_id(signed), signed=signed, manifest=manifest)
        await asyncio.sleep(PAUSE_S)


def takes(settings: NodeSettings, run: PublishedRun) -> list[str]:
    """Say in lines what a run takes of this machine.

    Raises: UserError (more than is here, or than the settings permit).
    """
    place = next(path for path in (settings.data_dir, *settings.data_dir.parents) if path.exists())
    settings = msgspec.structs.replace(settings, data_dir=place)  # of the folder that will be made there
    approval = Approval(settings, lambda _text, _figures: None, None)
    lines = approval.describe(run)
    approval.check(run.manifest)
    return lines

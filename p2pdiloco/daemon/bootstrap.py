"""Program `p2pdiloco bootstrap`: a well-known address, at which peers find each other.

It has neither a model nor torch in memory: what needs them when a run is signed is a process of its own
(`daemon.run_files.signing`).
"""

from __future__ import annotations

import asyncio
import logging

from p2pdiloco.adapters.disk.data_dir import DataDir
from p2pdiloco.adapters.disk.files import TEMP_SUFFIX, Files
from p2pdiloco.adapters.net.hivemind_net import HivemindTransport
from p2pdiloco.adapters.net.p2pd import P2PDOptions
from p2pdiloco.config.settings import BootstrapSettings
from p2pdiloco.daemon.finding.dial_back import DialBack
from p2pdiloco.daemon.finding.peers_file import save_own_addresses
from p2pdiloco.daemon.finding.presence import publish_runs
from p2pdiloco.daemon.frontdoor import FrontDoor
from p2pdiloco.daemon.process import (
    begin,
    default_dir,
    plain,
    print_addresses,
    print_join,
    run_program,
    transport_of,
    unless_stopped,
)
from p2pdiloco.daemon.run_files.listing import PublishedRun
from p2pdiloco.daemon.run_files.signing import look_at_saved, sign_apart, signed_from
from p2pdiloco.errors import StorageError
from p2pdiloco.identity import Identity

logger = logging.getLogger("p2pdiloco")


def run_bootstrap(settings: BootstrapSettings) -> int:
    """Run a bootstrap peer until it is told to stop. Returns the exit status."""
    return run_program(lambda stop: _bootstrap(settings, stop), settings.log)


async def _bootstrap(settings: BootstrapSettings, stop: asyncio.Event) -> None:
    folder = DataDir(settings.data_dir, parents=settings.data_dir == default_dir(BootstrapSettings))
    with folder:
        identity = Identity.load_or_create(settings.data_dir / "identity.key")
        served = await _served_runs(settings, stop)
        if stop.is_set():
            return
        # Its address is well known: it relays from the start, and tells others what it sees of them.
        options = P2PDOptions(relay=settings.relay, force_reachability="public")
        transport = await transport_of(settings, identity, options)
        door = FrontDoor(DialBack(transport))
        for run in served:
            door.add_run(run, settings.data_dir)
            logger.info("serving run %s (%s)", run.name, run.id[:12])
            if run.manifest.admission.mode == "invite":
                where = settings.data_dir
                logger.info(
                    "who is to join needs an invite: p2pdiloco invite %s --data-dir %s", run.name, where
                )
        await unless_stopped(begin(transport, door, settings), stop)
        if stop.is_set():
            await transport.close()
            return
        try:
            print_addresses(transport.addresses(), "bootstrap")
            save_own_addresses(settings.data_dir, transport.addresses())
            print_join(transport.addresses()[0], [run.id for run in served])
            await unless_stopped(_serve(transport, door), stop)
        finally:
            await transport.close()


async def _serve(transport: HivemindTransport, door: FrontDoor) -> None:
    async def watch() -> None:
        while True:
            await asyncio.sleep(30)
            logger.info("%d peers are connected", transport.peers_connected())

    async with asyncio.TaskGroup() as group:
        group.create_task(publish_runs(transport, door.runs))
        group.create_task(watch())


async def _served_runs(settings: BootstrapSettings, stop: asyncio.Event) -> list[PublishedRun]:
    """List the runs to serve: what is asked for, signed if it was not, then whatever was signed here earlier.

    Whether it computes their version 0 each node sees itself.

    Raises:
        UserError, ConfigError: as `sign_apart`.
        StorageError: a manifest is damaged, and no run.toml that was given makes it again.
    """
    folder = settings.data_dir
    owner = Identity.load_or_create(folder / "owner.key").peer_id
    for path in sorted((folder / "runs").glob(f"*/*{TEMP_SUFFIX}")):  # of a signing that was ended
        Files().delete(path)
    saved = await asyncio.to_thread(look_at_saved, folder)
    unsigned = [file for file in settings.run if not signed_from(file, saved.runs, folder, owner)]
    if unsigned:
        await unless_stopped(sign_apart(folder, unsigned, plain(settings.log)), stop)
        if stop.is_set():
            return []
        saved = await asyncio.to_thread(look_at_saved, folder)
    for error in saved.damaged:
        raise StorageError(str(error), "move it away; its run.toml, given with --run, makes it again")
    for path in saved.lacking:
        logger.warning("%s is not served: its version 0 or its tokenizer is not here any more", path)
    asked = {signed_from(file, saved.runs, folder, owner) for file in settings.run}
    return sorted(saved.runs, key=lambda run: run.id not in asked)

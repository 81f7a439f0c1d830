"""`p2pdiloco bootstrap`: a well-known address. It has neither a model nor torch in memory: what needs them
when a run is signed is a process of its own (`daemon.signing`).
"""

from __future__ import annotations

import asyncio
import logging

from p2pdiloco.adapters.data_dir import DataDir
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.config.settings import BootstrapSettings
from p2pdiloco.config.signing import load_signed, run_id
from p2pdiloco.daemon.frontdoor import FrontDoor
from p2pdiloco.daemon.initial_file import kept_arrays
from p2pdiloco.daemon.listing import PublishedRun
from p2pdiloco.daemon.presence import publish_runs
from p2pdiloco.daemon.process import (
    default_dir,
    plain,
    print_addresses,
    run_program,
    transport_of,
    unless_stopped,
)
from p2pdiloco.daemon.reach import DialBack
from p2pdiloco.daemon.signing import sign_apart
from p2pdiloco.identity import Identity

logger = logging.getLogger("p2pdiloco")


def run_bootstrap(settings: BootstrapSettings) -> int:
    """Run a bootstrap peer until it is told to stop. Returns the exit status."""
    return run_program(lambda stop: _bootstrap(settings, stop), settings.log)


async def _bootstrap(settings: BootstrapSettings, stop: asyncio.Event) -> None:
    folder = DataDir(settings.data_dir, parents=settings.data_dir == default_dir(BootstrapSettings))
    with folder:
        identity = Identity.load_or_create(settings.data_dir / "identity.key")
        await unless_stopped(sign_apart(settings.data_dir, settings.run, plain(settings.log)), stop)
        if stop.is_set():
            return
        door = FrontDoor()
        for run in _served_runs(settings, identity):
            door.add_run(run, settings.data_dir)
            logger.info("serving run %s (%s)", run.name, run.id[:12])
        # Its address is well known: it relays from the start, and tells others what it sees of them.
        options = P2PDOptions(relay=settings.relay, force_reachability="public")
        transport = transport_of(settings, identity, options)
        door.dial_back = DialBack(transport)
        await unless_stopped(transport.start(door), stop)
        if stop.is_set():
            await transport.close()
            return
        try:
            print_addresses(transport.addresses(), "bootstrap")
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


def _served_runs(settings: BootstrapSettings, identity: Identity) -> list[PublishedRun]:
    """Whatever was signed here, now or earlier. Whether it computes their version 0 each node sees itself."""
    runs = []
    for path in sorted((settings.data_dir / "runs").glob("*/manifest.signed")):
        signed, manifest = load_signed(path, identity.verify)
        served = PublishedRun(id=run_id(signed), signed=signed, manifest=manifest)
        if manifest.run.initial and kept_arrays(settings.data_dir, served.id, manifest) is None:
            logger.warning("%s is not served: its version 0 is not here any more", path)
            continue
        runs.append(served)
    return runs

"""Program `p2pdiloco bootstrap`: a well-known address, at which peers find each other.

It has neither a model nor torch in memory: what needs them when a run is signed is a process of its own
(`daemon.run_files.served_runs`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from p2pdiloco.adapters.data_dir import TEMP_SUFFIX, Files
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.adapters.multiaddrs import check_lan
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.adapters.run_store import run_folder, signed_files
from p2pdiloco.config.settings import BootstrapSettings
from p2pdiloco.config.values import parse_web
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network.discovery import announce_runs, look_up_again, publish_runs
from p2pdiloco.daemon.network.holes import Holes
from p2pdiloco.daemon.network.reach import DialBack
from p2pdiloco.daemon.network.router import Router
from p2pdiloco.daemon.notice import Invite
from p2pdiloco.daemon.program import (
    begin,
    data_folder,
    peers_to_join,
    plain,
    print_addresses,
    print_join,
    run_program,
    tell_status,
    transport_of,
    unless_stopped,
)
from p2pdiloco.daemon.run_files.known_runs import (
    PublishedRun,
    WaysIn,
    is_beginning,
    note_ways,
    peers_of,
    saved_runs,
)
from p2pdiloco.daemon.run_files.ownership import LINK_USES, Ownership
from p2pdiloco.daemon.run_files.served_runs import (
    OWNER_KEY,
    Mirror,
    check_key_is_here,
    is_kept_run_toml,
    look_at_saved,
    name_in,
    owner_here,
    refuse_to_split,
    sign_apart,
    signed_from,
)
from p2pdiloco.errors import StorageError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.web.server import serving
from p2pdiloco.web.sources import AskedSource, StartingSource, Views

logger = logging.getLogger("p2pdiloco")
WATCH_S = 30.0


def run_bootstrap(settings: BootstrapSettings) -> int:
    """Run a bootstrap peer until it is told to stop. Returns the exit status."""
    if settings.lan:
        check_lan()
    # Who has runs to serve does so without those that it once joined.
    has_runs = bool(signed_files(settings.data_dir))
    join = peers_to_join(settings, has_runs)
    unknown = () if join else settings.join
    settings = replace(settings, join=join)
    return run_program(lambda stop: _bootstrap(settings, has_runs, unknown, stop), settings.log)


async def _bootstrap(
    settings: BootstrapSettings, has_runs: bool, unknown: Sequence[str], stop: asyncio.Event
) -> None:
    """Serve until told to stop. `unknown`: names of the DNS, where nobody was found behind them yet."""
    with data_folder(settings):
        identity = Identity.load_or_create(settings.data_dir / "identity.key")
        first = StartingSource("bootstrap", "", identity.peer_id)
        page = parse_web(settings.web), settings.data_dir, first, settings.web_public
        async with serving(*page) as views:
            await _open(settings, identity, has_runs, unknown, views, stop)


async def _open(
    settings: BootstrapSettings,
    identity: Identity,
    has_runs: bool,
    unknown: Sequence[str],
    views: Views,
    stop: asyncio.Event,
) -> None:
    # Its address is well known: it relays from the start, and tells others what it sees of them.
    options = P2PDOptions(relay=settings.relay, force_reachability="public")
    transport = await transport_of(settings, identity, options)
    door, router = FrontDoor(DialBack(transport), Holes(transport)), Router(transport, settings.port_map)
    await unless_stopped(begin(transport, door, settings, has_runs), stop)
    await unless_stopped(router.begin(), stop)
    looking = look_up_again(transport, unknown)
    try:
        await unless_stopped(router.answer(), stop)
        if not stop.is_set():
            await unless_stopped(_Bootstrap(settings, transport, door, views, stop).run(), stop)
        logger.info("leaving")
    finally:
        looking.cancel()
        await router.end()
        await transport.close()


@dataclass
class _Bootstrap:
    """A bootstrap whose transport is open."""

    _settings: BootstrapSettings
    _transport: HivemindTransport
    _door: FrontDoor
    _views: Views
    _stop: asyncio.Event

    def __post_init__(self) -> None:
        self._hosts = [peer for peer in peers_of(self._settings.join) if peer != self._transport.peer_id]
        files, ids = self._settings.run_files(), self._settings.run_ids()
        kept = saved_runs(self._settings.data_dir)
        lacking = [wanted for wanted in ids if not any(is_beginning(wanted, run) for run in kept)]
        if lacking and not self._hosts:
            raise UserError(
                f"--run {lacking[0]} is no file here, and there is nobody to fetch a run from",
                "add --join ADDRESS",
            )
        self._owner = owner_here(self._settings.data_dir)
        self._mirror = (
            Mirror(self._transport, self._settings.data_dir, self._hosts, ids) if ids or not files else None
        )

    async def run(self) -> None:
        for file in self._settings.run_files():
            await refuse_to_split(self._transport, self._hosts, name_in(file), self._owner_of(file))
        served = await _served_runs(self._settings, self._stop)
        if self._stop.is_set():
            return
        # What was kept is served at once: the peers that the rest comes from may be slow, or hostile.
        kept = served
        if self._mirror is not None and not served:
            served = await self._mirror.first_runs()
        for run in served:
            self._serve(run)
        addresses = self._transport.addresses()
        print_addresses(addresses, "bootstrap")
        folder = self._settings.data_dir
        await asyncio.to_thread(note_ways, folder, WaysIn.reached_at, addresses)
        print_join(addresses, served, await asyncio.to_thread(invites_here, folder, served, addresses))
        async with asyncio.TaskGroup() as group:
            group.create_task(publish_runs(self._transport, self._door.runs))
            group.create_task(announce_runs(self._transport, self._door.runs, self._settings.lan))
            group.create_task(self._watch())
            if self._settings.web:
                source = AskedSource(self._transport, self._door.published, self._settings.data_dir)
                self._views.enter(source)
                group.create_task(source.watch())
            if self._mirror is not None:
                group.create_task(self._fetch(self._mirror, kept))

    def _owner_of(self, file: Path) -> str:
        """Peer id of the owner of this run.toml's run; empty: one who has no key yet."""
        here = self._settings.data_dir
        owners = (
            run.signed.owner for run in saved_runs(here).values() if is_kept_run_toml(file, here, run.id)
        )
        return self._owner or next(owners, "")

    async def _watch(self) -> None:
        while True:
            peers = self._transport.peers_connected()
            tell_status(f"peers connected: {peers}")
            logger.info("peers connected: %(peers)d", {"peers": peers})
            await asyncio.sleep(WATCH_S)

    async def _fetch(self, mirror: Mirror, kept: Sequence[PublishedRun]) -> None:
        """Serve what the peers have beside what was `kept`, as it comes."""
        if not kept:  # what they have was just fetched
            await asyncio.sleep(WATCH_S)
        told = False
        while True:
            try:
                fetched = await mirror.look([known.run for known in self._door.runs()])
            except StorageError as error:  # what is here is served on
                logger.warning("nothing can be fetched from the peers to join: %s", error)
                fetched = []
            _warn_of_namesakes(kept, fetched, self._settings.data_dir)
            for run in fetched:
                self._serve(run)
                print_join(self._transport.addresses(), [run])
            missing = mirror.missing([known.run for known in self._door.runs()])
            if missing and not told:
                told = True
                logger.warning('the peers to join gave no run "%s" yet: they are asked again', missing[0])
            await asyncio.sleep(WATCH_S)

    def _serve(self, run: PublishedRun) -> None:
        where = self._settings.data_dir
        self._door.add_run(run, where)
        logger.info("serving run %(run_name)s (%(run).12s)", {"run_name": run.name, "run": run.id})
        if run.manifest.admission.mode == "invite" and run.signed.owner == owner_here(where):
            words = "the link admits %d nodes; for more: p2pdiloco invite %s --data-dir %s"
            logger.info(words, LINK_USES, run.name, where)


def invites_here(data_dir: Path, runs: Sequence[PublishedRun], addresses: Sequence[str]) -> dict[str, Invite]:
    """Find or make, by run, the invites that the links of this folder's own runs carry.

    Raises: UserError, StorageError (as `Ownership.standing_invite`).
    """
    owner = owner_here(data_dir)
    ours = [run for run in runs if run.manifest.admission.mode == "invite" and run.signed.owner == owner]
    key = Identity.load_or_create(data_dir / OWNER_KEY) if ours else None
    return {run.id: Ownership(data_dir, run.id, key).standing_invite(addresses) for run in ours if key}


def _warn_of_namesakes(
    saved: Sequence[PublishedRun], fetched: Sequence[PublishedRun], data_dir: Path
) -> None:
    """Say that a run of this folder has the name of one that was fetched: by it, a join could mean both."""
    for run in saved:
        for other in fetched:
            if run.name == other.name and run.signed.owner != other.signed.owner:
                logger.warning(
                    "this folder has another run called %s too, so whoever joins must name one by its id; to "
                    "serve the fetched one only, move %s away",
                    run.name,
                    run_folder(data_dir, run.id),
                )


async def _served_runs(settings: BootstrapSettings, stop: asyncio.Event) -> list[PublishedRun]:
    """List the runs to serve: what is asked for, signed if it was not, then whatever was signed here earlier.

    Whether it computes their version 0 each node sees itself.

    Raises:
        UserError, ConfigError: as `sign_apart`; or the owner's key is lacking.
        StorageError: a manifest is damaged, and no run.toml that was given makes it again.
    """
    folder = settings.data_dir
    owner = owner_here(folder)
    for path in sorted((folder / "runs").glob(f"*/*{TEMP_SUFFIX}")):  # of a signing that was ended
        Files().delete(path)
    saved = await asyncio.to_thread(look_at_saved, folder)
    files = settings.run_files()
    unsigned = [file for file in files if not signed_from(file, saved.runs, folder, owner)]
    if unsigned:
        if not owner:
            for file in unsigned:
                check_key_is_here(file, name_in(file), folder)
        await unless_stopped(sign_apart(folder, unsigned, plain(settings.log)), stop)
        if stop.is_set():
            return []
        saved, owner = await asyncio.to_thread(look_at_saved, folder), owner_here(folder)
    for error in saved.damaged:
        raise StorageError(str(error), "move it away; its run.toml, given with --run, makes it again")
    for path in saved.lacking:
        logger.warning("%s is not served: its version 0 or its tokenizer is not here any more", path)
    asked = {signed_from(file, saved.runs, folder, owner) for file in files}
    return sorted(saved.runs, key=lambda run: run.id not in asked)

"""Examining a machine, and the way from it to a run: one check after the other, each with a bound in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

from p2pdiloco.adapters.data_dir import is_in_use
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.cli.doctor import machine, names, peers, run_checks
from p2pdiloco.cli.doctor.findings import Diagnosis, bad, good, skipped, warning
from p2pdiloco.cli.doctor.looking import looked
from p2pdiloco.cli.doctor.probe import LOAD_S, WITHIN_S, probed
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.settings import DoctorSettings, NodeSettings
from p2pdiloco.config.values import expanded, peer_in
from p2pdiloco.core.api.types import WORDS, Reach
from p2pdiloco.daemon.admission import joined_through_before
from p2pdiloco.daemon.network.discovery import ask_status
from p2pdiloco.daemon.run_files.known_runs import load_own_addresses, load_peers
from p2pdiloco.errors import RemoteError, StorageError, TransportError, UserError, without_torch

CHECK_S = 20.0
LINK_S = 45.0
MEMBERS = 3
"""Members met before that are dialled."""


def _all(look: Callable[[], Iterable[Diagnosis]]) -> list[Diagnosis]:
    return list(look())


async def examine(settings: DoctorSettings) -> AsyncIterator[Diagnosis]:
    """Look at everything, and tell of each thing when it was looked at."""
    data_dir = expanded(settings.data_dir or NodeSettings().data_dir)
    local: dict[str, Callable[[], Iterable[Diagnosis]]] = {
        "python": machine.python_here,
        "memory": partial(machine.memory_and_disk, data_dir),
        "limits": machine.files_limit,
        "folder": partial(machine.data_folder, data_dir),
        "processes": machine.leftovers,
    }
    for check, look in local.items():
        async for found in looked(check, partial(asyncio.to_thread, _all, look), CHECK_S):
            yield found
    async for found in looked("torch", machine.torch_here, machine.TORCH_S):
        yield found
    with contextlib.suppress(StorageError):  # said above
        runs_here = data_dir.is_dir() and is_in_use(data_dir)
        own = load_own_addresses(data_dir)[:1] if runs_here else []
    given, met = whom_to_dial(settings, data_dir, own)
    addresses: list[str] = []

    async def check_addresses() -> list[Diagnosis]:
        found, behind = await names.check_addresses(given)
        addresses.extend(behind)
        return found if given else [*found, names.none_given()]

    async for found in looked("addresses", check_addresses, 2 * CHECK_S):
        yield found
    if not addresses:
        return
    logging.getLogger().setLevel(logging.CRITICAL)  # what is worth a line becomes a finding
    try:
        async with peers.dialler(data_dir, listens=not runs_here) as transport:
            visit = Visit(transport, settings, data_dir, own, met)
            async for found in visit.examine(addresses):
                yield found
    except UserError as error:
        yield bad("network", str(error), error.hint)
    async for found in looked(
        "libp2p", partial(probed, settings.probe_python, addresses[0]), WITHIN_S + 2 * LOAD_S
    ):
        yield found


def whom_to_dial(
    settings: DoctorSettings, data_dir: Path, own: Sequence[str]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """List the addresses to look at: those that are given, else the node's own that runs here, those that it
    was last told to join through, and those of members that it met. Of all but the told ones the peer ids,
    too: a node's own address may lead nowhere from inside its network, and members leave."""
    if settings.join or not data_dir.is_dir():
        return settings.join, frozenset()
    told = joined_through_before(NodeSettings(data_dir=data_dir, run=settings.run))
    members = [address for address in load_peers(data_dir)[-MEMBERS:] if address not in told]
    met = frozenset(map(peer_in, (*own, *members))) - frozenset(map(peer_in, told))
    return tuple(dict.fromkeys([*own, *told, *members])), met


class Visit:
    """Examination of peers, and of a run by way of them."""

    def __init__(
        self,
        transport: HivemindTransport,
        settings: DoctorSettings,
        data_dir: Path,
        own: Sequence[str],
        met: Collection[str] = (),
    ) -> None:
        """`own`: address of the node that runs here. `met`: peers that were met before, and not named."""
        self._met = met
        self._transport, self._settings, self._data_dir = transport, settings, data_dir
        self._own_addresses = own
        self._own = [address.rpartition("/p2p/")[2] for address in own]
        self._reached: list[str] = []
        self._run = ""
        self._manifest: Manifest | None = None

    async def examine(self, addresses: Sequence[str]) -> AsyncIterator[Diagnosis]:
        """Look at one thing after the other."""
        async for found in looked("peers", partial(self._dial, addresses), CHECK_S):
            yield found
        if not self._reached:
            return
        for check, look, within_s in (
            ("clock", self._clock, CHECK_S),
            ("run", self._find, CHECK_S),
            ("versions", self._versions, CHECK_S),
            ("memory", self._footprint, CHECK_S),
            ("port", self._reach, CHECK_S),
            ("link", self._link, LINK_S),
        ):
            async for found in looked(check, look, within_s):
                yield found

    async def _dial(self, addresses: Sequence[str]) -> list[Diagnosis]:
        found, self._reached = await peers.dial(self._transport, addresses, self._met)
        return found

    async def _clock(self) -> list[Diagnosis]:
        return await peers.check_clock(self._transport, self._reached)

    async def _find(self) -> list[Diagnosis]:
        found, listed, self._manifest = await run_checks.find(
            self._transport, self._settings.run, self._reached
        )
        self._run = listed.run if listed is not None else ""
        return [found]

    async def _versions(self) -> list[Diagnosis]:
        if not self._run:
            return [skipped("versions", "the run was not found")]
        return await peers.check_versions(self._transport, self._run)

    async def _footprint(self) -> list[Diagnosis]:
        if self._manifest is None:
            return [skipped("memory", "what a run takes is not known: it was not found")]
        try:
            return await asyncio.to_thread(
                lambda manifest: list(run_checks.footprint(manifest, self._data_dir)), self._manifest
            )
        except ModuleNotFoundError as error:
            missing = without_torch(error)
            if missing is None:
                raise
            return [skipped("memory", f"what the run takes: {missing}", missing.hint)]

    async def _reach(self) -> list[Diagnosis]:
        if not self._own:
            return await peers.check_reach(self._transport, self._reached)
        try:
            if self._own[0] not in self._reached:  # others were named
                await self._transport.connect(self._own[0], self._own_addresses)
            report, _ = await ask_status(self._transport, self._own[0], self._run)
        except (TransportError, RemoteError):  # a bootstrap, or a node of another run
            silent = "a node or bootstrap runs here, and does not say whether others reach it"
            return [skipped("port", silent)]
        words = f"the node that runs here is reached: {report.members[0].reach or 'not known yet'}"
        if report.members[0].reach == WORDS[Reach.DIRECT]:
            return [good("port", words)]
        return [warning("port", words, f"between is {peers.between()}")]

    async def _link(self) -> list[Diagnosis]:
        others = [peer for peer in self._reached if peer not in self._own]
        if not others:
            return [
                skipped("link", "the only peer that was named runs on this machine", "--join another one")
            ]
        return await run_checks.link(self._transport, others[0], self._manifest)

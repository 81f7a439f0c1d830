"""`plan --join`: what the link to a live peer carries, and the manifest that this peer lists."""

from __future__ import annotations

import asyncio
import logging

from p2pdiloco.cli.visitor import visit, visitor
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.values import peer_in
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.network.reach import PAUSE_S, MeasuredLink, measure
from p2pdiloco.daemon.run_files.known_runs import ListedRun, choose_run, pull_manifest, run_names
from p2pdiloco.errors import RemoteError, TransportError, UserError
from p2pdiloco.ports import Transport

TIMEOUT_S = 45.0
"""Time of the whole measurement: more than its parts take on the slowest link that can be measured."""


def measured_link(join: str, run: str, with_manifest: bool) -> tuple[MeasuredLink, Manifest | None]:
    """The link to a peer (a checked multiaddr), and, if wanted, the manifest of the run that it lists.

    Raises:
        UserError: the peer is not there, refuses, is too old, lists no such run or several.
    """
    logging.getLogger().setLevel(logging.ERROR)  # what is worth a line becomes an error here
    return visit(_visit(join, run, with_manifest))


async def _visit(join: str, run: str, with_manifest: bool) -> tuple[MeasuredLink, Manifest | None]:
    peer = peer_in(join)
    try:
        async with asyncio.timeout(TIMEOUT_S), visitor((join,)) as transport:
            manifest = await listed_manifest(transport, peer, run) if with_manifest else None
            return await measure(transport, peer), manifest
    except TimeoutError:
        raise UserError(
            f"{peer} did not answer within {TIMEOUT_S:g} s", "give the link's rate with --upload"
        ) from None


async def listed_manifest(transport: Transport, peer: str, wanted: str) -> Manifest:
    """The manifest of the run of that name or id that the peer lists; where it lists one only, of that.

    Raises:
        UserError: none fits, or several do, or the peer does not give it.
    """
    try:
        reply = await transport.send(peer, wire.QUERY + wire.encode(wire.RunsQuery()), PAUSE_S)
        runs = wire.decode(reply, wire.RunList).runs
    except (RemoteError, TransportError) as error:
        raise UserError(f"{peer} does not say which runs it knows: {error}", "give a run.toml") from error
    found = {summary.run: ListedRun(summary.run, [summary.name], [peer]) for summary in runs}
    chosen = choose_run(found, wanted)
    if chosen is None:
        names = run_names(found.values()) or "none"
        raise UserError(f'{peer} knows no run "{wanted}"', f"it knows: {names}; or give a run.toml")
    try:
        signed = await pull_manifest(transport, chosen)
    except RemoteError as error:
        raise UserError(f"the manifest of {chosen.name} is not valid: {error}") from error
    if signed is None:
        raise UserError(f"{peer} does not give the manifest of {chosen.name}", "give the run.toml")
    return signed[1]

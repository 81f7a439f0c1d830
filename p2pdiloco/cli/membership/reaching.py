"""Members of a run that somebody who only asks can reach: those to join through, and listed ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from p2pdiloco.daemon import wire
from p2pdiloco.daemon.network.discovery import ask, presences
from p2pdiloco.errors import PeerUnreachable
from p2pdiloco.ports import Transport
from p2pdiloco.release import WIRE_VERSION

MAX_ASKED = 16
MAX_KEEPERS = 6
LOOKS, PAUSE_S = 3, 0.5


class Reached(Struct):
    """Peers of a run."""

    peers: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """Names by which listed members call themselves."""
    lately: set[str] = field(default_factory=set)
    """Peers that were called as was asked, as members remember it."""
    versions: set[int] = field(default_factory=set)
    """Other versions of the wire that are listed."""


async def reach(transport: Transport, run: str, joined: Iterable[str], called: str = "") -> Reached:
    """Connect to at most `MAX_ASKED` peers of a run, those to join through first.

    `called`: name whose bearers they are asked for.
    """
    found = Reached(list(dict.fromkeys(joined)))
    for _ in range(LOOKS):  # who has just joined the DHT may not find all of it at once
        records = await presences(transport, run)
        if records:
            break
        await asyncio.sleep(PAUSE_S)
    for peer, record in _keepers_first(records):
        if record.wire_version != WIRE_VERSION:
            found.versions.add(record.wire_version)
            continue
        found.names[peer] = record.name
        if peer in found.peers or len(found.peers) >= MAX_ASKED:
            continue
        try:
            await transport.connect(peer, record.addresses)
        except PeerUnreachable:
            continue
        found.peers.append(peer)
    if 0 < len(called) <= wire.MAX_NAME:
        query = wire.NameQuery(run, called)
        for answer in await asyncio.gather(*(ask(transport, p, query, wire.NameAnswer) for p in found.peers)):
            found.lately.update(answer.peers if answer is not None else ())
    return found


def _keepers_first(records: Mapping[str, wire.Presence]) -> list[tuple[str, wire.Presence]]:
    """List records; a few of those that say that they keep the run's history come first."""
    keepers = [(peer, record) for peer, record in records.items() if record.keeps_history][:MAX_KEEPERS]
    return list((dict(keepers) | dict(records)).items())

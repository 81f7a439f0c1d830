"""Asking members of a run: who they are by the DHT, how it is doing, and other questions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from p2pdiloco.core.api.types import Wire
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import StatusReport, decode_status
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Transport
from p2pdiloco.release import WIRE_VERSION

ASK_TIMEOUT_S, STATUS_TIMEOUT_S = 5.0, 3.0
T = TypeVar("T")
logger = logging.getLogger(__name__)


def _ignored(_peer: str, _why: str) -> None:
    """Tell nobody."""


async def presences(
    transport: Transport, run: str, refused: Callable[[str, str], None] = _ignored
) -> dict[str, wire.Presence]:
    """Peer id -> presence record, of whatever protocol version. `refused` is told of those that cannot be
    read, and why."""
    records = {}
    for peer, value in (await transport.get_records(wire.members_key(run))).items():
        try:
            records[peer] = wire.decode(value, wire.Presence)
        except RemoteError as error:
            refused(peer, f"its presence record is not readable: {error}"[:120])
    return records


async def listed_members(
    transport: Transport, run: str, refused: Callable[[str, str], None] = _ignored
) -> dict[str, tuple[str, ...]]:
    """Peer id -> addresses, of those with a presence record that we understand; newest start first.
    `refused` is told of others, and why."""
    records = await presences(transport, run, refused)
    for peer, record in list(records.items()):
        if record.wire_version != WIRE_VERSION:
            refused(peer, f"speaks protocol version {record.wire_version}, not {WIRE_VERSION}")
            del records[peer]
    newest = sorted(records, key=lambda peer: -records[peer].incarnation)
    return {peer: records[peer].addresses for peer in newest}


async def ask_status(transport: Transport, peer: str, run: str) -> tuple[StatusReport, int]:
    """Ask a member for its report; returns it with its size in bytes.

    Raises: PeerUnreachable, RemoteError (refused, or not a report).
    """
    began = time.monotonic()
    reply = await transport.send(peer, wire.QUERY + wire.encode(wire.StatusQuery(run)), STATUS_TIMEOUT_S)
    report = decode_status(reply)
    if report.run_id != run:
        raise RemoteError("bad-status", "about another run")
    if report.answered_by != peer:
        raise RemoteError("bad-status", "in the name of another")  # one would else be several witnesses
    logger.debug("%s answered in %.3f s", peer, time.monotonic() - began)
    return report, len(reply)


async def ask(transport: Transport, peer: str, query: Wire, answer: type[T]) -> T | None:
    """Ask a peer; None: it does not answer this."""
    try:
        return wire.decode(await transport.send(peer, wire.QUERY + wire.encode(query), ASK_TIMEOUT_S), answer)
    except (TransportError, RemoteError):
        return None

"""Asking whether a run would let this node in, and what keeps it out."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from p2pdiloco.cli.joining import joined_through
from p2pdiloco.cli.membership.reaching import reach
from p2pdiloco.cli.visitor import visit, visitor
from p2pdiloco.daemon.network.discovery import ask
from p2pdiloco.daemon.papers import AdmissionFault, Invite
from p2pdiloco.daemon.run_files.known_runs import (
    RunSearch,
    is_whole_id,
    is_word,
    load_peers,
    peers_of,
    way_of,
)
from p2pdiloco.daemon.wire import JoinAnswer, MayJoin
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.ports import Transport
from p2pdiloco.release import WIRE_VERSION


def why_not(run: str, join: tuple[str, ...], folder: Path, timeout_s: float) -> str:
    """Say why this folder's node cannot join; empty: it can. Raises: UserError (there is nobody to ask)."""
    try:
        way = way_of(join, word=run) if is_word(run) else way_of(join, run)
    except ConfigError as error:
        return str(error)
    invite = way.link.invite if way.link is not None else None
    if invite is not None and 0 < invite.grant.expires < time.time():
        return str(AdmissionFault.EXPIRED)
    addresses = tuple(dict.fromkeys([*joined_through(way.join)[0], *load_peers(folder)]))
    if not addresses:
        raise UserError("there is no peer to ask", "give a run link, an invite, or --join ADDRESS")
    key = folder / "identity.key"
    me = Identity.load_or_create(key) if key.exists() else Identity.generate()
    try:
        return visit(_asked(way.run, invite, addresses, me.peer_id, timeout_s))
    except UserError as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"


async def _asked(
    wanted: str, invite: Invite | None, addresses: tuple[str, ...], me: str, timeout_s: float
) -> str:
    joined = peers_of(addresses)
    async with asyncio.timeout(timeout_s), visitor(addresses) as transport:
        run = await _run_id(transport, wanted, joined)
        if not run:
            return f'these peers know no run "{wanted}"'
        reached = await reach(transport, run, joined)
        query = MayJoin(run, me, invite.grant if invite is not None else None)
        for peer in reached.peers:
            answer = await ask(transport, peer, query, JoinAnswer)
            if answer is not None:
                return "" if answer.fault is None else str(answer.fault)
        if reached.versions:
            theirs = ", ".join(map(str, sorted(reached.versions)))
            return f"its members speak protocol version {theirs}, this release {WIRE_VERSION}"
        return "no member of the run can be reached"


async def _run_id(transport: Transport, wanted: str, joined: list[str]) -> str:
    if is_whole_id(wanted):
        return wanted
    chosen = await RunSearch(transport, wanted, joined).look()
    return chosen.run if chosen is not None else ""

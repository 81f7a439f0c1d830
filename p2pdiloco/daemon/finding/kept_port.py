"""Port that a peer listened on last. It is taken again, so that addresses which people have stay true."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.config.settings import ANY_ADDRESS
from p2pdiloco.errors import UserError
from p2pdiloco.util import clear_folder_at, read_note

logger = logging.getLogger(__name__)
FILE = "port.txt"
TRIES, PAUSE_S = 4, 0.5
"""Attempts to take it: p2pd of a node that was killed has it for a moment longer."""


async def listen_again(data_dir: Path, wished: Sequence[str]) -> Sequence[str]:
    """Find out where to listen: as wished, or if any port will do, at the last one, if it is free."""
    if tuple(wished) != ANY_ADDRESS:
        return wished
    port = read_note(data_dir / FILE, _decode, logger.warning)
    if port is None:
        return wished
    again = [address.replace("/tcp/0", f"/tcp/{port}") for address in wished]
    for _ in range(TRIES):
        try:
            multiaddrs.claim_ports(again)
            return again
        except UserError:
            await asyncio.sleep(PAUSE_S)
    logger.warning(
        "port %(port)d, which this peer had, is taken: addresses that others have do not hold any more",
        {"port": port},
    )
    return wished


def keep_port(data_dir: Path, listening: Sequence[str]) -> None:
    """Keep the first port of these addresses. A failure is logged: the next start may get another one."""
    path = data_dir / FILE
    ports = [found[1] for address in listening if (found := multiaddrs.tcp_of(address)) is not None]
    if not ports:
        return
    try:
        clear_folder_at(path)
        path.write_text(f"{ports[0]}\n", "ascii")
    except OSError as error:
        logger.warning("this peer's port cannot be kept in %s: %s", path, error)


def _decode(content: bytes) -> int:
    port = int(content)
    if not 0 < port < 1 << 16:
        raise ValueError("no port")
    return port

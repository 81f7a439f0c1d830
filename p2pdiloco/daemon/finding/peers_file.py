"""Addresses of members met before, so that a node finds its swarm again when all others are gone.

They are in `<data_dir>/peers.txt`: one multiaddr with /p2p/ID a line, newest last. Losing it costs nothing
but that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from p2pdiloco.config.settings import check_peer_address
from p2pdiloco.errors import ConfigError
from p2pdiloco.notes import read_note

logger = logging.getLogger(__name__)
MAX_PEERS = 16


def peers_file(data_dir: Path) -> Path:
    """Path of the file with the addresses."""
    return data_dir / "peers.txt"


def load_peers(data_dir: Path) -> list[str]:
    """Load the remembered addresses; lines that are none are left out."""
    return read_note(peers_file(data_dir), _decode, logger.warning) or []


def _decode(content: bytes) -> list[str]:
    """Raises: ValueError: of all that is there, nothing is an address."""
    found = []
    for line in content.decode("ascii", "replace").splitlines():
        try:
            check_peer_address(line)
        except ConfigError:
            continue
        found.append(line)
    if content and not found:
        raise ValueError("there is no address in it")
    return found[-4 * MAX_PEERS :]


def save_peers(data_dir: Path, peers: Sequence[Sequence[str]]) -> None:
    """Save the addresses of the last `MAX_PEERS` peers, those of earlier lives as long as there is room.

    So whoever met only one peer this time does not forget all others. A failure is logged: it costs this
    memory only.
    """
    path = peers_file(data_dir)
    temporary = path.with_name(path.name + ".tmp")
    kept = {_peer_of(addresses[0]): list(addresses[:4]) for addresses in peers if addresses}
    earlier: dict[str, list[str]] = {}
    for address in load_peers(data_dir):
        if _peer_of(address) not in kept:
            earlier.setdefault(_peer_of(address), []).append(address)
    lines = [line for found in [*earlier.values(), *kept.values()][-MAX_PEERS:] for line in found]
    try:
        temporary.write_text("".join(f"{line}\n" for line in lines), "ascii")
        temporary.replace(path)
    except (OSError, UnicodeEncodeError) as error:
        # A temporary file that may be left behind is overwritten the next time.
        logger.warning("the addresses of peers cannot be kept in %s: %s", path, error)


def _peer_of(address: str) -> str:
    return address.rpartition("/p2p/")[2]

"""Addresses of members met before, so that a node finds its swarm again when all others are gone.

They are in `<data_dir>/peers.txt`: one multiaddr with /p2p/ID a line, newest last. Losing it costs nothing
but that. Beside it `addresses.txt` has a node's own ones, which its owner's invites name, and `join.txt` what
it was last told to join through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.config.values import check_join_address, check_peer_address, peer_in
from p2pdiloco.errors import ConfigError, StorageError
from p2pdiloco.util import read_note

logger = logging.getLogger(__name__)
MAX_PEERS = 16
MAX_JOINED_THROUGH = 32
OWN = "addresses.txt"


def peers_file(data_dir: Path) -> Path:
    """Path of the file with the addresses."""
    return data_dir / "peers.txt"


def load_peers(data_dir: Path) -> list[str]:
    """Load the remembered addresses; lines that are none are left out."""
    return read_note(peers_file(data_dir), _decode, logger.warning) or []


def _decode(content: bytes, check: Callable[[str], None] = check_peer_address) -> list[str]:
    """Raises: ValueError: of all that is there, nothing is an address."""
    found = []
    for line in content.decode("ascii", "replace").splitlines():
        try:
            check(line)
        except ConfigError:
            continue
        found.append(line)
    if content and not found:
        raise ValueError("there is no address in it")
    return found[-4 * MAX_PEERS :]


def join_file(data_dir: Path) -> Path:
    """Path of the file with the addresses that were last given to join through."""
    return data_dir / "join.txt"


def load_joined_through(data_dir: Path) -> tuple[str, ...]:
    """Load those addresses, names of the DNS among them."""
    decode = partial(_decode, check=check_join_address)
    return tuple(read_note(join_file(data_dir), decode, logger.warning) or ())[:MAX_JOINED_THROUGH]


def keep_joined_through(data_dir: Path, addresses: Sequence[str]) -> None:
    """Keep the addresses that are given to join through, in place of earlier ones, for starts without any.

    A failure is logged: such a start then finds members only."""
    kept = tuple(addresses[:MAX_JOINED_THROUGH])
    if not kept or kept == load_joined_through(data_dir):
        return
    text = "".join(f"{line}\n" for line in kept)
    try:
        Files().save(join_file(data_dir), [text.encode()], durable=True, private=True)
    except StorageError as error:
        logger.warning("the addresses to join through are not kept for later starts: %s", error)


def load_own_addresses(data_dir: Path) -> list[str]:
    """Load the addresses under which the node of this folder was last reached, the best first."""
    return read_note(data_dir / OWN, _decode, logger.warning) or []


def save_own_addresses(data_dir: Path, addresses: Sequence[str]) -> None:
    """Save the node's own addresses. A failure is logged: an invite then needs to be told some."""
    path = data_dir / OWN
    try:
        path.write_text("".join(f"{line}\n" for line in addresses[:MAX_PEERS]), "ascii")
    except (OSError, UnicodeEncodeError) as error:
        logger.warning("this node's addresses cannot be kept in %s: %s", path, error)


def save_peers(data_dir: Path, peers: Sequence[Sequence[str]]) -> None:
    """Save the addresses of the last `MAX_PEERS` peers, those of earlier lives as long as there is room.

    So whoever met only one peer this time does not forget all others. A failure is logged: it costs this
    memory only.
    """
    path = peers_file(data_dir)
    temporary = path.with_name(path.name + ".tmp")
    kept = {peer_in(addresses[0]): list(addresses[:4]) for addresses in peers if addresses}
    earlier: dict[str, list[str]] = {}
    for address in load_peers(data_dir):
        if peer_in(address) not in kept:
            earlier.setdefault(peer_in(address), []).append(address)
    lines = [line for found in [*earlier.values(), *kept.values()][-MAX_PEERS:] for line in found]
    try:
        temporary.write_text("".join(f"{line}\n" for line in lines), "ascii")
        temporary.replace(path)
    except (OSError, UnicodeEncodeError) as error:
        # A temporary file that may be left behind is overwritten the next time.
        logger.warning("the addresses of peers cannot be kept in %s: %s", path, error)

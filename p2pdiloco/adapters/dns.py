"""Names of the DNS behind which several peers are: /dnsaddr/NAME, listed in TXT records of _dnsaddr.NAME.

This is the one place where names are looked up. The hosts of /dns4, /dns6 and /dns p2pd looks up itself where
a person or a member names them, and dials every address that they have; a stranger's are looked up here
(`ips_behind`). Format:
https://github.com/multiformats/multiaddr/blob/master/protocols/DNSADDR.md
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dns.exception import DNSException
from dns.name import from_text
from dns.resolver import NXDOMAIN, Resolver

from p2pdiloco.config.values import DNSADDR, check_join_address, check_peer_address
from p2pdiloco.errors import ConfigError, UserError

logger = logging.getLogger(__name__)
LOOKUP_S = 4.0
"""Time for one name."""
WALK_S = 15.0
"""Time for all names that are looked up at one start, those behind names included: whoever owns a name could
let us follow slow ones for hours."""
MAX_PEERS = 32
MAX_DEPTH = 3
"""Names that lead to names: so many in a row are followed."""
MAX_RECORDS = 128
MAX_IPS = 8


def peers_behind(addresses: Sequence[str], may_fail: bool = False) -> tuple[str, ...]:
    """Check the addresses of peers to join through, and put in place of each name what is listed behind it.

    `may_fail`: where nothing is found behind names, it is logged, and what is left is returned.

    Raises:
        ConfigError: an address is malformed.
        UserError: nothing is found behind the names, and no other address is given.
    """
    found = []
    faults = []
    until_s = time.monotonic() + WALK_S
    for address in addresses:
        check_join_address(address)
        try:
            found += _listed(address, 0, until_s) if address.startswith(DNSADDR) else [address]
        except NotListed as error:
            faults.append(str(error))
    if faults and not found and not may_fail:
        hint = f"ask whoever gave you the name, or join by an address; it needs TXT records: {EXAMPLE}"
        raise UserError("; ".join(faults), hint)
    for fault in faults:
        logger.warning("%s", fault)
    return tuple(dict.fromkeys(found))[: max(MAX_PEERS, len(addresses))]


EXAMPLE = '_dnsaddr.NAME "dnsaddr=/ip4/203.0.113.7/tcp/31337/p2p/12D3Koo..."'


class NotListed(Exception):
    """Error: nothing usable is found behind a name."""


def _listed(address: str, depth: int, until_s: float) -> list[str]:
    """List the addresses behind /dnsaddr/NAME, or /dnsaddr/NAME/p2p/ID: of this peer. Raises: NotListed."""
    name, _, peer = address.removeprefix(DNSADDR).partition("/p2p/")
    texts = [
        text.removeprefix("dnsaddr=")
        for text in txt_records(f"_dnsaddr.{name}", until_s)
        if "dnsaddr=" in text[:8]
    ]
    found = []
    for text in texts[:MAX_PEERS]:
        try:
            if text.startswith(DNSADDR):
                check_join_address(text)
                if depth + 1 < MAX_DEPTH:
                    with suppress(NotListed):  # another one may lead somewhere
                        found += _listed(text, depth + 1, until_s)
                continue
            check_peer_address(text)
        except ConfigError as error:
            logger.warning("what %s lists is passed over: %s", name, error)
            continue
        found.append(text)
    found = [text for text in found if not peer or text.endswith(f"/p2p/{peer}")]
    if not found:
        what = f"peer {peer}" if peer else "peers"
        raise NotListed(
            f"no {what} found behind the name {name}: its TXT records of _dnsaddr.{name} list none"
        )
    return found


def resolver() -> Resolver:
    """Make what asks this machine's name servers, each for 2 s. Raises: DNSException (it names none)."""
    return Resolver()


def txt_records(name: str, until_s: float) -> list[str]:
    """Get the TXT records of a name. Raises: NotListed."""
    return [b"".join(found.strings).decode("ascii", "replace") for found in _records(name, "TXT", until_s)]


def ips_behind(protocol: str, name: str, until_s: float) -> list[str]:
    """Get the first IP addresses of a host that a multiaddr names by dns, dns4 or dns6; empty if there are
    none."""
    found: list[str] = []
    for kind in {"dns4": ("A",), "dns6": ("AAAA",)}.get(protocol, ("A", "AAAA")):
        with suppress(NotListed):
            found += [str(ipaddress.ip_address(record.address)) for record in _records(name, kind, until_s)]
    return found[:MAX_IPS]


def _records(name: str, kind: str, until_s: float) -> list[Any]:
    """Ask for a name's records of a kind, until a time of the monotonic clock.

    Raises: NotListed (no name server answers, or it is no name).
    """
    left_s = min(LOOKUP_S, until_s - time.monotonic())
    if left_s <= 0:
        raise NotListed(f"the name {name} cannot be looked up in time")
    try:
        asked = from_text(name)
    except DNSException as error:
        raise NotListed(f"{name} is not a name of the DNS") from error
    try:
        found = resolver().resolve(asked, kind, search=False, lifetime=left_s, raise_on_no_answer=False)
    except NXDOMAIN:
        return []
    except (DNSException, OSError) as error:
        raise NotListed(f"the name {name} cannot be looked up: {error}") from error
    return list(found)[:MAX_RECORDS]

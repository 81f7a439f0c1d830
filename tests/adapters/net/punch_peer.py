"""A process with a real transport, for holes through NATs. What it has to say is JSON on stdout.

public FOLDER ADDRESS       a bootstrap's transport there; says its multiaddr; until stdin closes
home FOLDER INITIAL         behind a NAT: says its id as soon as it is connected. To each peer that it is told
    on stdin it punches a hole; says where the other end is, how long that took, and how long a push over it
    took (null: it did not come about); until stdin closes
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from unittest.mock import Mock

from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.adapters.multiaddrs import split_peer
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network.holes import Holes
from p2pdiloco.daemon.network.reach import DialBack
from p2pdiloco.errors import TransportError
from p2pdiloco.identity import Identity

PUSHED = bytes(4 << 20)
PUSH = wire.encode(wire.PushProbe(len(PUSHED)))


def say(*words: object) -> None:
    """One line."""
    print(json.dumps(words), flush=True)


async def be(what: str, folder: Path, word: str) -> None:
    """Until stdin closes."""
    path = folder / "identity.key"
    home = what == "home"
    listen, initial = ("/ip4/0.0.0.0/tcp/4001", [word]) if home else (f"/ip4/{word}/tcp/4001", [])
    options = P2PDOptions(force_reachability="private" if home else "public")
    transport = HivemindTransport(
        Identity.load_or_create(path), path, folder, [listen], initial_peers=initial, options=options
    )
    holes = Holes(transport, frozenset(split_peer(text)[1] for text in initial))
    door = FrontDoor(DialBack(transport), holes)
    door._gate = Mock(admits=lambda _peer: True) if home else None  # of an open run
    await transport.start(door)
    try:
        say(transport.peer_id if home else transport.addresses()[0])
        while peer := (await asyncio.to_thread(sys.stdin.readline)).strip():
            began_s = time.monotonic()
            punched = await holes.punch(peer)
            took_s = time.monotonic() - began_s
            link = await transport.link(peer)
            ips, pushed_s = (link.ips if punched and link is not None else ()), None
            try:
                if punched:
                    await transport.push(peer, PUSH, [PUSHED], 10.0)
                    pushed_s = time.monotonic() - began_s - took_s
            except TransportError as error:
                print(error, file=sys.stderr)
            say(ips, took_s, pushed_s)
    finally:
        await transport.close()


if __name__ == "__main__":
    _, role, where, address = sys.argv
    asyncio.run(be(role, Path(where), address))

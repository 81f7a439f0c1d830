"""A process with real transports, for holes through NATs. What it has to say is JSON on stdout.

public FOLDER ADDRESS...        a transport at each; says their multiaddrs; until stdin closes
home FOLDER INITIAL...          behind a NAT: says its id and an address at a relay as soon as it has one;
    dials what it is told on stdin, PEER ADDRESS, and says where the other end is once the connection is
    direct, how long that took, and a push over it; until stdin closes. Instead of what did not come about
    in time it says so
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from taking_peer import Answering

from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.adapters.multiaddrs import relayed
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.errors import TransportError
from p2pdiloco.identity import Identity

LOOK_S = 0.1
PATIENCE_S = 60.0
DIRECT_S = 20.0
AGAIN_S = 3.0
"""A hole is mostly there within a second."""
PUSHED = bytes(4 << 20)


def say(*words: object) -> None:
    """One line."""
    print(json.dumps(words), flush=True)


def transport_in(folder: Path, listen: str, initial: list[str], hidden: bool) -> HivemindTransport:
    """At home it knows that nobody can dial it."""
    folder.mkdir()
    path = folder / "identity.key"
    options = P2PDOptions(force_reachability="private" if hidden else "public")
    return HivemindTransport(
        Identity.load_or_create(path), path, folder, [listen], initial_peers=initial, options=options
    )


async def public(folder: Path, addresses: list[str]) -> None:
    """Until stdin closes."""
    made = [transport_in(folder / a, f"/ip4/{a}/tcp/4001", [], False) for a in addresses]
    try:
        await asyncio.gather(*(transport.start(Answering()) for transport in made))
        say(*(transport.addresses()[0] for transport in made))
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await asyncio.gather(*(transport.close() for transport in made))


async def relayed_address(transport: HivemindTransport) -> str:
    """As soon as there is one."""
    while True:
        for address in transport.addresses():
            if relayed(address):
                return address
        await asyncio.sleep(LOOK_S)


async def punched(transport: HivemindTransport, peer: str, address: str) -> tuple[str, ...]:
    """Dial it there; where the other end is, as soon as the connection is direct. If it is not soon, both had
    dialled each other in the same moment: each then begins to punch, refuses the other, and neither tries
    again over those connections. So they end, and another one is dialled."""
    while True:
        await transport.connect(peer, [address])
        for _ in range(round(AGAIN_S / LOOK_S)):
            link = await transport.link(peer)
            if link is not None and link.ips:
                return link.ips
            await asyncio.sleep(LOOK_S)
        await transport._disconnected(peer)


async def home(folder: Path, initial: list[str]) -> None:
    """Until stdin closes."""
    transport = transport_in(folder / "home", "/ip4/0.0.0.0/tcp/4001", initial, True)
    await transport.start(Answering())
    try:
        try:
            async with asyncio.timeout(PATIENCE_S):
                say(transport.peer_id, await relayed_address(transport))
        except TimeoutError:
            say(f"no address at a relay within {PATIENCE_S:g} s")
        while words := (await asyncio.to_thread(sys.stdin.readline)).split():
            began = time.monotonic()
            peer, address = words
            ips: tuple[str, ...] = ()
            try:
                async with asyncio.timeout(DIRECT_S):
                    ips = await punched(transport, peer, address)
                punched_s = time.monotonic() - began
                await transport.push(peer, b"%d" % len(PUSHED), [PUSHED], 10.0)
                say(ips, punched_s, time.monotonic() - began - punched_s)
            except TimeoutError:
                say([], DIRECT_S, f"no direct connection within {DIRECT_S:g} s")
            except TransportError as error:
                say(ips, time.monotonic() - began, str(error))
    finally:
        await transport.close()


if __name__ == "__main__":
    _, what, where, *rest = sys.argv
    asyncio.run((public if what == "public" else home)(Path(where), rest))

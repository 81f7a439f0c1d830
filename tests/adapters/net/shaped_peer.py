"""A process with a real transport, for tests over shaped links. What it has to say is JSON on stdout.

serve FOLDER ADDRESS                                  says its multiaddr; answers all until stdin closes
load FOLDER ADDRESS SECONDS BYTES UPLOAD DOWNLOAD PEER...      pushes so many bytes again and again to all
    peers at once, at most UPLOAD bits a second (0: no limit), and sends each a control message every 0.2 s;
    with DOWNLOAD it also pulls from all of them, at most so many bits a second
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from taking_peer import Answering

from p2pdiloco.adapters.flow import Limits
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.errors import TransportError
from p2pdiloco.identity import Identity

MESSAGE = bytes(300)
EVERY_S = 0.2
TIMEOUT_S = 20.0


def transport_in(folder: Path, address: str, initial: list[str], *most: float) -> HivemindTransport:
    """A transport that listens on this address only. `most`: bits a second up and down; 0: no limit."""
    path = folder / "identity.key"
    identity = Identity.load_or_create(path)
    limits = Limits.of(*most, asyncio.get_running_loop().time)
    listen = [f"/ip4/{address}/tcp/0"]
    return HivemindTransport(identity, path, folder, listen, initial_peers=initial, limits=limits)


async def serve(folder: Path, address: str, count: int) -> None:
    """Until stdin closes."""
    transports = []
    try:
        for number in range(count):
            (folder / f"{number}").mkdir()
            transports.append(transport_in(folder / f"{number}", address, [], 0, 0))
            await transports[-1].start(Answering())
        print(json.dumps([transport.addresses()[0] for transport in transports]), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        for transport in transports:
            await transport.close()


async def load(
    folder: Path, address: str, seconds: float, size: int, upload: float, download: float, peers: list[str]
) -> None:
    """Bulk and control at once."""
    transport = transport_in(folder, address, peers, upload, download)
    await transport.start(Answering())
    found: dict[str, Any] = {"quiet": [], "busy": [], "lost": 0, "pushes": 0, "windows": []}
    payload = [bytes(size)]
    end_s = time.monotonic() + seconds

    async def bulk(peer: str) -> None:
        while time.monotonic() < end_s:
            await transport.push(peer, b"%d" % size, payload, TIMEOUT_S)
            found["pushes"] += 1

    async def bulk_in(peer: str) -> None:
        while time.monotonic() < end_s:
            await transport.pull(peer, b"%d" % size, size, TIMEOUT_S)

    async def control(peer: str, kind: str, until_s: float) -> None:
        while time.monotonic() < until_s:
            began = time.monotonic()
            try:
                await transport.send(peer, MESSAGE, TIMEOUT_S)
                found[kind].append(time.monotonic() - began)
            except TransportError:
                found["lost"] += 1
            await asyncio.sleep(EVERY_S)

    try:
        names = [peer.rsplit("/", 1)[1] for peer in peers]
        for name, peer in zip(names, peers, strict=True):
            await transport.connect(name, [peer])
        await asyncio.gather(*(control(name, "quiet", time.monotonic() + 2) for name in names))
        print("loading", flush=True)
        end_s = time.monotonic() + seconds
        ways = ([bulk] if size else []) + ([bulk_in] if download else [])
        streams = [asyncio.create_task(way(name)) for way in ways for name in names]
        await asyncio.gather(*(control(name, "busy", end_s) for name in names))
        print("loaded", flush=True)
        found["windows"] = [transport._flow(name).window_bytes for name in names]
        for stream in streams:
            stream.cancel()
        ends = await asyncio.gather(*streams, return_exceptions=True)
        found["failed"] = [repr(end) for end in ends if isinstance(end, Exception)]
    finally:
        await transport.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _, what, folder, address, *rest = sys.argv
    if what == "serve":
        asyncio.run(serve(Path(folder), address, int(rest[0])))
    else:
        asyncio.run(
            load(Path(folder), address, float(rest[0]), int(rest[1]), *map(float, rest[2:4]), rest[4:])
        )

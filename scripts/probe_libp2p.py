"""Program that dials a peer with py-libp2p, an implementation of libp2p that shares no code with p2pd.

A Python that has py-libp2p runs it (docs/topics/doctor.md), so it imports nothing of p2pdiloco. It goes the
whole way: TCP, Noise, yamux, then the protocols ping and identify, and prints one line of JSON.

    probe/bin/python scripts/probe_libp2p.py /ip4/…/tcp/…/p2p/ID [SECONDS]
"""

from __future__ import annotations

import json
import logging
import sys
from importlib.metadata import version
from typing import Any

import multiaddr
import trio
from libp2p import new_host
from libp2p.host.ping import ID as PING
from libp2p.host.ping import perform_ping_roundtrip
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.identify import parse_identify_response
from libp2p.peer.peerinfo import info_from_p2p_addr

PINGS = 3
WITHIN_S = 20.0
MAX_IDENTIFY_BYTES = 1 << 16
MAX_WORDS = 200


async def probe(address: str, within_s: float) -> dict[str, Any]:
    """Dial, ping and identify a peer. Raises: whatever the library raises; trio.TooSlowError."""
    host = new_host(muxer_preference="YAMUX")
    peer = info_from_p2p_addr(multiaddr.Multiaddr(address))
    with trio.fail_after(within_s):
        async with host.run(listen_addrs=[]):
            await host.connect(peer)
            stream = await host.new_stream(peer.peer_id, [PING])
            times_ms = [await perform_ping_roundtrip(stream) for _ in range(PINGS)]
            await stream.reset()
            said = parse_identify_response(await _identify(host, peer.peer_id))
            return {
                "ok": True,
                "round_trip_ms": min(times_ms),
                "agent": said.agent_version[:MAX_WORDS],
                "protocols": sorted(said.protocols)[:64],
                "library": version("libp2p"),
            }


async def _identify(host: Any, peer: Any) -> bytes:
    stream = await host.new_stream(peer, [IDENTIFY])
    said = b""
    while len(said) < MAX_IDENTIFY_BYTES:
        more = await stream.read(4096)
        if not more:
            break
        said += more
        if _is_whole(said):
            break
    await stream.reset()
    return said


def _is_whole(said: bytes) -> bool:
    """Tell whether a message with its length before it (a varint) is all here."""
    size = shift = 0
    for at, byte in enumerate(said[:5]):
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return len(said) >= at + 1 + size
    return False


def main(arguments: list[str]) -> int:
    """Probe the peer at an address, and print what came of it."""
    logging.disable(logging.CRITICAL)
    within_s = float(arguments[1]) if len(arguments) > 1 else WITHIN_S
    try:
        found = trio.run(probe, arguments[0], within_s)
    except BaseException as error:  # noqa: BLE001  (a group of errors, too)
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        found = {"ok": False, "error": f"{type(first).__name__}: {first}"[:MAX_WORDS]}
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

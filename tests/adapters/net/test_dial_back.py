"""A peer is dialled anew, and must prove that it is the one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from net_helpers import Recorder

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.adapters.hivemind_net import OURS_ONLY, HivemindTransport
from p2pdiloco.errors import NobodyReached
from p2pdiloco.identity import Identity

pytestmark = pytest.mark.process

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@pytest.mark.net
async def test_only_the_very_peer_counts_as_reached(tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    transport = HivemindTransport(Identity.load_or_create(key), key, tmp_path, LOOPBACK)
    await transport.start(Recorder())
    try:
        ip, port = multiaddrs.tcp_of(transport.addresses()[0]) or ("", 0)
        assert await multiaddrs.peer_answers(transport.peer_id, ip, port, 20.0)
        assert not await multiaddrs.peer_answers(Identity.generate().peer_id, ip, port, 20.0)
        copy = HivemindTransport(Identity.load_or_create(key), key, tmp_path / "copy", LOOPBACK)
        assert await copy.answers_at(copy.peer_id, ip, port, 20.0), "a copy sees the original, and may end"
        assert await multiaddrs.peer_answers(transport.peer_id, "localhost", port, 20.0), "by a name, too"
    finally:
        await transport.close()
    assert not await multiaddrs.peer_answers(transport.peer_id, ip, port, 20.0)


@pytest.mark.net
async def test_who_joins_through_itself_only_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "identity.key"
    identity = Identity.load_or_create(key)
    itself = [f"/ip4/127.0.0.1/tcp/9/p2p/{identity.peer_id}"]
    transport = HivemindTransport(identity, key, tmp_path, LOOPBACK, itself)
    await transport.start(Recorder())
    await transport.close()
    assert OURS_ONLY in caplog.text


async def test_strangers_and_the_silent_are_not_reached() -> None:
    peer = Identity.generate().peer_id

    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(multiaddrs.MULTISTREAM + multiaddrs.NOISE + b"\x00\x70" + bytes(112))
        await writer.drain()
        writer.close()

    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    for handler in (babble, silence):
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            assert not await multiaddrs.peer_answers(peer, "127.0.0.1", port, 0.3)


@pytest.mark.net
async def test_a_host_name_that_nobody_knows_is_named(tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    identity = Identity.load_or_create(key)
    there = [f"/dns4/nobody.invalid/tcp/9/p2p/{Identity.generate().peer_id}"]
    transport = HivemindTransport(identity, key, tmp_path, LOOPBACK, there)
    with pytest.raises(NobodyReached, match=r"no address is known for the host name nobody\.invalid"):
        await transport.start(Recorder())


def test_binary_addresses_of_relays_are_read() -> None:
    relay = Identity.generate().peer_id
    text = f"/ip4/203.0.113.7/tcp/4001/p2p/{relay}/p2p-circuit"
    from p2pdiloco.adapters.hivemind_binding import address_bytes

    assert multiaddrs.join(multiaddrs.from_bytes(address_bytes(text))) == text
    assert multiaddrs.relayed(text)
    assert multiaddrs.direct_ips([text, "/ip4/7.0.0.1/tcp/1", "/ip4/7.0.0.1/tcp/2"]) == ("7.0.0.1",)
    for raw in (b"\x04\x01", b"\xff\xff\xff\xff\xff\xff", address_bytes(text)[:-3], b"\x85\x02"):
        with pytest.raises(ValueError):
            multiaddrs.from_bytes(raw)

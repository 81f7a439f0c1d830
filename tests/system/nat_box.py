"""The internet in one process: hosts with public addresses, and homes behind NATs, each in a namespace.

`python nat_box.py DEVICE=PUBLIC[,PUBLIC...][=INSIDE[=GATEWAY|full|symmetric]] ...` makes a TUN device for
every host, says "ready" on stdout, and moves packets until stdin closes. A host with INSIDE is at home: its
packets leave under the router's PUBLIC address, from the same port where that is free. What comes to a port
of the router is let in only from an address and port that the home has sent something to: as behind Linux'
masquerade, or most home routers. A `full` cone lets in whatever comes to a port that the home has sent
something from; a `symmetric` router takes another port for every address and port of others. A router with a
GATEWAY, its address inside, forwards ports when it is asked by NAT-PMP (RFC 6886).
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import sys
from dataclasses import dataclass, field

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
TCP, UDP = 6, 17
PMP = struct.pack("!H", 5351)
CHECKSUM_AT = {TCP: 16, UDP: 6}
Flow = tuple[int, int, bytes, bytes]
"""Protocol, port of the router, address and port of the other side."""


@dataclass
class Host:
    """One namespace's only link."""

    fd: int
    public: bytes
    inside: bytes = b""
    """Its own address, if it is at home."""
    gateway: bytes = b""
    """Address inside of its router, if that forwards ports."""
    kind: str = ""
    """Kind of its NAT: full, symmetric, or port-restricted."""
    forwarded: set[tuple[int, int]] = field(default_factory=set)
    """(protocol, port) of the router that everybody reaches."""
    ports: dict[tuple[int, int, bytes], int] = field(default_factory=dict)
    """(protocol, port of the home, place of the other side behind a symmetric NAT) -> port of the router."""
    owners: dict[tuple[int, int], int] = field(default_factory=dict)
    """The other way round."""
    allowed: set[Flow] = field(default_factory=set)


def rewritten(packet: bytes, at: int, address: bytes, port_at: int, port: bytes) -> bytes:
    """The packet with another address at `at` and port at `port_at` (from its transport header), checksums
    brought up to date (RFC 1624)."""
    data = bytearray(packet)
    head = (data[0] & 15) * 4
    protocol = data[9]
    old = bytes(data[at : at + 4])
    _fix(data, 10, old, address)
    check = head + CHECKSUM_AT[protocol]
    if protocol == TCP or data[check : check + 2] != b"\0\0":
        _fix(data, check, old, address)
        _fix(data, check, bytes(data[head + port_at : head + port_at + 2]), port)
    data[at : at + 4] = address
    data[head + port_at : head + port_at + 2] = port
    return bytes(data)


def _fix(data: bytearray, at: int, old: bytes, new: bytes) -> None:
    total = ~struct.unpack_from("!H", data, at)[0] & 0xFFFF
    for i in range(0, len(old), 2):
        total += ~struct.unpack_from("!H", old, i)[0] & 0xFFFF
        total += struct.unpack_from("!H", new, i)[0]
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", data, at, ~total & 0xFFFF)


def outward(host: Host, packet: bytes) -> bytes:
    """As it leaves the router."""
    head, protocol = (packet[0] & 15) * 4, packet[9]
    inner, there = struct.unpack_from("!H", packet, head)[0], packet[head + 2 : head + 4]
    symmetric = host.kind == "symmetric"
    key = protocol, inner, packet[16:20] + there if symmetric else b""
    port = host.ports.get(key)
    if port is None:
        port = inner + symmetric
        while (protocol, port) in host.owners:
            port = port + 1 if port < 65535 else 1024
        host.ports[key], host.owners[(protocol, port)] = port, inner
    host.allowed.add((protocol, port, packet[16:20], there))
    return rewritten(packet, 12, host.public, 0, struct.pack("!H", port))


def inward(host: Host, packet: bytes) -> bytes | None:
    """As it reaches the home; None: the router drops it."""
    head, protocol = (packet[0] & 15) * 4, packet[9]
    port = struct.unpack_from("!H", packet, head + 2)[0]
    flow = protocol, port, packet[12:16], packet[head : head + 2]
    open_to_all = (protocol, port) in (host.owners if host.kind == "full" else host.forwarded)
    if flow not in host.allowed and not open_to_all:
        return None
    return rewritten(packet, 16, host.inside, 2, struct.pack("!H", host.owners[(protocol, port)]))


def told_by_gateway(host: Host, packet: bytes) -> bytes | None:
    """What the router answers to a question of NAT-PMP; None: it is none."""
    head = (packet[0] & 15) * 4
    said = packet[head + 8 :]
    if (
        packet[9] != UDP
        or packet[16:20] != host.gateway
        or packet[head + 2 : head + 4] != PMP
        or len(said) < 2
    ):
        return None
    answer = struct.pack("!BBHI", 0, 128 + said[1], 0, 1)
    if said[1]:
        inner, outer, lease_s = struct.unpack_from("!HHI", said, 4)
        protocol = TCP if said[1] == 2 else UDP
        outer = host.ports.get((protocol, inner, b""), outer or inner)
        host.ports[protocol, inner, b""], host.owners[protocol, outer] = outer, inner
        (host.forwarded.add if lease_s else host.forwarded.discard)((protocol, outer))
        answer += struct.pack("!HHI", inner, outer, lease_s)
    else:
        answer += host.public
    udp = PMP + packet[head : head + 2] + struct.pack("!HH", 8 + len(answer), 0) + answer
    data = bytearray(
        struct.pack("!BBHIBBH", 0x45, 0, 20 + len(udp), 0, 64, UDP, 0) + host.gateway + host.inside
    )
    total = sum(struct.unpack("!10H", data))
    struct.pack_into("!H", data, 10, ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF)
    return bytes(data) + udp


def carry(source: Host, packet: bytes, hosts: dict[bytes, Host]) -> None:
    """One packet, from the device that sent it to the one that gets it, or nowhere."""
    head = (packet[0] & 15) * 4
    if packet[0] >> 4 != 4 or packet[9] not in CHECKSUM_AT or len(packet) < head + 8:
        return
    if source.gateway and (answer := told_by_gateway(source, packet)):
        os.write(source.fd, answer)
        return
    if source.inside:
        packet = outward(source, packet)
    target = hosts.get(packet[16:20])
    if target is None:
        return
    arriving = inward(target, packet) if target.inside else packet
    if arriving is not None:
        try:
            os.write(target.fd, arriving)
        except OSError:
            return  # its device is down: lost, as on any link


def main(words: list[str]) -> None:
    poll, by_fd, by_address = select.epoll(), {}, {}
    for word in words:
        device, public, *inside = word.split("=")
        kind = inside.pop() if inside and inside[-1].isalpha() else ""
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
        addresses = [socket.inet_aton(address) for address in public.split(",")]
        host = by_fd[fd] = Host(fd, addresses[0], *map(socket.inet_aton, inside), kind=kind)
        by_address.update(dict.fromkeys(addresses, host))
        poll.register(fd, select.EPOLLIN)
    poll.register(0, select.EPOLLIN)
    print("ready", flush=True)
    while True:
        for fd, _ in poll.poll():
            if fd == 0:
                return
            try:
                while packet := os.read(fd, 65536):
                    carry(by_fd[fd], packet, by_address)
            except OSError:
                continue  # nothing more, or the device is down at the moment


if __name__ == "__main__":
    main(sys.argv[1:])

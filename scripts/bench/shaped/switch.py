"""A user-space switch: moves packets between TUN devices, later by a link's delay, and loses some.

A process of its own (`python switch.py SEED`, Linux, root), driven by lines of JSON on
stdin, each answered by one on stdout; it ends when stdin closes, and its devices with it.
`homes.py` starts it, moves the devices into namespaces and sets their rates (tbf).

    {"do": "add", "port": P, "device": D, "addresses": ["10.0.0.1", ...]}   makes the TUN device D
    {"do": "set", "port": P, "delay_s": d, "jitter_s": j, "loss": l, "island": i}
    {"do": "counts"}        {"P": {"packets": n, "bytes": n, "lost": n, "dropped": n}, ...}, by sender

A packet goes to the port that has its destination address, if that is on the same island (negative: cut
off). It takes the delays of both ports, plus or minus their jitters, without overtaking; packets that wait
for a port are bounded, like those in a router. Where nothing is lost the kernel hands over TCP segments of
up to 64 KiB, as to a network card (a tbf that is narrower segments them before, to the device's MTU): each
is read, kept and written once, in batches of a millisecond.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any

TUN = "/dev/net/tun"
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
OFFLOAD = 0x01 | 0x02
"""TUN_F_CSUM and TUN_F_TSO4."""
HEADER_BYTES = 10
"""virtio_net_hdr, before every packet; passed on as it came."""
DESTINATION = slice(HEADER_BYTES + 16, HEADER_BYTES + 20)
LEAST_BYTES = HEADER_BYTES + 20
READ_BYTES = 1 << 17
READS_A_TURN = 64
QUEUE_BYTES = 16 * 1024 * 1024
"""Waiting for one port: 100 ms of 1 Gbit/s, and some."""
LINE_BYTES = 1 << 16


@dataclass
class Port:
    """One TUN device."""

    name: str
    fd: int
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    island: int = 0
    waiting_bytes: int = 0
    last_s: dict[str, float] = field(default_factory=dict)
    """Time at which its last packet to each other port is due."""
    packets: int = 0
    bytes: int = 0
    lost: int = 0
    """Packets that the link lost."""
    dropped: int = 0
    """Packets dropped for a full queue, no such address, or another island."""


class Switch:
    """Switch with its ports, and the packets that wait."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._ports: dict[str, Port] = {}
        self._of_address: dict[bytes, Port] = {}
        self._of_fd: dict[int, Port] = {}
        self._waiting: list[tuple[float, int, Port, bytes]] = []
        self._number = 0
        self._poll = select.epoll()

    def run(self) -> None:
        """Until stdin closes."""
        commands = sys.stdin.fileno()
        os.set_blocking(commands, False)
        self._poll.register(commands, select.EPOLLIN)
        text = b""
        while True:
            wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else -1
            for fd, _ in self._poll.poll(wait_s):
                if fd != commands:
                    self._read(self._of_fd[fd])
                    continue
                more = os.read(commands, LINE_BYTES)
                if not more:
                    return
                *lines, text = (text + more).split(b"\n")
                for line in lines:
                    print(json.dumps(self._obey(json.loads(line))), flush=True)
                if len(text) > LINE_BYTES:
                    return
            self._deliver()

    def _obey(self, command: dict[str, Any]) -> dict[str, Any]:
        try:
            if command["do"] == "add":
                self._add(command["port"], command["device"], command["addresses"])
            elif command["do"] == "set":
                self._set(command)
            else:
                kinds = ("packets", "bytes", "lost", "dropped")
                return {p.name: {kind: getattr(p, kind) for kind in kinds} for p in self._ports.values()}
        except OSError as error:
            return {"error": f"{error.filename or 'TUN device'}: {error.strerror}"}
        return {}

    def _add(self, name: str, device: str, addresses: list[str]) -> None:
        fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        try:
            fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
            fcntl.ioctl(fd, TUNSETOFFLOAD, OFFLOAD)
        except OSError:
            os.close(fd)
            raise
        self._ports[name] = self._of_fd[fd] = port = Port(name, fd)
        for address in addresses:
            self._of_address[socket.inet_aton(address)] = port
        self._poll.register(fd, select.EPOLLIN)

    def _set(self, command: dict[str, Any]) -> None:
        port = self._ports[command["port"]]
        port.delay_s, port.jitter_s = command["delay_s"], command["jitter_s"]
        port.loss, port.island = command["loss"], command["island"]
        # What is lost is a packet of 1500 bytes, not forty at once.
        lossless = not any(other.loss for other in self._ports.values())
        for other in self._ports.values():
            fcntl.ioctl(other.fd, TUNSETOFFLOAD, OFFLOAD if lossless else 0)

    def _read(self, port: Port) -> None:
        now = time.monotonic()
        for _ in range(READS_A_TURN):
            try:
                packet = os.read(port.fd, READ_BYTES)
            except (BlockingIOError, OSError):  # OSError: its device is down at the moment
                return
            if len(packet) >= LEAST_BYTES:
                self._take(port, packet, now)

    def _take(self, port: Port, packet: bytes, now: float) -> None:
        port.packets += 1
        port.bytes += len(packet) - HEADER_BYTES
        to = self._of_address.get(packet[DESTINATION])
        reached = to is not None and to.island == port.island >= 0
        if to is None or not reached or to.waiting_bytes + len(packet) > QUEUE_BYTES:
            port.dropped += 1
            return
        if (port.loss or to.loss) and self._random.random() > (1 - port.loss) * (1 - to.loss):
            port.lost += 1
            return
        due_s = now + port.delay_s + to.delay_s
        jitter_s = port.jitter_s + to.jitter_s
        if jitter_s:
            due_s += self._random.uniform(-jitter_s, jitter_s)
        port.last_s[to.name] = due_s = max(due_s, port.last_s.get(to.name, now))
        to.waiting_bytes += len(packet)
        self._number += 1
        heapq.heappush(self._waiting, (due_s, self._number, to, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, port, packet = heapq.heappop(self._waiting)
            port.waiting_bytes -= len(packet)
            try:
                os.write(port.fd, packet)
            except OSError:  # its device is down, or the kernel has no room: as on any link
                port.dropped += 1


if __name__ == "__main__":
    Switch(int(sys.argv[1]) if len(sys.argv) > 1 else 0).run()

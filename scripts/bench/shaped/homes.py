"""Homes on the internet: every node behind a router of its own, with a rate, a delay and losses.

    namespace of a node ── veth ── namespace of its router ── TUN ── the switch ── TUN ── this machine
      10.214.X.(4n+2)                (tbf, both ways)       10.215.X.n  (delay, loss)     10.215.X.254

The rate is the kernel's (tbf, in the router, so that queues build up outside the node's machine, as at home;
they are bounded, and what is too much is dropped). Delay, jitter and loss are those of a process
(`switch.py`). A path has the delays of both homes; this machine, where the bootstrap is, has none of
its own. X follows from our process id. In a router's namespace others may add rules, a NAT for instance.
Linux, root.

The interface is that of `p2pdiloco_lab.namespaces.Links`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pdiloco.demo.guard import carry_out
from p2pdiloco_lab.namespaces import TIMEOUT_S, LinksRefused, free_number, run_words

NODES, WORLD = "10.214", "10.215"
HOST = "host"
SWITCH = Path(__file__).with_name("switch.py")
MTU = 1500
MAX_HOMES = 62
LEAST_BURST_BYTES = 2 * MTU + 28
BURST_S = 0.005
CUT_OFF = -1


@dataclass(frozen=True)
class Shape:
    """A home's link. The delay is one way: between two homes, there and back, it is 4 times as long."""

    upload_bits_per_s: float = 1e9
    download_bits_per_s: float = 1e9
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    """Share of packets, each way."""
    queue_s: float = 0.4
    """Delay that the router's queue holds at most, each way."""

    @classmethod
    def of(cls, bits_per_s: float, round_trip_s: float) -> Shape:
        """Make a link that is the same both ways; `round_trip_s` is between two homes of this kind."""
        return cls(bits_per_s, bits_per_s, round_trip_s / 4)


SLOW = Shape.of(1e6, 0.0)


@dataclass
class _Home:
    number: int
    port: str
    """Port of the switch."""
    shape: Shape
    island: int = 0


class ShapedLinks:
    """The switch and the homes. `close` must be called; `clear_words` does the same from outside."""

    SLOW_WORDS = "its link carries 1 Mbit/s"

    def __init__(self, shape: Shape | None = None, seed: int = 0) -> None:
        """`shape`: of every home that is added. `seed`: of losses and jitter. Raises: LinksRefused."""
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise LinksRefused("network namespaces need the programs ip and tc")
        number = free_number(NODES, WORLD)
        self._tag = f"s{os.getpid() % 100_000}"
        self._nodes, self._world = f"{NODES}.{number}", f"{WORLD}.{number}"
        self.address = f"{self._world}.254"
        """Address of this machine."""
        self._shape = shape or Shape()
        self._homes: dict[str, _Home] = {}
        self._count = 0
        self._switch = subprocess.Popen(
            [sys.executable, "-P", str(SWITCH), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is not its affair
        )
        try:
            device = f"{self._tag}h"
            self._say(do="add", port=HOST, device=device, addresses=[self.address])
            run_words("ip", "address", "add", f"{self.address}/32", "dev", device)
            run_words("ip", "link", "set", device, "mtu", str(MTU), "up")
            for network in (self._nodes, self._world):
                run_words("ip", "route", "add", f"{network}.0/24", "dev", device, "src", self.address)
        except BaseException:
            self.close()
            raise

    def add(self, node: str, shape: Shape | None = None, hidden: bool = False) -> tuple[list[str], str]:
        """A home for this node: (words that run a command in its namespace, its address).

        `hidden`: the switch knows the router's address only, for a router that translates addresses.

        Raises:
            LinksRefused: the system did not make it, or there are too many.
        """
        if self._count >= MAX_HOMES:
            raise LinksRefused(f"at most {MAX_HOMES} homes")
        self._count += 1
        number = self._count
        home = _Home(number, node, shape or self._shape)
        space, router = self._namespace(number), self._router(number)
        inside, lan, wan = (f"{self._tag}{letter}{number}" for letter in "ilw")
        address, gateway = f"{self._nodes}.{4 * number + 2}", f"{self._nodes}.{4 * number + 1}"
        public = f"{self._world}.{number}"
        for name in (space, router):
            run_words("ip", "netns", "add", name)
            run_words("ip", "-n", name, "link", "set", "lo", "up")
        run_words("ip", "link", "add", lan, "netns", router, "type", "veth",
                  "peer", "name", inside, "netns", space)  # fmt: skip
        self._say(do="add", port=node, device=wan, addresses=[public, *([] if hidden else [address])])
        run_words("ip", "link", "set", wan, "netns", router)
        within, at_router = ("ip", "-n", space), ("ip", "-n", router)
        run_words(*within, "address", "add", f"{address}/30", "dev", inside)
        run_words(*within, "link", "set", inside, "mtu", str(MTU), "up")
        run_words(*within, "route", "add", "default", "via", gateway)
        run_words(*at_router, "address", "add", f"{gateway}/30", "dev", lan)
        run_words(*at_router, "link", "set", lan, "mtu", str(MTU), "up")
        run_words(*at_router, "address", "add", f"{public}/32", "dev", wan)
        run_words(*at_router, "link", "set", wan, "mtu", str(MTU), "up")
        run_words(*at_router, "route", "add", "default", "dev", wan, "src", public)
        run_words(*self.at_router_of(number), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self._homes[node] = home
        self._apply(node, home.shape)
        return ["ip", "netns", "exec", space], address

    def at_router_of(self, number: int) -> list[str]:
        """Words that run a command in the namespace of a home's router."""
        return ["ip", "netns", "exec", self._router(number)]

    def router(self, node: str) -> tuple[list[str], str, str]:
        """Find the router of a node's home: (words that run a command there, its device to the world, its
        address)."""
        number = self._homes[node].number
        return self.at_router_of(number), f"{self._tag}w{number}", f"{self._world}.{number}"

    def reassign(self, old: str, new: str) -> None:
        """The home of one node is now another's."""
        self._homes[new] = self._homes[old]

    def reshape(self, node: str, shape: Shape) -> None:
        """Another link for this home, from now on."""
        self._homes[node].shape = shape
        self._apply(node, shape)

    def cut(self, node: str) -> None:
        """Let nothing pass to and from the node any more."""
        self._island(node, CUT_OFF)

    def slow(self, node: str) -> None:
        """A thin, queueing link, both ways."""
        self._apply(node, SLOW)

    def restore(self, node: str) -> None:
        """Make the node's link as it was."""
        self._homes[node].island = 0
        self._apply(node, self._homes[node].shape)

    def split(self, nodes: Sequence[str]) -> None:
        """Let nothing pass any more between these nodes and all others, the bootstrap included."""
        for node in nodes:
            self._island(node, 1)

    def heal(self, nodes: Sequence[str]) -> None:
        """After `split`: as it was."""
        for node in nodes:
            self._island(node, 0)

    def counts(self) -> dict[str, dict[str, int]]:
        """Count by sender: packets, bytes, lost and dropped ones at the switch."""
        return self._say(do="counts")

    def clear_words(self) -> list[Sequence[str]]:
        """Commands that remove everything, for whoever ends after us; the switch ends with us anyway."""
        words: list[Sequence[str]] = []
        for number in range(1, self._count + 1):
            # A namespace lives on, without a name, while sockets of the dead still send; its link must not.
            words.append(["ip", "-n", self._router(number), "link", "del", f"{self._tag}l{number}"])
            words += [
                ["ip", "netns", "del", name] for name in (self._namespace(number), self._router(number))
            ]
        return words

    def close(self) -> None:
        """Remove everything, as far as it was made."""
        for pipe in (self._switch.stdin, self._switch.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # it died with something unread
                    pipe.close()
        try:
            self._switch.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._switch.kill()
            self._switch.wait()
        carry_out(self.clear_words())

    def _island(self, node: str, island: int) -> None:
        self._homes[node].island = island
        self._tell(node, self._homes[node].shape)

    def _apply(self, node: str, shape: Shape) -> None:
        number = self._homes[node].number
        for letter, rate in (("w", shape.upload_bits_per_s), ("l", shape.download_bits_per_s)):
            burst = max(LEAST_BURST_BYTES, int(rate / 8 * BURST_S))
            where = (
                "tc",
                "-n",
                self._router(number),
                "qdisc",
                "replace",
                "dev",
                f"{self._tag}{letter}{number}",
            )
            queue = ("burst", str(burst), "latency", f"{shape.queue_s * 1000:.0f}ms")
            run_words(*where, "root", "tbf", "rate", f"{rate:.0f}bit", *queue)
        self._tell(node, shape)

    def _tell(self, node: str, shape: Shape) -> None:
        home = self._homes[node]
        self._say(
            do="set",
            port=home.port,
            island=home.island,
            delay_s=shape.delay_s,
            jitter_s=shape.jitter_s,
            loss=shape.loss,
        )

    def _say(self, **command: Any) -> dict[str, Any]:
        """Raises: LinksRefused (the switch could not, or is gone)."""
        pipes = self._switch.stdin, self._switch.stdout
        assert pipes[0] is not None and pipes[1] is not None
        try:
            print(json.dumps(command), file=pipes[0], flush=True)
            line = pipes[1].readline()
        except OSError as error:
            raise LinksRefused(f"the switch of shaped links has ended: {error}") from error
        answer: dict[str, Any] = (
            json.loads(line) if line else {"error": "the switch of shaped links has ended"}
        )
        if "error" in answer:
            raise LinksRefused(f"shaped links need network namespaces and TUN devices: {answer['error']}")
        return answer

    def _namespace(self, number: int) -> str:
        return f"{self._tag}n{number}"

    def _router(self, number: int) -> str:
        return f"{self._tag}r{number}"

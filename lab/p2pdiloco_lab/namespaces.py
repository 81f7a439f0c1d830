"""Links that can be cut and slowed down: a network namespace for every node, on one bridge (Linux, root).

bridge (10.213.X.1, the bootstrap is here) ── veth ── namespace of node 1 (10.213.X.11)
                                           ── veth ── namespace of node 2 (10.213.X.12) …

X is one that nobody uses here, so that two runs on one machine do not meet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Protocol

from p2pdiloco.demo.guard import carry_out
from p2pdiloco.demo.swarm import Swarm
from p2pdiloco.errors import UserError

NETWORK = "10.213"
BRIDGE_MAC = "02:d1:10:c0:00:01"
TIMEOUT_S = 10.0
NUMBERS = 250
SLOW = ("rate", "1mbit", "burst", "16kbit", "latency", "400ms")


class LinksRefused(UserError):
    """Refusal of the machine to make network namespaces; the text says why."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "run it as root on Linux with the programs ip and tc")


def run_words(*words: str) -> None:
    """Run a command of the system. Raises: LinksRefused."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise LinksRefused(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


def free_number(*prefixes: str) -> int:
    """X such that no route of this machine leads to PREFIX.X.0/24, for any of these.

    Raises:
        LinksRefused: there is none left.
    """
    for step in range(NUMBERS):
        number = (os.getpid() + step) % NUMBERS
        routes = [["ip", "route", "show", f"{prefix}.{number}.0/24"] for prefix in prefixes]
        if not any(subprocess.run(w, capture_output=True, timeout=TIMEOUT_S).stdout for w in routes):
            return number
    raise LinksRefused("every network that links may have is in use")


class NodeLinks(Protocol):
    """Links of a swarm that puts every node into a network namespace."""

    address: str

    def add(self, node: str) -> tuple[list[str], str]:
        """See `Links`."""

    def clear_words(self) -> list[Sequence[str]]:
        """See `Links`."""


class Links:
    """The bridge and its namespaces. `close` must be called; `clear_words` does the same from outside."""

    SLOW_WORDS = "its link carries 1 Mbit/s"

    def __init__(self) -> None:
        """Raises: LinksRefused."""
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise LinksRefused("network namespaces need the programs ip and tc")
        self._tag = f"c{os.getpid() % 100_000}"
        self._network = f"{NETWORK}.{free_number(NETWORK)}"
        self.address = f"{self._network}.1"
        """Address of this machine, on the bridge."""
        self._bridge = f"{self._tag}br"
        self._island = f"{self._tag}is"
        self._number = 10
        self._made: list[int] = []
        self._of: dict[str, int] = {}
        try:
            # An address of its own: else the bridge has its lowest port's, which changes when ports move,
            # and for half a minute everybody sends to where nobody is.
            run_words("ip", "link", "add", self._bridge, "address", BRIDGE_MAC, "type", "bridge")
            run_words("ip", "address", "add", f"{self.address}/24", "dev", self._bridge)
            run_words("ip", "link", "set", self._bridge, "up")
        except BaseException:
            self.close()
            raise

    def add(self, node: str) -> tuple[list[str], str]:
        """A namespace for this node: (words that run a command in it, its address).

        Raises:
            LinksRefused: the system did not make it.
        """
        self._number += 1
        number, space = self._number, self._namespace(self._number)
        self._made.append(number)
        inside, outside = f"{self._tag}i{number}", self._outside(number)
        run_words("ip", "netns", "add", space)
        run_words("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
        run_words("ip", "link", "set", inside, "netns", space)
        run_words("ip", "link", "set", outside, "master", self._bridge, "up")
        within = ("ip", "-n", space)
        run_words(*within, "address", "add", f"{self._network}.{number}/24", "dev", inside)
        run_words(*within, "link", "set", inside, "up")
        run_words(*within, "link", "set", "lo", "up")
        self._of[node] = number
        return ["ip", "netns", "exec", space], f"{self._network}.{number}"

    def device(self, node: str) -> str:
        """Name this machine's end of the node's link: what it receives is what the node sends."""
        return self._outside(self._of[node])

    def reassign(self, old: str, new: str) -> None:
        """The namespace of one node is now another's."""
        self._of[new] = self._of[old]

    def cut(self, node: str) -> None:
        """Let nothing pass to and from the node any more."""
        run_words("ip", "link", "set", self._outside(self._of[node]), "down")

    def slow(self, node: str) -> None:
        """A thin, queueing link, towards the node."""
        run_words("tc", "qdisc", "replace", "dev", self._outside(self._of[node]), "root", "tbf", *SLOW)

    def restore(self, node: str) -> None:
        """Make the node's link as it was."""
        outside = self._outside(self._of[node])
        run_words("ip", "link", "set", outside, "up")
        subprocess.run(["tc", "qdisc", "del", "dev", outside, "root"], capture_output=True, timeout=TIMEOUT_S)

    def split(self, nodes: Sequence[str]) -> None:
        """Let nothing pass any more between these nodes and all others, the bootstrap included."""
        run_words("ip", "link", "add", self._island, "type", "bridge")
        run_words("ip", "link", "set", self._island, "up")
        for node in nodes:
            run_words("ip", "link", "set", self._outside(self._of[node]), "master", self._island)

    def heal(self, nodes: Sequence[str]) -> None:
        """After `split`: as it was."""
        for node in nodes:
            run_words("ip", "link", "set", self._outside(self._of[node]), "master", self._bridge)
        run_words("ip", "link", "del", self._island)

    def clear_words(self) -> list[Sequence[str]]:
        """Commands that remove everything, for whoever ends after us; each may fail."""
        spaces = [["ip", "netns", "del", self._namespace(number)] for number in self._made]
        # A namespace lives on, without a name, while sockets of the dead still send; its link must not.
        devices = [self._bridge, self._island, *map(self._outside, self._made)]
        return [*spaces, *(["ip", "link", "del", name] for name in devices)]

    def close(self) -> None:
        """Remove everything, as far as it was made."""
        carry_out(self.clear_words())

    def _namespace(self, number: int) -> str:
        return f"{self._tag}n{number}"

    def _outside(self, number: int) -> str:
        return f"{self._tag}o{number}"


def place(swarm: Swarm, links: NodeLinks) -> None:
    """Put every node into a network namespace of its own; the bootstrap stays here. `links` are the caller's
    to close, and the guard's if we are killed. Raises: LinksRefused."""
    swarm.bootstrap.listen = f"/ip4/{links.address}/tcp/0"
    said: set[tuple[str, ...]] = set()

    def say() -> None:
        for words in links.clear_words():  # of all that is there by now
            if tuple(words) not in said:
                said.add(tuple(words))
                swarm.guard.on_end(words)

    for node in swarm.nodes:
        say()
        node.wrapper, address = links.add(node.name)
        node.listen = f"/ip4/{address}/tcp/0"
    say()

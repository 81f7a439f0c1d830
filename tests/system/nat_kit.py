"""Network namespaces with NATs between them (Linux, root): every host in a namespace whose only link is a
TUN device of one process, `nat_box`, which is the internet and all home routers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deadlines import within_s

BOX = Path(__file__).parent / "nat_box.py"
TIMEOUT_S = 10.0


def why_not() -> str:
    """Why this machine cannot do it; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        return "needs ip and /dev/net/tun"
    probe = f"p{os.getpid()}"
    done = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, timeout=within_s(TIMEOUT_S)
    )
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, timeout=within_s(TIMEOUT_S))
    return done.stderr.strip() if done.returncode else ""


class Nats:
    """`public` hosts with addresses 7.0.0.1, .2, …, and `homes` 192.168.1.2, 192.168.2.2, … behind routers
    7.0.1.1, 7.0.1.2, … of their own. (Public by libp2p's rules too, which NATs are not found out without.)
    `forward`: the routers forward ports when they are asked. `kinds`: of the homes' NATs, by `nat_box`."""

    def __init__(self, public: int, homes: int, forward: bool = False, kinds: Sequence[str] = ()) -> None:
        tag = f"n{os.getpid() % 100_000}"
        outside = [[f"7.0.0.{i}"] for i in range(1, public + 1)]
        hosts = [(f"{tag}p{i}", own, own) for i, own in enumerate(outside, 1)]
        hosts += [(f"{tag}h{i}", [f"7.0.1.{i}"], [f"192.168.{i}.2"]) for i in range(1, homes + 1)]
        self._spaces = [name for name, _, _ in hosts]
        self.addresses = [inside for _, _, inside in hosts]
        """Of the hosts themselves, public ones first."""
        devices = [
            f"{name}={','.join(outer)}" + (f"={own[0]}" if own != outer else "") for name, outer, own in hosts
        ]
        if forward:
            devices[public:] = [f"{each}=192.168.{i}.1" for i, each in enumerate(devices[public:], 1)]
        for place, kind in enumerate(kinds, public):
            devices[place] += f"={kind}" if kind else ""
        self._box = subprocess.Popen(
            [sys.executable, str(BOX), *devices], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert self._box.stdout is not None
            if self._box.stdout.readline() != "ready\n":
                raise RuntimeError("the process that is the internet did not start")
            for name, _, own in hosts:
                _do("ip", "netns", "add", name)
                _do("ip", "link", "set", name, "netns", name)
                for address in own:
                    _do("ip", "-n", name, "address", "add", f"{address}/32", "dev", name)
                for device in ("lo", name):
                    _do("ip", "-n", name, "link", "set", device, "up")
                way = ["via", f"{own[0].rsplit('.', 1)[0]}.1", "onlink"] if own[0].startswith("192.") else []
                _do("ip", "-n", name, "route", "add", "default", *way, "dev", name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Nats:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def at(self, host: int) -> list[str]:
        """Words that run a command on a host."""
        return ["ip", "netns", "exec", self._spaces[host]]

    def cable(self, device: str, ends: Mapping[int, str]) -> None:
        """Beside the internet, a device of that name at two hosts, each with its address: what goes in at one
        comes out at the other."""
        one, other = (self._spaces[host] for host in ends)
        _do(*("ip", "-n", one, "link", "add", device, "type", "veth", "peer", "name", device, "netns", other))
        self.network(dict.fromkeys(ends, device), ends)

    def network(self, devices: Mapping[int, str], ends: Mapping[int, str]) -> None:
        """Give devices at two hosts their addresses, and the way to the other's."""
        for host, address in ends.items():
            ip, device = ("ip", "-n", self._spaces[host]), devices[host]
            bits = 128 if ":" in address else 32
            _do(*ip, "address", "add", f"{address}/{bits}", "dev", device, *["nodad"] * (bits == 128))
            _do(*ip, "link", "set", device, "up")
            for way in ends.values():
                if way != address:
                    _do(*ip, "route", "add", f"{way}/{bits}", "dev", device)

    def close(self) -> None:
        """The devices go with the process, the namespaces by name."""
        if self._box.stdin is not None:
            self._box.stdin.close()
        try:
            self._box.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._box.kill()
            self._box.wait()
        if self._box.stdout is not None:
            self._box.stdout.close()
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=within_s(TIMEOUT_S))


def _do(*words: str) -> Sequence[str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=within_s(TIMEOUT_S))
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return words

"""Ways beside NATs: IPv6, and friends' own networks (VPNs). Real nodes in network namespaces."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from deadlines import Deadline, within_s
from nat_kit import Nats, why_not
from system_kit import PACE, Daemon, Swarm

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
ANY = "/ip4/0.0.0.0/tcp/4001"
QUICK_S = 80.0
FRIENDS = "100.64.0.1", "100.64.0.2"
"""Addresses of a VPN such as Tailscale's."""
WIREGUARD = "wg", "wireguard-go"
SOCKETS = Path("/var/run/wireguard")
PORT = "51820"
DIALLED, HIDDEN = "others can dial this node", "others cannot"


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    if reason := why_not():
        pytest.skip(reason)
    with Swarm(tmp_path) as made:
        yield made


def merged(one: Daemon, two: Daemon) -> bool:
    """Whether either merged what both had trained."""
    return bool(one.full_merges(2) or two.full_merges(2))


def test_ipv6_needs_no_hole_in_a_nat_and_makes_nobody_syncer_of_those_who_have_none(swarm: Swarm) -> None:
    with Nats(public=1, homes=2) as nats:
        outside = "2600:0:0:1::1"
        nats.cable("six", {0: outside, 1: "2600:0:0:2::1"})
        nats.cable("homes", {1: "2600:0:0:3::1", 2: "2600:0:0:4::1"})
        run = str(swarm.manifest(seats=("one", "two")))
        public = swarm.start("public", "bootstrap", "--run", run, listen=ANY, within=nats.at(0))
        swarm.until(lambda: "p2pdiloco node --join" in public.printed(), "its join line", QUICK_S)
        four, six = (f"{at}/tcp/4001/p2p/{public.peer_id}" for at in ("/ip4/7.0.0.1", f"/ip6/{outside}"))
        assert f"--join {four} --join {six} --run" in public.printed(), (
            "whoever has one of the two can use it"
        )
        common = "node", "--no-port-map", *PACE, "--join", four
        one = swarm.start("one", *common, "--join", six, "--genesis", listen=ANY, within=nats.at(1))
        two = swarm.start("two", *common, listen=ANY, within=nats.at(2))
        swarm.until(lambda: merged(one, two), "a version with both's work, which no relay carries", QUICK_S)
        for node, why in ((one, "dial this node by IPv4, only by IPv6 ("), (two, "dial this node (a NAT")):
            swarm.until(lambda node=node: HIDDEN in node.said(), f"{node.name} to be hidden", 30)
            assert f"{HIDDEN} {why}" in node.said(), "IPv6 is dialled first, by whoever can"


def test_friends_in_a_vpn_need_no_router(swarm: Swarm) -> None:
    with Nats(public=0, homes=2) as nats:
        nats.cable("friends", dict(enumerate(FRIENDS)))
        friends_train(swarm, nats, ANY)


def test_friends_train_over_wireguard(swarm: Swarm) -> None:
    if lacking := [program for program in WIREGUARD if shutil.which(program) is None]:
        pytest.skip(f"needs {' and '.join(lacking)}: apt-get install wireguard-go wireguard-tools")
    with Nats(public=0, homes=2) as nats, ExitStack() as running:
        wireguard(nats, swarm.folder, running)
        friends_train(swarm, nats, f"/ip4/{FRIENDS[0]}/tcp/4001")


def friends_train(swarm: Swarm, nats: Nats, listen: str) -> None:
    """Two homes train by the addresses of their own network, and nothing warns of anything."""
    files = "--run-file", str(swarm.manifest(seats=("one", "two")))
    # It waits for the router, where it may ask one; the other asks it beside its work.
    begun = "node", "--genesis", "--no-port-map", *files, *PACE
    one = swarm.start("one", *begun, listen=listen, within=nats.at(0))
    swarm.until(lambda: "p2pdiloco node --join" in one.printed(), "its join line", QUICK_S)
    place = f"/ip4/{FRIENDS[0]}/tcp/4001/p2p/{one.peer_id}"
    assert one.address() == place, "the first one that is printed is the friends'"
    other = listen.replace(FRIENDS[0], FRIENDS[1])
    two = swarm.start("two", "node", "--join", place, *PACE, listen=other, within=nats.at(1))
    swarm.until(lambda: merged(one, two), "a version with both's work", QUICK_S)
    for node in (one, two):
        swarm.until(lambda node=node: DIALLED in node.said(), f"{node.name} to be dialled", 30)
        warnings = [line for line in node.said().splitlines() if "warning" in line and "schedule" not in line]
        assert not warnings, warnings
        assert listen == ANY or "router" not in node.said(), "none forwards anything into a VPN"


def wireguard(nats: Nats, folder: Path, running: ExitStack) -> None:
    """A WireGuard network of two homes. Its keepalives make the holes in both NATs."""
    devices = {host: f"wg{folder.stat().st_ino % 10_000_000}{host}" for host in (0, 1)}
    keys = {}
    for host, device in devices.items():
        process = subprocess.Popen([*nats.at(host), "wireguard-go", "-f", device], stderr=subprocess.DEVNULL)
        running.callback(process.wait)
        running.callback(process.terminate)
        key = folder / f"{device}.key"
        key.write_bytes(does("wg", "genkey"))
        keys[host] = does("wg", "pubkey", given=key.read_bytes()).decode().strip()
    deadline = Deadline(10)
    while not all((SOCKETS / f"{device}.sock").exists() for device in devices.values()):
        assert not deadline.over(), "wireguard-go does not begin"
        time.sleep(0.05)
    for host, device in devices.items():
        there = 1 - host
        peer = ("peer", keys[there], "allowed-ips", f"{FRIENDS[there]}/32", "persistent-keepalive", "1")
        mine = ("private-key", str(folder / f"{device}.key"), "listen-port", PORT)
        does("wg", "set", device, *mine, *peer, "endpoint", f"7.0.1.{there + 1}:{PORT}")
    nats.network(devices, dict(enumerate(FRIENDS)))


def does(*words: str, given: bytes | None = None) -> bytes:
    """What a command prints; it must succeed."""
    return subprocess.run(words, input=given, capture_output=True, check=True, timeout=within_s(10)).stdout

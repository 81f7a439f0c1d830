"""`p2pdiloco doctor`: what is wrong with this machine, or between it and a run.

`examine` looks at one thing after the other, each with a bound in time, and tells of each finding
(`options.Diagnosis`). The checks follow in its order: this machine, the addresses before anybody dials, the
peers to join through, the run.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import platform
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE

import psutil

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.adapters.data_dir import DataDir, DataDirInUse, is_in_use
from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.adapters.hivemind_net import HivemindTransport, why_unreached
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.cli.options import Diagnosis, Level, bad, good, node_folder, skipped, warning
from p2pdiloco.cli.run_commands import MEMBERS, STEP_TIMES_S
from p2pdiloco.cli.status_command import visitor
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.settings import ANY_ADDRESS, DoctorSettings, NodeSettings
from p2pdiloco.config.values import DNSADDR, peer_in, size_text
from p2pdiloco.core.api.types import REACH_WORDS, Reach
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.admission import joined_through_before
from p2pdiloco.daemon.budgets import free_disk_bytes, free_memory_bytes
from p2pdiloco.daemon.display.snapshot import counted
from p2pdiloco.daemon.network.discovery import ask_status, listen_again, presences
from p2pdiloco.daemon.network.reach import Voice, measure, tcp_ports
from p2pdiloco.daemon.network.router import Router
from p2pdiloco.daemon.run_files.known_runs import ListedRun, RunSearch, WaysIn
from p2pdiloco.errors import (
    RemoteError,
    StorageError,
    TransportError,
    UserError,
    clean,
    first_line,
    install_hint,
    without_torch,
)
from p2pdiloco.ports import Transport
from p2pdiloco.release import VERSION, WIRE_VERSION

CHECK_S = 20.0
LINK_S = 45.0
MOST_MET = 3
"""Members met before that are dialled."""


Look = Callable[[], Awaitable[Diagnosis | Iterable[Diagnosis]]]
Check = tuple[str, Look, float]
"""Name of a check, what it looks with, and within how many seconds."""


def _here(look: Callable[[], Iterable[Diagnosis]]) -> Look:
    """Make a look at this machine one that keeps nobody waiting."""
    return partial(asyncio.to_thread, lambda: list(look()))


async def examine(settings: DoctorSettings) -> AsyncIterator[Diagnosis]:
    """Look at everything, and tell of each thing when it was looked at."""
    data_dir = node_folder(settings.data_dir)
    runs_here = False
    own: Sequence[str] = ()
    with suppress(StorageError):  # which the check of the folder says
        runs_here = data_dir.is_dir() and is_in_use(data_dir)
        own = WaysIn.load(data_dir).own[:1] if runs_here else ()
    given, met = addresses_to_dial(settings, data_dir, own)
    addresses: list[str] = []

    async def check_addresses() -> list[Diagnosis]:
        found, behind = await check_given_addresses(given)
        addresses.extend(behind)
        nobody = skipped(
            ADDRESSES_CHECK, "nobody to join was named", "for checks with a peer: --join ADDRESS"
        )
        return found if given else [*found, nobody]

    checks: tuple[Check, ...] = (
        ("python", _here(python_here), CHECK_S),
        ("memory", _here(partial(memory_and_disk, data_dir)), CHECK_S),
        ("limits", _here(files_limit), CHECK_S),
        ("folder", _here(partial(data_folder, data_dir)), CHECK_S),
        ("processes", _here(leftovers), CHECK_S),
        ("torch", torch_here, TORCH_S),
        ("addresses", check_addresses, 2 * CHECK_S),
    )
    for check, look, within_s in checks:
        async for found in findings_of(check, look, within_s):
            yield found
    if not addresses:
        return
    logging.getLogger().setLevel(logging.CRITICAL)  # what is worth a line becomes a finding
    try:
        async with dialable_visitor(data_dir, listens=not runs_here) as (transport, router):
            transport.named([*own, *(text for text in addresses if peer_in(text) not in met)])
            async for found in Visit(transport, router, settings, data_dir, own, met).examine(addresses):
                yield found
    except UserError as error:
        yield bad("network", str(error), error.hint)


def addresses_to_dial(
    settings: DoctorSettings, data_dir: Path, own: Sequence[str]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """List the addresses to look at: those that are given, else the node's own that runs here, those that it
    was last told to join through, and those of members that it met. Of all but the told ones the peer ids,
    too: a node's own address may lead nowhere from inside its network, and members leave."""
    if settings.join or not data_dir.is_dir():
        return settings.join, frozenset()
    told = joined_through_before(NodeSettings(data_dir=data_dir, run=settings.run))
    members = [address for address in WaysIn.load(data_dir).members[-MOST_MET:] if address not in told]
    met = frozenset(map(peer_in, (*own, *members))) - frozenset(map(peer_in, told))
    return tuple(dict.fromkeys([*own, *told, *members])), met


@dataclass
class Visit:
    """Examination of peers, and of a run by way of them."""

    _transport: HivemindTransport
    _router: Router
    _settings: DoctorSettings
    _data_dir: Path
    _own_addresses: Sequence[str]
    """Address of the node that runs here."""
    _met: Collection[str] = ()
    """Peers that were met before, and not named."""
    _run: str = ""
    _manifest: Manifest | None = None

    def __post_init__(self) -> None:
        self._own = [*map(peer_in, self._own_addresses)]
        self._reached: list[str] = []

    async def examine(self, addresses: Sequence[str]) -> AsyncIterator[Diagnosis]:
        """Look at one thing after the other, if anybody is reached."""
        checks: tuple[Check, ...] = (
            ("peers", partial(self._dial, addresses), CHECK_S),
            ("clock", lambda: check_clock(self._transport, self._reached), CHECK_S),
            ("run", self._find, CHECK_S),
            ("versions", self._versions, CHECK_S),
            ("memory", self._footprint, CHECK_S),
            ("port", self._reach, CHECK_S),
            ("link", self._link, LINK_S),
        )
        for check, look, within_s in checks:
            async for found in findings_of(check, look, within_s):
                yield found
            if not self._reached:
                return

    async def _dial(self, addresses: Sequence[str]) -> list[Diagnosis]:
        found, self._reached = await dial_peers(self._transport, addresses, self._met)
        return found

    async def _find(self) -> Diagnosis:
        found, listed, self._manifest = await find_run(self._transport, self._settings.run, self._reached)
        self._run = listed.run if listed is not None else ""
        return found

    async def _versions(self) -> Diagnosis:
        if not self._run:
            return skipped("versions", "the run was not found")
        return await check_versions(self._transport, self._run)

    async def _footprint(self) -> list[Diagnosis]:
        if self._manifest is None:
            return [skipped("memory", "what a run takes is not known: it was not found")]
        try:
            return await asyncio.to_thread(list, check_footprint(self._manifest, self._data_dir))
        except ModuleNotFoundError as error:
            missing = without_torch(error)
            if missing is None:
                raise
            return [skipped("memory", f"what the run takes: {missing}", missing.hint)]

    async def _reach(self) -> list[Diagnosis]:
        if not self._own:
            await self._router.answer()
            found = await check_reach(self._transport, self._reached)
            say = good if found[0].level is Level.GOOD else warning
            return [*found, *(say("router", words) for words in [self._router.words] if words)]
        try:
            if self._own[0] not in self._reached:  # others were named
                await self._transport.connect(self._own[0], self._own_addresses)
            report, _ = await ask_status(self._transport, self._own[0], self._run)
        except (TransportError, RemoteError):  # a bootstrap, or a node of another run
            silent = "a node or bootstrap runs here, and does not say whether others reach it"
            return [skipped("port", silent)]
        words = f"the node that runs here is reached: {report.members[0].reach or 'not known yet'}"
        if report.members[0].reach == REACH_WORDS[Reach.DIRECT]:
            return [good("port", words)]
        return [warning("port", words, report.router or f"between is {likely_obstacle()}")]

    async def _link(self) -> Diagnosis:
        others = [peer for peer in self._reached if peer not in self._own]
        if not others:
            return skipped("link", "the only peer that was named runs on this machine", "--join another one")
        return await check_link(self._transport, others[0], self._manifest)


# This machine, without a network.

OLDEST, NEWEST = (3, 11), (3, 14)
LEAST_MEMORY, LEAST_DISK = 1 << 30, 1 << 30
FEW_FILES, TOO_FEW_FILES = 1024, 256
NVIDIA = Path("/proc/driver/nvidia/version")
TORCH_S = 90.0
ASK_TORCH = """
import json, torch
from p2pdiloco.learner.ranks import accelerators
from p2pdiloco.tensors.outer_update import steps_as_everywhere
found = list(accelerators())
device = found[0] if found else "cpu"
works = (torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)).sum().item() == 64.0**3
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device == "cuda" else []
free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
print(json.dumps({"version": torch.__version__, "device": device, "names": names, "free": free,
                  "works": works, "threads": torch.get_num_threads(), "built": torch.version.cuda or "",
                  "same": steps_as_everywhere()}))
"""
"""Program that looks at torch, in a process of its own: a broken driver may end it, or hang."""


def python_here() -> Iterator[Diagnosis]:
    """Check Python, and say what this is."""
    yield good("p2pdiloco", f"version {VERSION}, protocol version {WIRE_VERSION}")
    version, here = platform.python_version(), f"{platform.system()} {platform.machine()}"
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        yield bad("python", f"{version} on {here}", "use Python 3.11 to 3.14")
    elif sys.platform not in ("linux", "darwin"):
        yield warning("python", f"{version} on {here}", "nodes were tested on Linux only")
    else:
        yield good("python", f"{version} on {here}, {os.cpu_count()} processors")


async def torch_here() -> list[Diagnosis]:
    """Check PyTorch, and the device that a learner would take."""
    if find_spec("torch") is None:
        return [
            skipped("torch", "PyTorch is not installed: a bootstrap needs none, a node does", install_hint())
        ]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ASK_TORCH, stdout=PIPE, stderr=PIPE)
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        words = err.decode(errors="replace").strip().splitlines()[-1:] or [
            f"it ends with {process.returncode}"
        ]
        return [
            bad(
                "torch", f"PyTorch does not work here: {words[0][:200]}", f"install it anew; {install_hint()}"
            )
        ]
    return list(_of_torch(json.loads(out.splitlines()[-1])))


def _of_torch(said: dict[str, object]) -> Iterator[Diagnosis]:
    yield good("torch", f"{said['version']}, {said['threads']} threads")
    if not said["same"]:
        words = "merges have other bits here than on all others: this node audits nobody, and is no syncer"
        yield bad("merges", words, f"install PyTorch anew; {install_hint()}")
    device = str(said["device"])
    if not said["works"]:
        yield bad("device", f"{device} multiplies wrongly", "update its driver, or choose --device cpu")
    elif device == "cpu" and NVIDIA.exists():
        yield warning(
            "device",
            "cpu, although this system has NVIDIA's driver",
            "install a PyTorch for CUDA (docs/topics/devices.md)"
            if not said["built"]
            else "run nvidia-smi, and restart",
        )
    elif device == "cuda":
        names = said["names"] if isinstance(said["names"], list) else []
        free = said["free"] if isinstance(said["free"], int) else 0
        yield good("device", f"cuda: {', '.join(map(str, names))}; {size_text(free)} free")
    else:
        yield good("device", device)


def memory_and_disk(data_dir: Path) -> Iterator[Diagnosis]:
    """Say what is left; whether it suffices for a run is looked at with the run."""
    memory, disk = free_memory_bytes(), free_disk_bytes(existing_folder(data_dir))
    for check, free, least, where, todo in (
        ("memory", memory, LEAST_MEMORY, "", "close other programs, or raise the container's limit"),
        ("disk", disk, LEAST_DISK, f" for {data_dir}", "make room, or choose another disk with --data-dir"),
    ):
        words = f"{size_text(free)} free{where}"
        yield warning(check, words, todo) if free < least else good(check, words)


def existing_folder(folder: Path) -> Path:
    """Find the folder, or the nearest above it that is there."""
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


def files_limit() -> Iterator[Diagnosis]:
    """Check how many files, and so connections, a process may have open."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words, todo = f"{most} files and connections open at once", f"ulimit -n {min(4096, max(hard, most))}"
    if most == resource.RLIM_INFINITY or most >= FEW_FILES:
        yield good("limits", words)
    elif most >= TOO_FEW_FILES:
        yield warning("limits", f"{words} at most", todo)
    else:
        yield bad("limits", f"{words} at most", todo)


def data_folder(data_dir: Path) -> Iterator[Diagnosis]:
    """Check the data folder, and who has it. Raises: StorageError."""
    if not data_dir.exists():
        yield good("folder", f"{data_dir} is not there yet: the first start makes it")
        return
    folder = DataDir(data_dir, create=False)
    try:
        folder.lock()
    except DataDirInUse:
        yield good("folder", f"{data_dir}, and a node or bootstrap runs with it")
        return
    folder.unlock()
    yield good("folder", f"{data_dir}, free for a node to start")


def leftovers() -> Iterator[Diagnosis]:
    """Look for processes of nodes that are gone: p2pd and learners end with their node."""
    alone, others = [], 0
    for process in psutil.process_iter(["pid", "name", "ppid", "cmdline", "uids"]):
        said = process.info
        if said["uids"] is None or said["uids"].real != os.getuid():
            continue
        words = " ".join(said["cmdline"] or [])
        is_p2pd = said["name"] == "p2pd"
        is_learner = "p2pdiloco.learner" in words
        if (is_p2pd or is_learner) and said["ppid"] == 1:
            alone.append(said["pid"])
        elif "p2pdiloco" in words and (" node " in f"{words} " or " bootstrap " in f"{words} "):
            others += 1
    if alone:
        pids = " ".join(map(str, alone[:8]))
        yield warning("processes", f"left behind by a node that is gone: {pids}", f"end them: kill {pids}")
    else:
        yield good("processes", f"none left behind; nodes and bootstraps of yours that run here: {others}")


# Addresses, before anybody dials: names, and IPv6 where there is none.

NAME_S = 5.0
ADDRESSES_CHECK = "addresses"


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an address of a machine, perhaps with the name of its interface."""
    return ipaddress.ip_address(text.partition("%")[0])


def has_route(family: socket.AddressFamily) -> bool:
    """Tell whether this machine has a way to the world of IPv4 or of IPv6. Nothing is sent."""
    ip = multiaddrs.way_out(family)
    return bool(ip) and not _ip(ip).is_link_local


async def check_given_addresses(join: Sequence[str]) -> tuple[list[Diagnosis], tuple[str, ...]]:
    """Check the addresses to join through; returns findings, and the addresses behind the names."""
    found: list[Diagnosis] = []
    ways = [name for family, name in FAMILIES.items() if has_route(family)]
    if ways:
        found.append(good("network", f"this machine has a way out by {' and '.join(ways)}"))
    else:
        todo = "connect this machine; on a network without a way out, peers of that network can be joined"
        found.append(warning("network", "this machine has no way out", todo))
    addresses: list[str] = []
    for address in join:
        try:
            behind = await asyncio.to_thread(peers_behind, [address])
        except UserError as error:
            found.append(bad(ADDRESSES_CHECK, str(error), error.hint))
            continue
        if address.startswith(DNSADDR):
            found.append(
                good(ADDRESSES_CHECK, f"{address} leads to {counted(len(set(map(peer_in, behind))), 'peer')}")
            )
        addresses += behind
    for address in dict.fromkeys(addresses):
        found += await _check_one(address, ways)
    return found, tuple(dict.fromkeys(addresses))


FAMILIES = {socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}
FAMILIES_OF_NAME = {"dns4": ("IPv4",), "dns6": ("IPv6",), "dns": ("IPv4", "IPv6")}


async def _check_one(address: str, ways: Sequence[str]) -> list[Diagnosis]:
    kind, host = multiaddrs.parse(address)[0]
    if kind in ("ip4", "ip6"):
        wanted = "IPv4" if kind == "ip4" else "IPv6"
        ip = ipaddress.ip_address(host)
        if wanted not in ways and ip.is_global:
            return [
                skipped(
                    ADDRESSES_CHECK,
                    f"{host} is an {wanted} address, and this machine has no {wanted}",
                    "if the peer is not reached by another one, ask for an address of the other kind",
                )
            ]
        return []
    if kind not in FAMILIES_OF_NAME:
        return []
    try:
        async with asyncio.timeout(NAME_S):
            infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except TimeoutError:
        return [
            bad(
                ADDRESSES_CHECK,
                f"no name server answers for {host}",
                "look at /etc/resolv.conf, or use an IP address",
            )
        ]
    except OSError as error:
        return [
            bad(ADDRESSES_CHECK, f"the name {host} leads nowhere: {error.strerror or error}", SPELLING_HINT)
        ]
    return [_judge(address, kind, host, [str(info[4][0]) for info in infos], ways)]


NO_ROUTE_HINT = "ask for an address of the other kind, or a name that has both"
SPELLING_HINT = "check its spelling, or use an IP address"


def _judge(address: str, kind: str, host: str, ips: Sequence[str], ways: Sequence[str]) -> Diagnosis:
    """Judge what a name leads to."""
    known = {"IPv6" if ":" in ip else "IPv4" for ip in ips}
    usable = known.intersection(FAMILIES_OF_NAME[kind])
    if not usable:
        only = " and ".join(sorted(known)) or "no"
        todo = f"write /dns/ instead of /{kind}/"
        return bad(
            ADDRESSES_CHECK,
            f"/{kind}/{host} asks for {FAMILIES_OF_NAME[kind][0]}, and the name has {only} addresses only",
            todo,
        )
    if not usable.intersection(ways) and any(_ip(ip).is_global for ip in ips):
        only = " and ".join(sorted(usable))
        return bad(
            ADDRESSES_CHECK,
            f"{host} has {only} addresses only, and this machine has no {only}",
            NO_ROUTE_HINT,
        )
    if all(_ip(ip).is_loopback for ip in ips) and host != "localhost":
        todo = "look at /etc/hosts: other machines would look for the peer on themselves"
        return warning(ADDRESSES_CHECK, f"{host} leads to this machine itself", todo)
    return good(ADDRESSES_CHECK, f"{host} leads to {', '.join(sorted(set(ips))[:4])}")


# Peers to join through: reached, clock, versions, and whether they reach us.

ASK_S = 5.0
NEAR_S, FAR_S = 1.0, 3.0
"""Difference of clocks that is worth a word, and that from which on the DHT lets nobody in."""
MAX_ASKED = 4
MEANWHILE = "the node takes part over connections that it makes itself"
PRIVATE_HINT = (
    f"a NAT or firewall: forward the port in the router (docs/topics/doctor.md); until then {MEANWHILE}"
)


@asynccontextmanager
async def dialable_visitor(data_dir: Path, listens: bool) -> AsyncIterator[tuple[HivemindTransport, Router]]:
    """Start a visitor who joins nobody by itself, and can be dialled.

    `listens`: on the port that a node with this data folder would have.

    Raises: UserError.
    """
    listen = await listen_again(WaysIn.load(data_dir).port if listens else 0, ANY_ADDRESS)
    async with visitor((), listen, P2PDOptions(relay=False)) as transport:
        router = Router(transport, listens)
        await router.begin()
        try:
            yield transport, router
        finally:
            await router.end()


async def dial_peers(
    transport: Transport, addresses: Sequence[str], met: Collection[str] = ()
) -> tuple[list[Diagnosis], list[str]]:
    """Dial the peers to join through; returns findings, and who was reached.

    `met`: those that were met before, and may have left since; the others were named. One peer is enough to
    join through.
    """
    by_peer: dict[str, list[str]] = {}
    for address in addresses:
        by_peer.setdefault(multiaddrs.split_peer(address)[1], []).append(address)
    found: list[Diagnosis] = []
    reached = []
    began = time.monotonic()
    results = await asyncio.gather(
        *(transport.connect(peer, of_peer) for peer, of_peer in by_peer.items()), return_exceptions=True
    )
    nobody = all(isinstance(result, BaseException) for result in results)
    for (peer, of_peer), result in zip(by_peer.items(), results, strict=True):
        if isinstance(result, TransportError):
            words = f"{' and '.join(of_peer)} cannot be reached ({why_unreached([result], of_peer)})"
            if peer not in met or nobody:
                of_it = bad if nobody else warning
                todo = "is it running, is its address right, is a firewall between?"
                found.append(of_it("peers", words, todo))
            else:
                found.append(skipped("peers", f"met before, perhaps gone since: {words}"))
        elif isinstance(result, BaseException):
            raise result
        else:
            reached.append(peer)
            took_s = time.monotonic() - began
            found.append(good("peers", f"…{peer[-6:]} is reached, and is who it should be ({took_s:.1f} s)"))
    return found, reached


async def check_clock(transport: HivemindTransport, peers: Sequence[str]) -> Diagnosis:
    """Compare our clock with the peers' (the middle one, of several)."""
    ahead = []
    for peer in peers[:MAX_ASKED]:
        with suppress(TransportError, TimeoutError):
            ahead.append(await transport.meet(peer))
    if not ahead:
        return skipped("clock", "no peer says what time it is")
    middle = sorted(ahead)[len(ahead) // 2]
    words = f"{abs(middle):.1f} s {'behind' if middle > 0 else 'ahead of'} the peers'"
    todo = "synchronise it: timedatectl set-ntp true (if several peers agree; else it may be theirs)"
    if abs(middle) >= FAR_S:
        return bad("clock", f"{words}: nodes within {FAR_S:g} s of each other are let in", todo)
    if abs(middle) >= NEAR_S:
        return warning("clock", words, todo)
    return good("clock", f"within {max(0.1, abs(middle)):.1f} s of the peers'")


async def check_versions(transport: Transport, run: str) -> Diagnosis:
    """Compare our protocol version with that of the run's members."""
    counts = Counter(record.wire_version for record in (await presences(transport, run)).values())
    if not counts:
        return skipped("versions", "no member of the run is listed")
    others = {version: number for version, number in counts.items() if version != WIRE_VERSION}
    if not others:
        listed = counted(counts.total(), "listed member")
        return good("versions", f"{listed}, of protocol version {WIRE_VERSION} as this program")
    words = ", ".join(f"{number} speak version {version}" for version, number in sorted(counts.items()))
    newest = max(others)
    todo = (
        "update this p2pdiloco" if newest > WIRE_VERSION else "ask the others to update, or use their version"
    )
    if WIRE_VERSION not in counts:
        return bad("versions", f"members: {words}; we speak {WIRE_VERSION}", todo)
    return warning("versions", f"members: {words}; we speak {WIRE_VERSION}", todo)


async def check_reach(transport: Transport, peers: Sequence[str]) -> list[Diagnosis]:
    """Ask peers to dial us, and tell by that what is between."""
    ports = tcp_ports(transport.addresses())[: wire.MAX_PORTS]
    query = wire.QUERY + wire.encode(wire.ReachQuery(tuple(ports)))
    own = multiaddrs.own_ips()
    asked: dict[str, list[Voice]] = {}
    why = ""
    for peer in peers[:MAX_ASKED]:
        try:
            answer = wire.decode(await transport.send(peer, query, ASK_S), wire.ReachAnswer)
            link = await transport.link(peer)
        except (RemoteError, TransportError) as error:
            why = f"…{peer[-6:]}: {error}"
            continue
        ips = link.ips if link is not None else ()
        family = "IPv6" if any(":" in ip for ip in ips) else "IPv4"
        asked.setdefault(family, []).append(Voice(peer, ips, answer.reached))
    if not asked:
        return [skipped("port", f"no peer tells whether it can dial us ({why})")]
    found = []
    for family, voices in sorted(asked.items()):
        far = any(voice.outlook(own)[0] for voice in voices)
        asker = counted(len(voices), "peer") if far else "a peer in our own network"
        places = {place for voice in voices for place in voice.reached}
        if not places:
            words = f"{asker} cannot dial us by {family} at port {', '.join(map(str, ports))}"
            found.append(warning("port", words, f"between is {likely_obstacle(family)}"))
            continue
        seen = ", ".join(f"{ip} port {port}" for ip, port in sorted(places)[:4])
        found.append(good("port", f"{asker} can dial us at {seen}"))
        outside = [ip for ip, _ in places if ip not in own]
        seen = (
            f"a NAT that forwards the port, as {outside[0]}" if outside else "none, as far as these peers see"
        )
        found.append(good("NAT", seen))
        if not far:
            todo = "ask a peer on the Internet: --join ADDRESS"
            found.append(skipped("NAT", "whether the Internet can dial us, nobody there was asked", todo))
    if "IPv4" not in asked:
        todo = "name a peer by its IPv4 address: --join /ip4/…"
        found.append(skipped("port", "whether peers can dial us by IPv4, nobody was asked by it", todo))
    return found


def likely_obstacle(family: str = "IPv4") -> str:
    """Word what is likely between us and those who cannot dial us by that family."""
    if family == "IPv6":
        return (
            f"a firewall, of the router mostly: let incoming IPv6 through to the port; until then {MEANWHILE}"
        )
    ip = ipaddress.ip_address(multiaddrs.way_out(socket.AF_INET) or "127.0.0.1")
    if multiaddrs.is_shared(ip):
        return f"the provider's own NAT, where no port can be forwarded: {MEANWHILE}"
    return f"a firewall: let the port through; until then {MEANWHILE}" if ip.is_global else PRIVATE_HINT


# The run: what it takes of this machine, and what the link to its peers carries of it.


async def find_run(
    transport: Transport, wanted: str, peers: Sequence[str]
) -> tuple[Diagnosis, ListedRun | None, Manifest | None]:
    """Find the run, for as long as a peer is silent. Raises: UserError (several fit), RemoteError."""
    search = RunSearch(transport, wanted, peers)
    while (listed := await search.look()) is None and search.waits:
        pass
    if listed is None:
        known = search.known
        todo = f"they know: {known}" if known else "a bootstrap serves one with --run run.toml"
        name = f'run "{wanted}"' if wanted else "run"
        return bad("run", f"these peers list no {name}", todo), None, None
    found = await search.published(listed) or await search.published(listed)
    if found is None:
        return bad("run", f"nobody gives the manifest of {clean(listed.name)}", "try again"), listed, None
    manifest = found.manifest
    admission = (
        ""
        if manifest.admission.mode == "open"
        else f", by {manifest.admission.mode}: p2pdiloco can-join says more"
    )
    words = f"{clean(manifest.run.name)} ({listed.run[:12]}), task {clean(manifest.run.task)}{admission}"
    return good("run", words), listed, manifest


def check_footprint(manifest: Manifest, data_dir: Path) -> Iterator[Diagnosis]:
    """Compare what the run takes with what is free. Raises: UserError, ModuleNotFoundError (no torch)."""
    from p2pdiloco.daemon.run_files.footprint import DAEMON_BYTES, LEARNER_BYTES, footprint_of

    takes = footprint_of(manifest)
    daemon = takes.daemon_bytes + takes.payload_bytes
    learner = takes.learner_bytes + takes.pass_bytes
    everything = daemon + learner + takes.loss_audit_bytes + DAEMON_BYTES + LEARNER_BYTES
    memory, disk = free_memory_bytes(), free_disk_bytes(existing_folder(data_dir))
    least = f"the run takes at least {size_text(everything)} with its learner on the CPU"
    words = f"{least}, {size_text(memory)} are free"
    if daemon + takes.loss_audit_bytes + DAEMON_BYTES > memory:
        yield bad("memory", words, "close other programs, or choose another machine")
    elif everything > memory:
        todo = "with a GPU whose memory holds the learner it fits: " + size_text(learner)
        yield warning("memory", words, todo)
    else:
        yield good("memory", words)
    words = f"the run takes about {size_text(takes.disk_bytes)}, {size_text(disk)} are free"
    if takes.disk_bytes > disk:
        yield bad("disk", words, "make room, or choose another disk with --data-dir")
    else:
        yield good("disk", words)


async def check_link(transport: Transport, peer: str, manifest: Manifest | None) -> Diagnosis:
    """Measure the link, and say what `plan` makes of it."""
    try:
        measured = await measure(transport, peer)
    except UserError as error:  # a peer that measures with somebody else is nothing bad
        return skipped("link", str(error), error.hint)
    words = f"{measured.words()} to …{peer[-6:]}"
    if manifest is None:
        return good("link", words)
    from p2pdiloco.daemon.network.link import demand

    members = manifest.group.expected_members or MEMBERS
    demands = [demand(manifest, measured.link, members, step_s) for step_s in STEP_TIMES_S]
    carried = next((needed for needed in demands if needed.carried and needed.every == 1), None)
    more = "p2pdiloco plan --join ADDRESS says more"
    if carried is None:
        few = demands[-1]
        todo = f"{more}; the run's owner can choose settings for slower links"
        return warning("link", f"{words}: too slow for every merge, {few.participation:.0%} at best", todo)
    shown = f"{words}: enough for every merge from {carried.step_s:g} s for an inner step on"
    if carried.step_s > 1.0:
        return warning("link", shown, f"a faster machine contributes less often; {more}")
    return good("link", shown)


# Checks, each with a bound in time, and all of them together.


async def findings_of(check: str, look: Look, within_s: float) -> AsyncIterator[Diagnosis]:
    """Look at one thing. Whatever goes wrong with that is a finding, too."""
    try:
        async with asyncio.timeout(within_s):
            told = await look()
            found = [told] if isinstance(told, Diagnosis) else list(told)
    except TimeoutError:
        found = [skipped(check, f"this took longer than {within_s:g} s")]
    except UserError as error:
        found = [bad(check, str(error), error.hint)]
    except Exception as error:  # noqa: BLE001  (a doctor looks at broken machines)
        found = [skipped(check, f"this could not be looked at: {type(error).__name__}: {first_line(error)}")]
    for finding in found:
        yield finding


async def all_of(
    found: AsyncIterator[Diagnosis], within_s: float, tell: Callable[[Diagnosis], None]
) -> list[Diagnosis]:
    """Tell of each finding when it is there; list them. A check that is not done in time is one more."""
    findings: list[Diagnosis] = []
    try:
        async with asyncio.timeout(within_s):
            async for finding in found:
                findings.append(finding)
                tell(finding)
    except TimeoutError:
        rest = f"what is left was not looked at: {within_s:g} s are over"
        findings.append(skipped("time", rest, "raise --timeout-s"))
        tell(findings[-1])
    return findings

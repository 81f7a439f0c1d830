"""`p2pdiloco doctor`: each finding has its level and what to do, and whatever fails is a line."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import psutil
import pytest

from p2pdiloco.adapters.data_dir import DataDir
from p2pdiloco.cli import doctor
from p2pdiloco.cli.doctor import all_of, findings_of
from p2pdiloco.cli.options import Diagnosis, Level, exit_status, good
from p2pdiloco.config.presets import for_bytes, for_run
from p2pdiloco.config.settings import DoctorSettings, NodeSettings
from p2pdiloco.config.values import peer_in
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import PeerRow, StatusReport
from p2pdiloco.daemon.network.reach import MeasuredLink
from p2pdiloco.daemon.network.router import Router
from p2pdiloco.daemon.run_files.known_runs import WaysIn, change_ways
from p2pdiloco.errors import PeerUnreachable, RemoteError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.release import WIRE_VERSION

PEER = "12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q"
ROOT = Path(__file__).parents[2]


def level(found: Sequence[Diagnosis]) -> list[str]:
    return [finding.level.value for finding in found]


async def test_whatever_fails_is_a_line_with_a_bound_in_time() -> None:
    async def found(look: Any, within_s: float = 5.0) -> Diagnosis:
        (only,) = [finding async for finding in findings_of("it", look, within_s)]
        return only

    async def raises(error: Exception) -> list[Diagnosis]:
        raise error

    async def hangs() -> list[Diagnosis]:
        await asyncio.Event().wait()
        return []

    told = await found(lambda: raises(UserError("wrong", "mend it")))
    assert (told.level, told.words, told.todo) == (Level.BAD, "wrong", "mend it")
    told = await found(lambda: raises(KeyError("x")))
    assert told.level is Level.SKIPPED and "could not be looked at: KeyError" in told.words
    told = await found(hangs, 0.01)
    assert told.level is Level.SKIPPED and "longer than 0.01 s" in told.words
    assert exit_status([good("a", "b"), told]) == 0
    assert exit_status([Diagnosis(Level.WARNING, "a", "")]) == 1
    assert exit_status([Diagnosis(Level.BAD, "a", ""), Diagnosis(Level.WARNING, "a", "")]) == 2


async def test_all_of_it_ends_in_time() -> None:
    async def findings() -> Any:
        yield good("a", "b")
        await asyncio.Event().wait()

    told: list[Diagnosis] = []
    found = await all_of(findings(), 0.01, told.append)
    assert found == told and level(found) == ["good", "skipped"] and "--timeout-s" in found[1].todo


# --- the machine ---------------------------------------------------------------------------------


def test_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert level(list(doctor.python_here())) == ["good", "good"]
    for files, wanted in ((100, "bad"), (512, "warning"), (1024, "good"), (resource.RLIM_INFINITY, "good")):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, files=files: (files, 4096))
        assert level(list(doctor.files_limit())) == [wanted], files
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: 1 << 20)
    monkeypatch.setattr(doctor, "free_disk_bytes", lambda folder: 1 << 40 if folder == tmp_path else 0)
    assert level(list(doctor.memory_and_disk(tmp_path / "not" / "there"))) == ["warning", "good"]
    assert "first start makes it" in next(iter(doctor.data_folder(tmp_path / "new"))).words
    assert "free for a node" in next(iter(doctor.data_folder(tmp_path))).words
    with DataDir(tmp_path):
        assert "a node or bootstrap runs with it" in next(iter(doctor.data_folder(tmp_path))).words
    with pytest.raises(UserError):
        list(doctor.data_folder(Path(__file__)))


def test_processes_that_a_node_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    uids = SimpleNamespace(real=os.getuid())
    processes = [
        {"pid": 7, "name": "p2pd", "ppid": 1, "cmdline": ["p2pd"], "uids": uids},
        {"pid": 8, "name": "p2pd", "ppid": 99, "cmdline": ["p2pd"], "uids": uids},
        {"pid": 9, "name": "p2pd", "ppid": 1, "cmdline": ["p2pd"], "uids": SimpleNamespace(real=-5)},
        {"pid": 10, "name": "python", "ppid": 1, "cmdline": None, "uids": None},
        {"pid": 11, "name": "p2pdiloco", "ppid": 1, "cmdline": ["python", "p2pdiloco", "node"], "uids": uids},
    ]  # the last is a service
    monkeypatch.setattr(psutil, "process_iter", lambda _keys: [SimpleNamespace(info=p) for p in processes])
    (found,) = doctor.leftovers()
    assert found.level is Level.WARNING and found.todo == "end them: kill 7"
    del processes[0]
    (found,) = doctor.leftovers()
    assert found.level is Level.GOOD and found.words.endswith("run here: 1")


@pytest.mark.process
async def test_a_torch_that_does_not_load_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ASK_TORCH", "raise ImportError('libcudart.so: no such file')")
    (found,) = await doctor.torch_here()
    assert found.level is Level.BAD and "libcudart.so" in found.words
    monkeypatch.setattr(doctor, "find_spec", lambda _name: None)
    (found,) = await doctor.torch_here()
    assert found.level is Level.SKIPPED and "a bootstrap needs none" in found.words
    said = {"version": "2", "threads": 2, "device": "cpu", "works": True, "built": "", "names": []}
    said |= {"free": 0, "same": True}
    monkeypatch.setattr(doctor, "NVIDIA", Path(__file__))
    assert level(list(doctor._of_torch(said))) == ["good", "warning"]
    assert level(list(doctor._of_torch({**said, "device": "cuda", "works": False}))) == ["good", "bad"]
    odd = list(doctor._of_torch({**said, "same": False}))
    assert level(odd) == ["good", "bad", "warning"] and "is no syncer" in odd[1].words


# --- names and addresses -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "ips", "ways", "wanted", "words"),
    [
        ("/dns/x.org/tcp/1", ["2001:4860::1"], ["IPv4"], "bad", "no IPv6"),
        ("/dns/x.org/tcp/1", ["2001:4860::1", "8.8.8.8"], ["IPv4"], "good", "8.8.8.8"),
        ("/dns4/x.org/tcp/1", ["2001:4860::1"], ["IPv4", "IPv6"], "bad", "asks for IPv4"),
        ("/dns6/x.org/tcp/1", ["2001:4860::1"], ["IPv6"], "good", "2001:4860::1"),
        ("/dns/x.org/tcp/1", ["127.0.1.1"], ["IPv4"], "warning", "this machine itself"),
        ("/dns/x.lan/tcp/1", ["192.168.1.2"], [], "good", "192.168.1.2"),
        ("/ip6/2001:4860::1/tcp/1", [], ["IPv4"], "skipped", "no IPv6"),  # links hold both kinds
        ("/dns/x.org/tcp/1", OSError(-2, "Name or service not known"), ["IPv4"], "bad", "leads nowhere"),
    ],
)
async def test_pitfalls_of_names_and_ipv6(
    monkeypatch: pytest.MonkeyPatch, address: str, ips: Any, ways: list[str], wanted: str, words: str
) -> None:
    async def getaddrinfo(_host: str, _port: None, **_: Any) -> list[Any]:
        if isinstance(ips, OSError):
            raise ips
        return [(0, 0, 0, "", (ip, 0)) for ip in ips]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    families = {socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}
    monkeypatch.setattr(doctor, "has_route", lambda family: families[family] in ways)
    found, behind = await doctor.check_given_addresses([f"{address}/p2p/{PEER}"])
    assert behind == (f"{address}/p2p/{PEER}",)
    assert found[0].level is (Level.GOOD if ways else Level.WARNING)
    assert (found[1].level.value, words in found[1].words) == (wanted, True), found


# --- peers ---------------------------------------------------------------------------------------


class Peers:
    """Transport of the doctor, as far as it asks."""

    def __init__(self, ahead_s: float = 0.0, reached: bool = True, ip: str = "8.8.8.8") -> None:
        self.ahead_s, self.reached, self.ip = ahead_s, reached, ip
        self.versions: list[int] = []

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        if "/tcp/9/" in addresses[0]:
            raise PeerUnreachable("dial: connection refused")

    async def meet(self, peer: str) -> float:
        if peer == "mute":
            raise PeerUnreachable("gone")
        return self.ahead_s

    async def get_records(self, key: str) -> dict[str, bytes]:
        record = [wire.encode(wire.Presence(version, 1, "x", ())) for version in self.versions]
        return {str(number): value for number, value in enumerate([*record, b"nonsense"])}

    def addresses(self) -> list[str]:
        return [f"/ip4/0.0.0.0/tcp/4001/p2p/{PEER}"]

    async def send(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        if peer == "mute":
            raise RemoteError("dial-back-too-often")
        return wire.encode(wire.ReachAnswer((("203.0.113.9", 4001),) if self.reached else ()))

    async def link(self, peer: str) -> Any:
        return SimpleNamespace(ips=(self.ip,))


@pytest.mark.parametrize(
    ("ahead_s", "wanted"), [(0.2, "good"), (-2.0, "warning"), (3.5, "bad"), (-1000.0, "bad")]
)
async def test_the_clock_is_compared_with_the_peers(ahead_s: float, wanted: str) -> None:
    found = await doctor.check_clock(Peers(ahead_s), ["mute", "a", "b"])  # type: ignore[arg-type]
    assert found.level.value == wanted
    if wanted != "good":
        assert ("behind" in found.words) is (ahead_s > 0) and "set-ntp" in found.todo
    found = await doctor.check_clock(Peers(), ["mute"])  # type: ignore[arg-type]
    assert found.level is Level.SKIPPED


async def test_versions_are_compared_with_the_members() -> None:
    transport = Peers()
    for versions, wanted, todo in (
        ([], "skipped", ""),
        ([WIRE_VERSION] * 3, "good", ""),
        ([WIRE_VERSION, WIRE_VERSION + 1], "warning", "update this"),
        ([WIRE_VERSION - 1], "bad", "ask the others"),
    ):
        transport.versions = versions
        found = await doctor.check_versions(transport, "ab" * 32)  # type: ignore[arg-type]
        assert found.level.value == wanted and todo in found.todo


async def test_a_peer_that_is_slow_to_answer_is_asked_again_for_its_runs() -> None:
    listed = wire.encode(wire.RunList((wire.RunSummary("ab" * 32, "slow", "me"),)))
    sent = AsyncMock(side_effect=[PeerUnreachable("no answer in 3 s"), listed])
    pulled = AsyncMock(side_effect=PeerUnreachable("no answer in 10 s"))
    peer = SimpleNamespace(get_records=AsyncMock(return_value={}), send=sent, pull=pulled)
    found, run, _ = await doctor.find_run(peer, "slow", ["a"])  # type: ignore[arg-type]
    assert run is not None and "nobody gives the manifest of slow" in found.words
    assert (sent.await_count, pulled.await_count) == (2, 2)


async def test_peers_are_asked_whether_they_can_dial_us(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"ip4": ["192.168.1.7", "127.0.0.1"], "ip6": ["fe80::1", "2600:1::7"]}
    way = ["192.168.1.7"]
    monkeypatch.setattr(doctor.multiaddrs, "interface_addresses", own.__getitem__)
    monkeypatch.setattr(doctor.multiaddrs, "way_out", lambda _family: way[0])
    found = await doctor.check_reach(Peers(), ["mute", "a"])  # type: ignore[arg-type]
    assert level(found) == ["good", "good"] and "203.0.113.9" in found[1].words
    found = await doctor.check_reach(Peers(ip="192.168.1.3"), ["a"])  # type: ignore[arg-type]
    assert level(found) == ["good", "good", "skipped"], "a neighbour knows nothing of the Internet"
    (found_1,) = await doctor.check_reach(Peers(reached=False), ["a"])  # type: ignore[arg-type]
    assert found_1.level is Level.WARNING and "forward the port" in found_1.todo
    way[0] = "100.80.0.1"
    (found_1,) = await doctor.check_reach(Peers(reached=False), ["a"])  # type: ignore[arg-type]
    assert "provider's own NAT" in found_1.todo
    way[0] = "8.8.4.4"
    (found_1,) = await doctor.check_reach(Peers(reached=False), ["a"])  # type: ignore[arg-type]
    assert "a firewall" in found_1.todo
    (found_1,) = await doctor.check_reach(Peers(), ["mute"])  # type: ignore[arg-type]
    assert found_1.level is Level.SKIPPED and "too-often" in found_1.words


async def test_what_peers_say_is_told_by_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.multiaddrs, "own_ips", lambda: {"192.168.1.7", "2600:1::7"})
    by_ip6 = await doctor.check_reach(Peers(ip="2600:2::1", reached=False), ["a"])  # type: ignore[arg-type]
    assert level(by_ip6) == ["warning", "skipped"] and "by IPv6" in by_ip6[0].words
    assert "firewall, of the router mostly" in by_ip6[0].todo and "--join /ip4/" in by_ip6[1].todo
    near = await doctor.check_reach(Peers(ip="2600:1::9"), ["a"])  # type: ignore[arg-type]
    assert level(near) == ["good", "good", "skipped", "skipped"], "of our own /64: no router is between"


async def test_peers_that_are_not_there_are_named_with_the_reason() -> None:
    other = PEER[:-1] + "r"
    addresses = [f"/ip4/203.0.113.1/tcp/9/p2p/{PEER}", f"/ip4/203.0.113.1/tcp/8/p2p/{other}"]
    found, reached = await doctor.dial_peers(Peers(), addresses)  # type: ignore[arg-type]
    assert level(found) == ["warning", "good"] and reached == [other], "one is enough to join through"
    assert "connection refused" in found[0].words
    found, _ = await doctor.dial_peers(Peers(), addresses, {PEER, other})  # type: ignore[arg-type]
    assert level(found) == ["skipped", "good"] and "met before" in found[0].words
    for met in (set(), {PEER}):
        found, _ = await doctor.dial_peers(Peers(), addresses[:1], met)  # type: ignore[arg-type]
        assert level(found) == ["bad"]


@pytest.mark.net
async def test_whom_its_user_names_the_doctor_dials_wherever_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that was met before is a stranger, whose address may be of another network."""
    own = {"ip4": ["10.9.9.9", "127.0.0.1"], "ip6": []}
    monkeypatch.setattr(doctor.multiaddrs, "own_addresses", lambda: own)
    monkeypatch.setattr(doctor, "torch_here", AsyncMock(return_value=[]))
    named, member = (f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}" for _ in range(2))
    change_ways(tmp_path, WaysIn.having_met, [[member]])
    for join, why in (((named,), "connection refused"), ((), "no address that may be dialled")):
        found = doctor.examine(DoctorSettings(data_dir=tmp_path, join=join))
        (words,) = [each.words async for each in found if each.check == "peers"]
        assert why in words


def test_whom_the_folder_was_told_to_join_through_is_looked_at_too(tmp_path: Path) -> None:
    own, told, member = (f"/ip4/203.0.113.{n}/tcp/9/p2p/{Identity.generate().peer_id}" for n in range(1, 4))
    asked = DoctorSettings(data_dir=tmp_path)
    assert doctor.addresses_to_dial(asked, tmp_path, ()) == ((), frozenset())
    settings = NodeSettings(join=("/dnsaddr/boot.example", told))
    change_ways(tmp_path, WaysIn.joined, settings, "ab" * 32)
    change_ways(tmp_path, WaysIn.having_met, [[told], [member]])
    addresses, met = doctor.addresses_to_dial(asked, tmp_path, [own])
    assert addresses == (own, "/dnsaddr/boot.example", told, member)
    assert met == {peer_in(own), peer_in(member)}, "who was told has to be there"
    given = DoctorSettings(data_dir=tmp_path, join=(member,))
    assert doctor.addresses_to_dial(given, tmp_path, [own]) == ((member,), frozenset())


def test_what_a_run_takes_is_compared_with_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = for_bytes(for_run("tiny", "tiny"))
    for memory, disk, wanted in (
        (1 << 40, 1 << 40, ["good", "good"]),
        (1 << 20, 10, ["bad", "bad"]),
        (600 << 20, 1 << 40, ["warning", "good"]),
    ):
        monkeypatch.setattr(doctor, "free_memory_bytes", lambda memory=memory: memory)
        monkeypatch.setattr(doctor, "free_disk_bytes", lambda _folder, disk=disk: disk)
        assert level(list(doctor.check_footprint(manifest, tmp_path / "new"))) == wanted


@pytest.mark.parametrize(
    ("rate", "wanted", "words"),
    [(1e10, "good", "enough for every merge"), (4e5, "warning", "from 3 s"), (1e3, "warning", "too slow")],
)
async def test_what_the_link_carries(
    rate: float, wanted: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(_transport: Any, _peer: str) -> MeasuredLink:
        return MeasuredLink(0.01, rate, rate, 1, 1.0)

    monkeypatch.setattr(doctor, "measure", measure)
    transport: Any = None
    found = await doctor.check_link(transport, PEER, for_bytes(for_run("tiny", "tiny")))
    assert found.level.value == wanted and words in found.words


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.process
def test_the_command_without_torch_and_with_nobody_there(tmp_path: Path) -> None:
    arguments = ["doctor", "--data-dir", str(tmp_path / "new"), "--json"]
    arguments += ["--join", f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}", "--timeout-s", "60"]
    code = f"""
import sys
from importlib import util
find = util.find_spec
class No:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'torch':
            raise ModuleNotFoundError(f'no {{name}}', name='torch')
sys.meta_path.insert(0, No())
util.find_spec = lambda name: None if name == 'torch' else find(name)
from p2pdiloco.cli.group import run
sys.exit(run({arguments!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = {line["check"]: line for line in lines}
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert found["torch"]["level"] == "skipped" and found["peers"]["level"] == "bad"
    assert "connection refused" in found["peers"]["words"] and "clock" not in found
    assert not (tmp_path / "new").exists(), "a doctor leaves nothing behind"


@pytest.mark.parametrize("joined", ["own", "other"])
async def test_the_word_of_the_node_that_runs_here_counts(
    joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
    told = StatusReport(
        run_name="x",
        run_id="ab",
        answered_by=PEER,
        state="training",
        members=(PeerRow(peer=PEER, reach="direct"),),
    )
    asked: list[str] = []

    async def ask(_transport: Any, peer: str, _run: str) -> tuple[StatusReport, int]:
        asked.append(peer)
        return told, 1

    monkeypatch.setattr(doctor, "ask_status", ask)
    visit = doctor.Visit(Peers(), Router(Mock()), DoctorSettings(), Path(), [own])  # type: ignore[arg-type]
    visit._run, visit._reached = "ab", [PEER if joined == "own" else "other"]
    (found,) = await visit._reach()
    assert (found.level, found.words) == (Level.GOOD, "the node that runs here is reached: direct")
    assert asked == [PEER]
    gone = doctor.Visit(
        Peers(), Router(Mock()), DoctorSettings(), Path(), ["/ip4/127.0.0.1/tcp/9/p2p/" + PEER]
    )  # type: ignore[arg-type]
    gone._run, gone._reached = "ab", ["other"]
    (found,) = await gone._reach()
    assert found.level is Level.SKIPPED and "does not say" in found.words

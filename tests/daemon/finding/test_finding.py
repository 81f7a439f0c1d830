"""Finding peers: looks at the DHT, strangers' records, names that lead nowhere, twins, the local network."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from daemon_kit import signed_run, until
from deadlines import within_s
from presence_kit import our_record

from p2pdiloco import WIRE_VERSION
from p2pdiloco.adapters import multiaddrs
from p2pdiloco.adapters.dials import Attempts, NotNow
from p2pdiloco.adapters.multiaddrs import Nearby
from p2pdiloco.config.settings import ANY_ADDRESS, NodeSettings
from p2pdiloco.core.api import events as ev
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network import discovery
from p2pdiloco.daemon.network import discovery as presence_module
from p2pdiloco.daemon.network import discovery as twins_module
from p2pdiloco.daemon.network.discovery import (
    AGAIN_S,
    CALMEST,
    COMPLAIN_AFTER,
    DIAL_PATIENCE_S,
    FIRST_S,
    LOOK_FAST_S,
    LOOK_S,
    MIN_TURNS,
    MOST_REST_S,
    RENEW_S,
    REST_S,
    SETTLED_S,
    UNKNOWN_DIALS,
    UNKNOWN_DIALS_S,
    Presence,
    Sharing,
    Twins,
    listen_again,
    look_up_again,
    refuse_beside_a_twin,
)
from p2pdiloco.daemon.network.discovery import LOOKS as MAX_LOOKS
from p2pdiloco.daemon.run_files.known_runs import WaysIn, change_ways
from p2pdiloco.errors import PeerUnreachable, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.learner.channel import DataShare
from p2pdiloco_lab.bulk_world.bulk_plan import in_virtual_time
from p2pdiloco_lab.memory_net import MemoryNetwork, MemoryTransport

LOOKS = 12
PATIENCE_S = 5.0


class Board:
    """A DHT with one key."""

    def __init__(self) -> None:
        self.peer_id = "me"
        self.records: dict[str, bytes] = {}
        self.puts: list[bytes] = []
        self.works, self.others = True, 2

    def enter(self, peer: str) -> None:
        self.records[peer] = wire.encode(wire.Presence(WIRE_VERSION, 1, peer, ("/ip4/1.2.3.4/tcp/1",), True))

    def addresses(self) -> list[str]:
        return []

    async def get_records(self, _key: str) -> dict[str, bytes]:
        return dict(self.records)

    async def put_record(self, _key: str, value: bytes, _lifetime_s: float) -> bool:
        self.puts.append(value)
        return self.works

    def peers_connected(self) -> int:
        return self.others

    def connected(self) -> list[str]:
        return []

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        pass


def paused(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[int], None]) -> list[float]:
    """Lengths of pauses; what happens in each, by its number; after the last one all ends."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        meanwhile(len(pauses))
        if len(pauses) == LOOKS:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", pause)
    return pauses


async def test_our_record_is_published_no_more_though_it_changed_in_the_moment_of_the_end() -> None:
    board, ours = Board(), our_record()
    presence = Presence(board, "run", ours, lambda event: None)  # type: ignore[arg-type]
    publishing = asyncio.create_task(presence.publish())
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(board.puts) == 1, "it waits for news"
    ours.news.set()
    publishing.cancel()
    done, _ = await asyncio.wait({publishing}, timeout=within_s(PATIENCE_S))
    publishing.cancel()
    assert done and len(board.puts) == 1


async def test_whom_a_look_has_met_is_kept_in_one_write() -> None:
    """Each of them was a write of its own, and the disk kept all other threads' work waiting."""
    board, kept = Board(), list[int]()
    for peer in "abcd":
        board.enter(peer)
    presence = Presence(
        board,  # type: ignore[arg-type]
        "run",
        our_record(),
        lambda event: None,
        keep=lambda met: kept.append(len(met)),
    )
    for _ in range(2):
        await presence.look()
    assert kept == [4], "and nothing, where nobody is new"


async def test_members_are_looked_up_less_often_while_they_stay_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = Board()
    seen: list[ev.Event] = []
    presence = Presence(board, "run", our_record(), seen.append)  # type: ignore[arg-type]
    settled = False

    def meanwhile(number: int) -> None:
        nonlocal settled
        settled = number >= 2
        if number == 11:
            board.enter("newcomer")

    pauses = paused(monkeypatch, meanwhile)
    with pytest.raises(asyncio.CancelledError):
        await presence.watch(lambda: settled)
    assert pauses[:2] == [LOOK_FAST_S, LOOK_FAST_S]
    assert LOOK_S < pauses[2] < pauses[3] and pauses[10] == CALMEST * LOOK_S
    assert pauses[11] == LOOK_S, "somebody came"
    assert len(seen) == LOOKS, "the core hears of every look"


@pytest.mark.parametrize("work", ["publish", "watch"])
async def test_what_others_read_is_looked_up_less_often_once_our_learner_is_there(
    monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    learner = SimpleNamespace(status=None)

    def meanwhile(number: int) -> None:
        if number == 3:
            learner.status = SimpleNamespace(share=None)

    pauses = paused(monkeypatch, meanwhile)
    with pytest.raises(asyncio.CancelledError):
        await getattr(Sharing(Board(), "run", learner), work)()  # type: ignore[arg-type]
    assert pauses[:3] == [FIRST_S] * 3 and FIRST_S < pauses[3] < pauses[4] and pauses[11] == SETTLED_S


async def test_what_nobody_could_be_told_is_told_again_soon_and_a_person_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board = Board()
    board.works = False
    learner = SimpleNamespace(status=SimpleNamespace(share=DataShare("books", 0, b"\x01")))
    sharing = Sharing(board, "run", learner)  # type: ignore[arg-type]

    def meanwhile(number: int) -> None:
        board.works = number >= 5

    pauses = paused(monkeypatch, meanwhile)
    with pytest.raises(asyncio.CancelledError):
        await sharing.publish()
    assert pauses[:6] == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S, FIRST_S, FIRST_S, FIRST_S]
    assert len(board.puts) == 6, "then it is there, for a while"
    assert sharing.failures == 5
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1 and f"could not be told {COMPLAIN_AFTER} times" in said[0]
    board.works, board.others, sharing._renew_s = False, 0, -RENEW_S
    assert not await sharing.tell() and sharing.failures == 5, "alone there is nobody to be told"
    board.works = True
    assert await sharing.tell() and len(board.puts) == 8, "but somebody may have come"


# Records of strangers in the DHT: so many are dialled in a time, in turn, and none keeps others waiting.


def test_an_allowance_fills_again_with_time() -> None:
    attempts = Attempts(4, 8.0)
    assert [attempts.take(0.0) for _ in range(5)] == [True] * 4 + [False]
    assert attempts.take(2.0) and not attempts.take(2.0)
    assert [attempts.take(1000.0) for _ in range(5)] == [True] * 4 + [False]


class Closed:
    """Guests of a run that has admitted nobody, who do not answer."""

    def admits(self, peer: str) -> bool:
        return False

    def is_banned(self, peer: str) -> bool:
        return False

    async def meet(self, peer: str) -> object | None:
        return None


class Notes(MemoryTransport):
    def __init__(self, hub: MemoryNetwork, peer: str) -> None:
        super().__init__(hub, peer)
        self.dialled: list[str] = []

    async def connect(self, peer: str, addresses: Any) -> None:
        self.dialled.append(peer)


async def test_unknown_authors_are_dialled_in_turn_and_count_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hub = signed_run(tmp_path), MemoryNetwork()
    me = Notes(hub, Identity.generate().peer_id)
    await me.start(FrontDoor())
    other = hub.transport(Identity.generate().peer_id)
    await other.start(FrontDoor())
    authors = {f"stranger {n:03}" for n in range(100)}
    record = wire.encode(wire.Presence(WIRE_VERSION, 7, "x", ("/memory/p2p/x",)))
    now, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
    other._records[wire.members_key(run.id)] = {author: (record, now + 1e6) for author in authors}
    seen: list[Any] = []
    presence = Presence(me, run.id, our_record(), seen.append, guests=Closed())
    shift = 0.0
    clock = loop.time
    monkeypatch.setattr(loop.__class__, "time", lambda _: clock() + shift)
    for _ in range(6):
        await presence.look()
    assert UNKNOWN_DIALS <= len(me.dialled) == len(set(me.dialled)) <= UNKNOWN_DIALS + 8
    for _ in range(4):
        shift += UNKNOWN_DIALS_S
        for _ in range(3):
            await presence.look()
    assert set(me.dialled) == authors
    assert all(not event.members.members and not event.unreached for event in seen)
    assert not presence.names


# Names on the DHT that nobody ever heard of: dialled ever more rarely, and nothing to the core.

GHOSTS = 300


class GhostBoard:
    """A DHT with one key, and peers of whom some answer."""

    def __init__(self) -> None:
        self.peer_id = "me"
        self.records: dict[str, bytes] = {}
        self.answering: set[str] = set()
        self.came: list[str] = []
        """Peers that dialled us."""
        self.dialled: dict[str, list[float]] = {}

    def enter(self, peer: str, dialable: bool = True) -> None:
        record = wire.Presence(WIRE_VERSION, 1, peer, ("/ip4/1.2.3.4/tcp/1",), dialable)
        self.records[peer] = wire.encode(record)

    async def get_records(self, _key: str) -> dict[str, bytes]:
        return dict(self.records)

    def connected(self) -> list[str]:
        return self.came

    def learn(self, peer: str, addresses: Any) -> None:
        pass

    async def connect(self, peer: str, addresses: Any) -> None:
        self.dialled.setdefault(peer, []).append(asyncio.get_running_loop().time())
        await asyncio.sleep(0)
        if peer not in self.answering:
            raise PeerUnreachable("connection refused")


def presence_on(board: Any, worked: set[str], seen: list[ev.PresenceSeen], at_once: int = 4096) -> Presence:
    return Presence(
        board, "run", our_record(), seen.append, dial_at_once=at_once, has_worked=worked.__contains__
    )  # type: ignore[arg-type]


async def looks(presence: Presence, seconds: float) -> None:
    end_s = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end_s:
        await presence.look()
        await asyncio.sleep(3.0)


@pytest.mark.parametrize("dialable", [True, False])
@pytest.mark.parametrize("at_once", [16, 4096])
def test_the_core_hears_of_no_ghost_and_ghosts_keep_no_member_waiting(dialable: bool, at_once: int) -> None:
    async def run() -> None:
        board, seen = GhostBoard(), list[ev.PresenceSeen]()
        for number in range(GHOSTS):
            board.enter(f"ghost {number}", dialable)
        presence = presence_on(board, {"worked"}, seen, at_once)
        await looks(presence, 30.0)
        for peer in ("answers", "worked", "came", "me"):
            board.enter(peer)
        board.answering, board.came = {"answers"}, ["came"]
        await looks(presence, 180.0)
        assert {peer for look in seen for peer, _ in look.members.members} == {
            "answers",
            "worked",
            "came",
        } | {"me"}
        assert dict(seen[-1].members.members).keys() == {"answers", "worked", "came", "me"}
        assert seen[-1].unreached == GHOSTS
        dials = sum(len(times) for peer, times in board.dialled.items() if peer.startswith("ghost"))
        assert dials <= UNKNOWN_DIALS + UNKNOWN_DIALS * 210 / 12 + 16
        assert presence._dials == {} and DIAL_PATIENCE_S < 3.0

    in_virtual_time(run())


def test_a_dial_that_is_put_off_is_not_held_against_the_peer() -> None:
    class Busy(GhostBoard):
        async def connect(self, peer: str, addresses: Any) -> None:
            with contextlib.suppress(PeerUnreachable):
                await super().connect(peer, addresses)
            if len(self.dialled[peer]) < 5:
                raise NotNow("too many dials")

    async def run() -> None:
        board, seen = Busy(), list[ev.PresenceSeen]()
        board.enter("late")
        presence = presence_on(board, set(), seen)
        await looks(presence, 5 * LOOK_S)
        assert len(board.dialled["late"]) == 5 and presence._connected and not presence._rests

    in_virtual_time(run())


def test_who_could_not_be_dialled_is_dialled_ever_more_rarely_until_it_answers() -> None:
    async def run() -> None:
        board, seen = GhostBoard(), list[ev.PresenceSeen]()
        board.enter("late")
        presence = presence_on(board, set(), seen)
        await looks(presence, 600.0)
        times = board.dialled["late"]
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert REST_S <= pauses[0] < REST_S + 3.1 and pauses == sorted(pauses)
        assert MOST_REST_S <= pauses[-1] < MOST_REST_S + 3.1 and len(times) < 12
        board.answering = {"late"}
        await looks(presence, MOST_REST_S + 3.0)
        assert dict(seen[-1].members.members).keys() == {"late"} and "late" not in presence._rests

    in_virtual_time(run())


# A name of the DNS that led nowhere at a start is looked up again, until somebody behind it is reached.

NAME = "/dnsaddr/boot.example"


async def test_whom_a_name_lists_is_dialled_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = MemoryNetwork()
    me, boot = (hub.transport(Identity.generate().peer_id) for _ in range(2))
    gone = f"/ip4/203.0.113.9/tcp/1/p2p/{Identity.generate().peer_id}"
    await boot.start(FrontDoor())
    await me.start(FrontDoor())
    dialled: list[str] = []
    answers: list[list[str]] = [
        [],
        [gone],
        [gone, f"/ip4/127.0.0.1/tcp/1/p2p/{me.peer_id}", *boot.addresses()],
    ]

    def peers_behind(names: Sequence[str]) -> list[str]:
        assert list(names) == [NAME]
        found = answers.pop(0)
        if not found:
            raise UserError("the name cannot be looked up")
        return found

    async def connect(peer: str, _addresses: Sequence[str]) -> None:
        dialled.append(peer)
        if peer != boot.peer_id:
            raise PeerUnreachable("nobody")

    monkeypatch.setattr(discovery, "peers_behind", peers_behind)
    monkeypatch.setattr(discovery, "PAUSE_S", 0.0)
    monkeypatch.setattr(me, "connect", connect)
    looking = look_up_again(me, [NAME])
    await until(looking.done, "an end of it")
    assert looking.exception() is None and not answers
    assert dialled.count(boot.peer_id) == 1 and me.peer_id not in dialled


async def test_where_all_names_were_found_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "peers_behind", None)
    me = MemoryNetwork().transport(Identity.generate().peer_id)
    await look_up_again(me, [])


# Two processes of one identity: they see each other's record in place of their own, in turns.

LIFETIME_S = 45.0
EARLIER, OURS, LATER = 10, 20, 30


def told(looks: list[tuple[float, int]], log: pytest.LogCaptureFixture) -> tuple[str, int]:
    """Take looks of (time, incarnation) each; return what ends us, and how often we warn."""
    twins = Twins(OURS, LIFETIME_S)
    log.clear()
    try:
        for now, incarnation in looks:
            twins.look(incarnation, "copy", now)
    except UserError as error:
        return str(error), len(log.records)
    return "", len(log.records)


def turns(other: int, every_s: float = 6.0, times: int = 20) -> list[tuple[float, int]]:
    """Ours, the other's, ours, ..."""
    return [(i * every_s, other if i % 2 else OURS) for i in range(times)]


def test_the_earlier_of_two_ends_and_the_later_one_says_so(caplog: pytest.LogCaptureFixture) -> None:
    reason, warned = told(turns(LATER), caplog)
    assert "another node (copy)" in reason and warned == 0
    reason, warned = told(turns(EARLIER), caplog)
    assert reason == "" and warned == 2
    assert "(copy)" in caplog.text and "--data-dir of its own" in caplog.text


@pytest.mark.parametrize("other", [EARLIER, LATER])
def test_of_two_with_different_clocks_the_one_that_nobody_sees_ends(
    other: int, caplog: pytest.LogCaptureFixture
) -> None:
    looks = [(0.0, OURS), *((3.0 + i * 3.0, other) for i in range(100))]
    reason, _ = told(looks, caplog)
    assert "others see that one" in reason
    assert told(looks[1:], caplog)[0] == reason, "also if ours never was there"
    assert told([(i * 3.0, OURS) for i in range(100)], caplog) == ("", 0), "and the other goes on"


@pytest.mark.parametrize("other", [EARLIER, LATER])
@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(lambda other: [(i * 3.0, other) for i in range(30)], id="never ours yet: an old record"),
        pytest.param(
            lambda other: [(i * 3000.0 + d, who) for i in range(9) for d, who in ((0, OURS), (6, other))],
            id="now and then a copy is tried out",
        ),
        pytest.param(
            lambda other: [*turns(other, times=14)[:14:2], (99.0, other)], id="once, after a cut perhaps"
        ),
        pytest.param(lambda other: turns(other, every_s=4.0, times=11), id="within the life of a record"),
    ],
)
def test_what_an_earlier_life_has_left_behind_is_nobody(
    looks: object, other: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(looks)
    assert told(looks(other), caplog) == ("", 0)


async def test_a_look_at_the_dht_ends_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_module, "LIFETIME_S", 1e-9)
    for bound in ("STANDS_FOR", "FORGOTTEN_AFTER"):
        monkeypatch.setattr(twins_module, bound, math.inf)
    transport = MemoryNetwork().transport(Identity.generate().peer_id)
    await transport.start(FrontDoor())
    presences = {
        n: Presence(transport, "run", our_record(n, f"life {n}"), lambda event: None) for n in (1, 2)
    }

    async def write(incarnation: int) -> None:
        record = wire.Presence(WIRE_VERSION, incarnation, f"life {incarnation}", ("/memory/p2p/x",))
        await transport.put_record(wire.members_key("run"), wire.encode(record), 60.0)
        await presences[2].look()

    for _ in range(MIN_TURNS - 1):
        for incarnation in (1, 2):
            await write(incarnation)
            await presences[1].look()
    await write(1)
    await presences[1].look()
    await write(2)
    with pytest.raises(UserError, match=r"another node \(life 2\) .* began later"):
        await presences[1].look()


class Elsewhere:
    """What a transport tells before it starts: at these places its own identity answers so many times."""

    def __init__(self, answers: dict[tuple[str, int], int]) -> None:
        self.peer_id = Identity.generate().peer_id
        self._answers = answers
        self.asked: list[tuple[str, int]] = []

    async def answers_at(self, peer: str, host: str, port: int, timeout_s: float) -> bool:
        assert peer == self.peer_id
        self.asked.append((host, port))
        self._answers[host, port] = self._answers.get((host, port), 0) - 1
        return self._answers[host, port] >= 0


async def look(answers: dict[tuple[str, int], int], addresses: list[str]) -> list[tuple[str, int]]:
    transport = Elsewhere(answers)
    await refuse_beside_a_twin(transport, [f"{a}/p2p/{transport.peer_id}" for a in addresses])  # type: ignore[arg-type]
    return transport.asked


ORIGINAL = "/ip4/192.0.2.7/tcp/31337"


async def test_a_copy_that_can_reach_the_original_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins_module, "TWINS_PAUSE_S", 0.0)
    for address, place in ((ORIGINAL, ("192.0.2.7", 31337)), ("/dns4/a.example/tcp/1", ("a.example", 1))):
        with pytest.raises(UserError, match=f"identity, at {place[0]} port {place[1]}") as told:
            await look({place: 99}, ["/ip4/127.0.0.1/tcp/9", address])
        assert "--data-dir of its own" in told.value.hint


async def test_neither_nobody_nor_who_is_about_to_end_is_a_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins_module, "TWINS_PAUSE_S", 0.0)
    assert await look({}, []) == []
    assert await look({}, [ORIGINAL, f"{ORIGINAL}/p2p-circuit"]) == [("192.0.2.7", 31337)]
    place = ("192.0.2.7", 31337)
    assert await look({place: MAX_LOOKS - 1}, [ORIGINAL]) == [place] * MAX_LOOKS, (
        "p2pd of one that was killed"
    )


# Who looks in the local network, when, and what is made of what is found there.

RUN, OTHER = "ab" * 32, "cd" * 32
ONE, TWO = (
    Nearby(f"peer{n}", (f"/ip4/192.0.2.{n}/tcp/1/p2p/peer{n}",), runs=(run[:12],))
    for n, run in ((1, RUN), (2, OTHER))
)


@pytest.fixture
def nearby(monkeypatch: pytest.MonkeyPatch) -> list[Nearby]:
    found: list[Nearby] = []
    monkeypatch.setattr(discovery, "look_nearby", lambda: found)
    monkeypatch.setattr(discovery, "at_terminal", lambda: True)
    return found


def looked(tmp_path: Path, **values: object) -> NodeSettings:
    settings = NodeSettings(data_dir=tmp_path, **values)  # type: ignore[arg-type]
    return discovery.with_nearby(settings, lambda _text: None)


def test_the_only_run_is_taken(nearby: list[Nearby], tmp_path: Path) -> None:
    nearby.append(ONE)
    found = looked(tmp_path)
    assert found.join == ONE.addresses and found.run == RUN[:12]
    assert looked(tmp_path, run=RUN).run == RUN, "the whole id, of which the manifest is checked"
    named = looked(tmp_path, run="ours")
    assert named.run == "ours" and named.join == ONE.addresses


def test_of_several_one_is_named(nearby: list[Nearby], tmp_path: Path) -> None:
    nearby += [ONE, TWO]
    with pytest.raises(UserError, match="2 runs in this network: abababababab, cdcdcdcdcdcd"):
        looked(tmp_path)
    assert looked(tmp_path, run=OTHER).join == TWO.addresses
    assert looked(tmp_path, run="ef" * 32).join == ()


@pytest.mark.process
@pytest.mark.parametrize(
    "values", [{"join": ("/ip4/192.0.2.9/tcp/1/p2p/x",)}, {"genesis": True}, {"run_file": Path("run.toml")}]
)
def test_who_knows_where_to_go_does_not_look(
    values: dict[str, object], nearby: list[Nearby], tmp_path: Path
) -> None:
    nearby.append(ONE)
    assert looked(tmp_path, lan=True, **values) == NodeSettings(data_dir=tmp_path, lan=True, **values)  # type: ignore[arg-type]


def test_nobody_joins_a_stranger_s_run_unasked(
    nearby: list[Nearby], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearby.append(ONE)
    with pytest.raises(UserError, match="nobody is asked whether to join it"):
        looked(tmp_path, lan=True, yes=True)
    monkeypatch.setattr(discovery, "at_terminal", lambda: False)
    assert looked(tmp_path).join == (), "without a terminal only --lan looks"
    for run in ("", "ours"):
        with pytest.raises(UserError, match="nobody is asked whether to join it"):
            looked(tmp_path, lan=True, run=run)
    assert looked(tmp_path, lan=True, run=RUN).join == ONE.addresses
    monkeypatch.setattr(discovery, "at_terminal", lambda: True)
    change_ways(tmp_path, WaysIn.reached_at, ONE.addresses)
    assert looked(tmp_path).join == ONE.addresses, "where it was itself leads nowhere"
    change_ways(tmp_path, WaysIn.having_met, [ONE.addresses])
    assert looked(tmp_path).join == (), "it has met peers before"
    assert looked(tmp_path, lan=True).join == ONE.addresses


def test_the_library_is_missed_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by who only wants to be announced."""
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(UserError, match="zeroconf"):
        looked(tmp_path, lan=True, genesis=True)


def test_a_network_that_cannot_be_looked_through_matters_with_lan_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> list[Nearby]:
        raise UserError("no multicast")

    monkeypatch.setattr(discovery, "look_nearby", fails)
    monkeypatch.setattr(discovery, "at_terminal", lambda: True)
    assert looked(tmp_path).join == ()
    with pytest.raises(UserError, match="no multicast"):
        looked(tmp_path, lan=True)


# The port of an earlier start is taken again, unless somebody else has it or another one is asked for.


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


def everywhere(port: int) -> list[str]:
    """All addresses of this machine, of both families."""
    return [f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}"]


@pytest.mark.process
async def test_the_last_port_is_taken_again_for_both_families(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    assert await listen_again(0, ANY_ADDRESS) == everywhere(0)
    assert await listen_again(free_port, ANY_ADDRESS) == everywhere(free_port)
    assert await listen_again(0, ("/ip4/0.0.0.0/tcp/31337",)) == everywhere(31337), "as the guides have it"
    for asked_for in (("/ip4/127.0.0.1/tcp/0",), ("/ip4/0.0.0.0/tcp/1", "/ip6/fd00::5/tcp/2")):
        assert tuple(await listen_again(free_port, asked_for)) == asked_for
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert tuple(await listen_again(0, ANY_ADDRESS)) == ANY_ADDRESS, "it was switched off here"
    assert await listen_again(free_port, ANY_ADDRESS) == everywhere(free_port)[:1]


@pytest.mark.process
async def test_a_port_that_somebody_else_has_is_given_up_with_a_word(
    free_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "PORT_PAUSE_S", 0.0)
    with socket.socket() as other:
        other.bind(("0.0.0.0", free_port))
        other.listen()
        wished = multiaddrs.of_both_families(ANY_ADDRESS)
        assert await listen_again(free_port, ANY_ADDRESS) == wished
    assert f"port {free_port}, which this peer had, is taken" in caplog.text

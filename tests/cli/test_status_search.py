"""Whom `status` asks, and what it says when nobody answers: on the network in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from asking_kit import RUN, Network

from p2pdiloco.adapters.data_dir import DataDir
from p2pdiloco.adapters.hivemind_net import MAX_REASON, why_unreached
from p2pdiloco.cli import live_result, status_command
from p2pdiloco.cli.status_command import NoNodes, Search, Unreachable
from p2pdiloco.config.settings import BootstrapSettings, StatusSettings
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import StatusReport
from p2pdiloco.daemon.notice import Notice, signed, with_word
from p2pdiloco.daemon.run_files.known_runs import ListedRun, Way, WaysIn, change_ways
from p2pdiloco.errors import PeerUnreachable, StorageError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco_lab.memory_net import MemoryTransport


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with contextlib.aclosing(Network()) as made:
        yield made


async def ask(network: Network, wanted: str = "", patience_s: float = 5.0) -> StatusReport:
    visitor, search = await network.visitor(), Search(wanted, [])
    try:
        async with asyncio.timeout(patience_s):
            return (await search.reports(visitor, enough=1))[0]
    except TimeoutError:
        raise search.failure(patience_s) from None


async def test_the_next_member_is_asked_when_one_refuses_or_is_dead_or_answers_nonsense(
    network: Network,
) -> None:
    await network.add(None, incarnation=5)
    await network.add("training", incarnation=4, run="cd" * 32)
    network.hub.kill(await network.add("training", incarnation=3))
    good = await network.add("training", incarnation=2)
    assert (await ask(network, "test")).answered_by == good


async def test_a_member_that_is_still_catching_up_answers_only_if_nobody_else_does(network: Network) -> None:
    late = await network.add("catching up", incarnation=9)
    assert (await ask(network)).answered_by == late
    settled = await network.add("training", incarnation=1)
    assert (await ask(network, RUN[:8])).answered_by == settled


async def test_failure_says_what_was_found(network: Network) -> None:
    with pytest.raises(Exception, match=r"listed no run within 1 s"):
        await ask(network, patience_s=1.0)
    silent = await network.add(None)
    with pytest.raises(NoNodes, match=r"no member of run test answered within 1 s$") as nobody:
        await ask(network, patience_s=1.0)
    assert nobody.value.details == [f"…{silent[-6:]}: not-a-member"]
    with pytest.raises(Exception, match='the peers know no run "other"') as caught:
        await ask(network, "other", patience_s=1.0)
    assert caught.value.hint == f"they know: test ({RUN[:12]})"  # type: ignore[attr-defined]


async def test_whoever_cannot_be_dialled_is_a_short_line_with_the_first_reason() -> None:
    peer = Identity.from_seed(bytes(32)).peer_id
    why = ["connection refused", f"all dials failed\n  * [/ip4/192.0.2.2/tcp/{'3' * 40}] dial backoff"]
    transport = SimpleNamespace(connect=AsyncMock(side_effect=[PeerUnreachable(f"{peer}: {w}") for w in why]))
    search = Search("", [])
    search.members = AsyncMock(return_value={peer: ("/ip4/192.0.2.2/tcp/1",)})  # type: ignore[method-assign]
    search._run = ListedRun(RUN, ["test"], [])
    for _ in why:
        assert await search.ask_members(transport, RUN, 1) == []  # type: ignore[arg-type]
    assert search.failure(1.0).details == [f"…{peer[-6:]}: connection refused"]


def test_a_reason_of_no_known_kind_has_short_ids_and_says_that_it_is_cut() -> None:
    peer = Identity.from_seed(bytes(32)).peer_id
    assert why_unreached([PeerUnreachable(f"{peer}: it rains")], ()) == f"…{peer[-6:]}: it rains"
    long = why_unreached([PeerUnreachable(f"{peer} " + "it rains " * 60)], ())
    assert long.startswith("…") and len(long) == MAX_REASON + 1


async def test_who_wants_the_result_is_told_once_what_is_waited_for(
    network: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.asynccontextmanager
    async def visitor(_join: tuple[str, ...]) -> AsyncIterator[MemoryTransport]:
        yield await network.visitor()

    async def said(wanted: str) -> list[str]:
        with pytest.raises(Exception, match=r"within 1 s|the peers know no run"):
            await live_result._copied(Way((), wanted), (), 1.0, [])
        return capsys.readouterr().err.splitlines()

    monkeypatch.setattr(live_result, "visitor", visitor)
    monkeypatch.setattr(status_command, "SAY_AFTER_S", 0.3)
    assert await said("") == ["no run is listed by these peers yet: waiting, for at most 1 s"]
    await network.add(None)
    assert await said("") == ["no member of run test answers yet: waiting, for at most 1 s"]
    (line,) = await said("other")
    assert line.startswith(f'no run "other" is listed by these peers yet, but test ({RUN[:12]}): waiting')
    monkeypatch.setattr(status_command, "SAY_AFTER_S", 30.0)
    assert await said("") == []


HAS, LACKS, BUSY, GONE, SOON = "has", "lacks", "busy", "gone", "soon"


@pytest.mark.parametrize(
    ("number", "others", "is_taken"),
    [
        (1000, (), True),
        (1000, (HAS, LACKS), True),
        (1000, (HAS, LACKS, LACKS), False),
        (1000, (LACKS,), False),
        (1000, (BUSY, GONE), True),
        (1000, (GONE, LACKS), False),
        (1000, (SOON,), True),
        (983, (HAS, HAS), False),
        (1, (LACKS, LACKS), False),
        (0, (HAS, HAS), False),
    ],
)
async def test_a_version_that_is_old_or_that_most_other_seats_lack_is_nobodys_result(
    number: int, others: tuple[str, ...], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks: Counter[str] = Counter()

    async def pull_page(_transport: object, peer: str, asked: wire.PullHistory) -> list[object]:
        asks[peer] += 1
        if peer == GONE:
            raise PeerUnreachable(peer)
        if peer == BUSY:
            raise wire.PullRefused(PullRefusal.BUSY)
        if peer == LACKS or (peer == SOON and asks[peer] < 2):
            raise wire.PullRefused(PullRefusal.NOT_HERE)
        return [asked]

    monkeypatch.setattr(live_result, "pull_page", pull_page)
    monkeypatch.setattr(live_result, "RETRY_S", 0.0)
    copy: Any = object.__new__(live_result._ResultCopy)
    copy._run = SimpleNamespace(id=RUN, manifest=SimpleNamespace(group=SimpleNamespace(log_versions=16)))
    rows = (SimpleNamespace(number=1000),)
    copy._reports = [SimpleNamespace(answered_by=peer, fragments=rows) for peer in ("giver", *others)]
    copy._transport, copy._asking, copy._silent = None, defaultdict(asyncio.Lock), set()
    header = SimpleNamespace(fragment=0, number=number, digest=lambda: bytes(32))
    assert await copy._is_the_runs("giver", header) is is_taken


OWNER = Identity.from_seed(bytes(32))


def open_run(mode: str, *seats: str) -> Any:
    admission = SimpleNamespace(mode=mode, seats=seats)
    manifest = SimpleNamespace(admission=admission)
    return SimpleNamespace(id=RUN, name="test", owners=(OWNER.peer_id,), manifest=manifest)


async def believed(network: Network, run: Any) -> list[str]:
    """Peers whose parameters whoever only asks takes."""
    visitor, search = await network.visitor(), Search("", [])
    reports = await search.reports(visitor)
    return [report.answered_by for report in await live_result._of_seats(visitor, run, search, reports, ())]


async def test_the_parameters_of_an_open_run_are_those_of_its_seats_however_many_strangers_come_first(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat = await network.add("training", incarnation=1)
    for more in range(2):
        await network.add("training", incarnation=9 + more)
    monkeypatch.setattr(status_command, "MAX_ASKED", 2)
    monkeypatch.setattr(live_result, "RETRY_S", 0.0)
    assert await believed(network, open_run("open", seat)) == [seat]
    network.hub.kill(seat)
    with pytest.raises(UserError, match=r"none of the 1 seats that the owner of test has named answers"):
        await believed(network, open_run("open", seat))


async def test_a_run_by_invite_is_read_from_its_seats_as_far_as_they_let_us_and_else_from_whoever_does(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invite may have given the others a seat."""
    seat, other = [await network.add("training", incarnation=n) for n in range(2)]
    lets = {seat, other}

    async def read(_transport: object, _run: object, reports: list[StatusReport], _shown: object) -> Any:
        return [report for report in reports if report.answered_by in lets]

    monkeypatch.setattr(live_result, "_that_let_us_read", read)
    assert await believed(network, open_run("invite", seat)) == [seat]
    lets.remove(seat)
    assert await believed(network, open_run("invite", seat)) == [other]


async def test_the_newest_true_notice_says_who_else_has_a_seat_and_whose_has_ended(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other, gone = [await network.add("training", incarnation=n) for n in range(3)]
    named = with_word(with_word(Notice(RUN, 5), other, seated=True), gone, seated=False)
    false = with_word(Notice(RUN, 7), gone, seated=True)
    notices = {first: signed(named, OWNER), other: signed(false, Identity.generate())}

    async def answer(_transport: object, peer: str, *_: object) -> wire.NoticeAnswer:
        return wire.NoticeAnswer(notices.get(peer))

    monkeypatch.setattr("p2pdiloco.cli.owner_notice.ask", answer)
    assert set(await believed(network, open_run("open", first, gone))) == {first, other}


@pytest.mark.process
def test_the_node_of_this_machine_is_asked_if_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
    monkeypatch.setattr(status_command, "visit", lambda body: body.close())
    monkeypatch.setattr(status_command, "_report", asked := AsyncMock())
    monkeypatch.setattr(status_command, "json_line", lambda report: "{}")
    with pytest.raises(StorageError, match="does not exist"):
        status_command.run(StatusSettings(data_dir=tmp_path / "no" / "folder"))
    change_ways(tmp_path, WaysIn.reached_at, [address])
    with pytest.raises(Unreachable, match="no node and no bootstrap runs here") as told:
        status_command.run(StatusSettings(data_dir=tmp_path))
    assert told.value.exit_status == 4 and "--data-dir" in told.value.hint
    with DataDir(tmp_path):
        assert status_command.run(StatusSettings(data_dir=tmp_path, json=True)) == 0
        assert asked.call_args[0][0].join == (address,)
        other = ("/ip4/192.0.2.1/tcp/1/p2p/x",)
        status_command.run(StatusSettings(data_dir=tmp_path, join=other, json=True))
        assert asked.call_args[0][0].join == other, "who is named is asked"
    # Where no folder is named: the usual ones, of which there may be one.
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    usual = BootstrapSettings().data_dir.expanduser()
    usual.mkdir(parents=True)
    with pytest.raises(Unreachable, match=f"with the data folder {usual}$"):
        status_command.run(StatusSettings())
    change_ways(usual, WaysIn.reached_at, [address])
    with DataDir(usual):
        status_command.run(StatusSettings(json=True))
    assert asked.call_args[0][0].join == (address,)


@pytest.mark.net
def test_nobody_there_and_nobody_in_time_have_one_exit_status() -> None:
    nobody = (f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}",)
    for timeout_s, words in ((20.0, "None of the initial peers"), (0.001, "could be reached within 0.001 s")):
        with pytest.raises(Unreachable, match=words) as told:
            status_command.run(StatusSettings(join=nobody, timeout_s=timeout_s))
        assert told.value.exit_status == 4


def test_what_is_written_to_a_pipe_is_not_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = "said " * 40
    report = StatusReport(
        run_name="test", run_id=RUN, answered_by="x", state="training", recent=(start,), link="l " * 80
    )
    monkeypatch.setattr(status_command, "visit", lambda body: (body.close(), report)[1])
    monkeypatch.delenv("COLUMNS", raising=False)
    assert status_command.run(StatusSettings(join=("/ip4/192.0.2.1/tcp/1/p2p/x",))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert start.rstrip() in [line.rstrip() for line in lines] and max(map(len, lines)) < 250
    monkeypatch.setenv("COLUMNS", "100")
    status_command.run(StatusSettings(join=("/ip4/192.0.2.1/tcp/1/p2p/x",)))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100

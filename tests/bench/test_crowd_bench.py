"""`bench_attacks --who crowd`: rows, options, the verdict, and what a rider sends. No process is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from attacks import crowd_bench, doorkeeper
from attacks.crowd import KINDS, Accusers, Crowd, Forgers, Mutes
from attacks.crowd_outcome import CrowdRow, CrowdSeen, counted, judge_crowd
from attacks.rider import CrowdWork, Rider, first_doors
from p2pdiloco.config.manifest import save_signed, sign_manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.core.api.messages import VoteGranted, VoteRequest, decode
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import NEVER, Contributor, Head, Stamp, signed_bytes
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.admission import Register
from p2pdiloco.identity import Identity, verify
from p2pdiloco.tensors.codecs import codec, norm
from p2pdiloco_lab.simulation.seed_plan import genesis_version

CALM = CrowdSeen(
    versions=60,
    tokens_counted=1.0,
    loss=3.0,
    excluded=0,
    ended=0,
    forged=(),
    weight_share=0.0,
    seats_share=0.0,
)
BAD = {
    "parameters": {"forged": ("0/1017",)},
    "an honest member excluded": {"excluded": 1},
    "an honest node ended": {"ended": 3},
    "versions": {"versions": 50},
    "tokens": {"tokens_counted": 2.8},
    "loss": {"loss": 3.2},
}


def test_every_kind_of_crowd_comes_to_young_and_old_runs_by_every_door() -> None:
    rows = {tuple(row.split("-", 2)) for row in crowd_bench.ROWS}
    assert {kind for _, _, kind in rows} == {*KINDS} and len(rows) == 24
    for age in ("young", "old"):
        assert {door for its, door, _ in rows if its == age} == {"open", "invite", "race", "admits"}


@pytest.mark.parametrize("what", BAD)
def test_each_thing_that_should_hold_and_does_not_is_named(what: str) -> None:
    assert judge_crowd("x", 5, CALM, CALM, {}).broken == []
    row = judge_crowd("young-open-rides", 5, msgspec.structs.replace(CALM, **BAD[what]), CALM, {"votes": 2})
    assert row.broken == [what]
    assert what in crowd_bench.shown([row]) and "votes 2" in crowd_bench.shown([row])
    assert msgspec.convert(msgspec.to_builtins(row), CrowdRow) == row


def test_options_choose_rows_and_refuse_what_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = crowd_bench.options(["--who", "crowd", "--only", "old-race-rides", "--riders", "16"])
    assert (chosen.rows, chosen.riders) == (["old-race-rides"], 16)
    assert crowd_bench.options([]).rows == [*crowd_bench.ROWS]
    for words in (["--only", "young-open"], ["--riders", "0"], ["--seconds", "1e9"]):
        with pytest.raises(SystemExit):
            crowd_bench.options(words)
    assert "error" in capsys.readouterr().err


def test_tokens_are_those_of_the_time_between(tmp_path: Path) -> None:
    lines = [
        {"mono": 1.0, "run_tokens": 100, "tokens_total": 90},
        {"mono": 9.0, "run_tokens": 700, "tokens_total": 290},
        {"mono": 11.0, "run_tokens": 10**6, "tokens_total": 10**6},
    ]
    log = tmp_path / "events.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)) + '\n{"mono": 9.5, "run_tok')
    node: Any = SimpleNamespace(events=log)
    assert counted([node], [node], 2.0, 10.0) == pytest.approx(600 / 200)
    side: Any = SimpleNamespace(swarm=SimpleNamespace(nodes=[node]))
    counts = crowd_bench.Count(2.0, 100), crowd_bench.Count(10.0, 350)
    assert crowd_bench.in_chain(side, *counts) == pytest.approx(250 / 200)
    assert crowd_bench.in_chain(side, None, counts[1]) == 0.0


@pytest.fixture
def work(tmp_path: Path) -> CrowdWork:
    signed, owner = tmp_path / "manifest.signed", Identity.generate()
    save_signed(signed, sign_manifest(for_run("micro", "crowds", 1), bytes(32), owner, owner.peer_id))
    return CrowdWork(
        attack="rides",
        folder=str(tmp_path / "riders"),
        join=f"/ip4/127.0.0.1/tcp/1/p2p/{owner.peer_id}",
        run="simulated",
        run_name="crowds",
        members={"b": (), "a": (), "c": ()},
        manifest=str(signed),
        seconds=10.0,
        riders=4,
    )


def test_doors_are_all_or_another_one_each_or_those_of_one_member(work: CrowdWork) -> None:
    def of(doors: str) -> list[tuple[str, ...]]:
        return [first_doors(msgspec.structs.replace(work, doors=doors), place) for place in range(3)]

    assert of("all") == [("a", "b", "c")] * 3
    assert of("one") == [("a",), ("b",), ("c",)]
    assert of("c") == [("a", "b", "c"), ("c",), ("c",)]


class Line:
    """In place of a transport: what was sent and pushed."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.pushed: list[tuple[str, Any, bytes]] = []

    async def send(self, peer: str, data: bytes, _timeout_s: float) -> bytes:
        self.sent.append((peer, data))
        return b""

    async def push(self, peer: str, header: bytes, payload: Any, _timeout_s: float) -> tuple[bool, bytes]:
        self.pushed.append((peer, wire.decode(header, wire.PushContribution).signed, bytes(payload[0])))
        return True, wire.encode(wire.Answer(Verdict.HELD, None))


@pytest.fixture
def rider(work: CrowdWork) -> Iterator[tuple[Crowd, Rider, Line]]:
    crowd = Crowd(work)
    line = Line()
    crowd.riders[0].transport = line  # type: ignore[assignment]
    yield crowd, crowd.riders[0], line


async def test_a_rider_sends_the_newest_update_with_noise_and_marks_what_was_merged(
    rider: tuple[Crowd, Rider, Line],
) -> None:
    crowd, me, line = rider
    at = crowd.fragments[0]
    header = msgspec.structs.replace(genesis_version(0).header, number=7, reach=2.0)
    at.versions.append(SignedVersion(header, b""))
    at.update = torch.randn(at.numel)
    me.offices["all", 0] = 3, "b"
    await me.contribute(at)
    await me.contribute(at)
    (peer, signed, payload), (_, again, other) = line.pushed
    label = signed.contributor().work("simulated", 0)
    assert peer == "b" and verify(me.id, signed_bytes("work", label), signed.signature)
    assert (signed.header.after, signed.header.base_number) == (NEVER, 7) and payload != other
    got = torch.zeros(at.numel)
    codec(signed.header.codec).decode(payload, got)
    assert torch.nn.functional.cosine_similarity(got, at.update, dim=0) > 0.9
    assert norm(got) == pytest.approx(2.0, rel=0.05)
    part = Contributor(me.id, again.header.stamp, 1, 1, votes=True)
    merged = SignedVersion(msgspec.structs.replace(header, contributors=(part,)), b"")
    assert me.take_in(merged) and not me.take_in(merged)
    assert me.merged == {0: Stamp(1, 2)} and me.seats_in == {0}


async def test_a_rider_votes_once_a_term_and_not_when_it_is_mute(rider: tuple[Crowd, Rider, Line]) -> None:
    _, me, line = rider
    request = VoteRequest("all", 0, 3, Head(1, bytes(32), 1, 1), "open")
    await me.on_message("a", wire.message("simulated", request))
    await me.on_message("b", wire.message("simulated", request))
    ((peer, data),) = line.sent
    granted = decode("simulated", data[1:])
    assert peer == "a" and isinstance(granted, VoteGranted) and granted.vote.body.candidate == "a"
    me.mute = True
    await me.on_message("a", wire.message("simulated", msgspec.structs.replace(request, term=4)))
    assert len(line.sent) == 1


async def test_crowds_do_what_their_kind_says(work: CrowdWork) -> None:
    mutes = Mutes(work)
    assert not mutes.many_enough()
    for one in mutes.riders:
        one.merged = {at.index: Stamp(1, 1) for at in mutes.fragments}
    assert mutes.many_enough()
    await mutes.strike()
    assert all(one.mute for one in mutes.riders)
    old = Accusers(msgspec.structs.replace(work, folder=work.folder + "-2"))
    header = msgspec.structs.replace(genesis_version(0).header, syncer="a")
    made = [SignedVersion(msgspec.structs.replace(header, number=n), b"") for n in (1, 2, 12)]
    old.fragments[0].versions += made
    assert old._old_versions() == {"a": made[1]}
    forgers = Forgers(msgspec.structs.replace(work, folder=work.folder + "-3"))
    for at in forgers.fragments:
        at.versions.append(genesis_version(at.index))
    await forgers.strike()
    assert all({*one.forged} == {0, 1, 2, 3} for one in forgers.riders)
    assert [f for f in range(4) if forgers.works_on(forgers.riders[1], f)] == [1]


def test_a_doorkeeper_lets_everybody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Register, "_closed", Register._closed)
    doorkeeper.admit_anybody()
    nothing: Any = None
    assert Register._closed(nothing, nothing, "p", False) is None

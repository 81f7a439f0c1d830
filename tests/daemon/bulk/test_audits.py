"""Audits over the network: whom the contributions come from, and what is found."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from audit_kit import AuditNode, AuditTown, memory_town
from daemon_kit import Neighbourhood, until
from msgspec.structs import replace

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import AuditOutcome, PullRefusal
from p2pdiloco.core.api.types import UNCLEAR, UNMEASURED, Contributor, MergeLimits
from p2pdiloco.daemon.budgets import Background
from p2pdiloco.daemon.bulk import merge_audits
from p2pdiloco.daemon.bulk.merge_audits import Auditing
from p2pdiloco.daemon.driver import Executors, Post, Runner
from p2pdiloco.daemon.wire import PullRefused
from p2pdiloco.hashing import content_digest
from p2pdiloco.tensors.merge import digest_of

SAME, DIFFERENT, MISSING = AuditOutcome.SAME, AuditOutcome.DIFFERENT, AuditOutcome.MISSING


def left_over(node: AuditNode) -> tuple[int, int, int]:
    """Tickets, memory and scratch; the worker lets go of its last job a moment after it is done."""
    return len(node.tickets), node.memory.claimed_bytes, node.spool.held_bytes


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[AuditTown]:
    async with await memory_town(tmp_path) as made:
        yield made
        for node in made.nodes:
            node.forget()
            await until(lambda node=node: left_over(node) == (0, 0, 0), "all is released")


def given(nodes: list[AuditNode]) -> list[bool]:
    """Who gave anything."""
    return [node.given_bytes > 0 for node in nodes]


async def test_the_contributions_come_from_their_learners(town: AuditTown) -> None:
    version = await town.version()
    assert await town.auditor.audit(version) is SAME
    assert given(town.learners) == [True, True, True] and not town.syncer.given_bytes
    assert town.auditor.transfers.bytes_in == sum(map(len, town.payloads))
    assert town.auditor.vault.version(0) == 0, "neither state nor spare is touched"


async def test_the_runner_carries_out_what_the_core_asks_for(town: AuditTown) -> None:
    node, wanted = town.auditor, [ev.Ask(7, ev.Audit(0, await town.version()))]
    heard: list[ev.Event] = []

    def handle(event: ev.Event, _now: float) -> list[ev.Ask]:
        heard.append(event)
        return wanted if isinstance(event, ev.Tick) else []

    core: Any = SimpleNamespace(
        handle=handle,
        next_deadline=lambda: asyncio.get_running_loop().time() + 1000.0,
    )
    post, background = Post(), Background()
    hands: Any = dict.fromkeys(Executors.__struct_fields__) | {
        "tickets": node.tickets,
        "transfers": node.transfers,
        "merging": node.merging,
        "loss_auditing": SimpleNamespace(audit=None),
        "trying": SimpleNamespace(tried=None),
    }
    runner = Runner(core, post, background, Executors(**hands))
    post.put(ev.Tick())
    await until(lambda: len(heard) > 1, "it is told")
    assert heard == [ev.Tick(), ev.Answered(7, ev.Audited(SAME))]
    runner.close()
    await background.close()


async def test_of_a_learner_that_is_gone_the_syncer_gives_it(town: AuditTown) -> None:
    version = await town.version()
    await town.gone(town.learners[1])
    assert await town.auditor.audit(version) is SAME
    assert given(town.learners) == [True, False, True]
    assert town.syncer.given_bytes == len(town.payloads[1])


async def test_a_contribution_that_nobody_gives_is_missing(town: AuditTown) -> None:
    version = await town.version()
    await town.gone(town.learners[1], town.syncer)
    assert await town.auditor.audit(version) is MISSING


async def test_a_learner_audits_with_its_own(town: AuditTown) -> None:
    version = await town.version()
    assert await town.learners[0].audit(version) is SAME
    assert given(town.learners) == [False, True, True]


async def test_a_copy_is_fetched_once(town: AuditTown) -> None:
    version = await town.version([town.payloads[0], town.payloads[0], town.payloads[2]])
    await town.gone(town.learners[0])
    assert await town.auditor.audit(version) is SAME
    assert town.syncer.given_bytes == len(town.payloads[0])


@pytest.mark.parametrize(
    "lie",
    [
        {"update_digest": content_digest(b"noise")},
        {"limits": MergeLimits(300, 0.05)},
        {"limits": MergeLimits(0, 0.5)},
        {"limits": MergeLimits(300, math.nan)},
        {"limits": MergeLimits(300, 0.0)},
        {"limits": MergeLimits(300, 0.1, math.nan)},
        {"contributors": ()},
    ],
)
async def test_an_update_that_is_not_their_merge_is_found(town: AuditTown, lie: dict[str, Any]) -> None:
    assert await town.auditor.audit(await town.version(**lie)) is DIFFERENT


async def test_an_audit_compares_with_those_that_vote_as_the_syncer_did(tmp_path: Path) -> None:
    async with await memory_town(tmp_path, learners=5) as town:
        honest = (await town.version(voters=3)).header
        parts = honest.contributors
        stated = {"update_digest": honest.update_digest, "limits": honest.limits}
        assert await town.auditor.audit(town.named(contributors=parts, **stated)) is SAME
        nobodys = tuple(replace(part, votes=False) for part in parts)
        assert await town.auditor.audit(town.named(contributors=nobodys, **stated)) is DIFFERENT


@pytest.mark.parametrize(
    "lie",
    [
        lambda part: {"score": part.score - 1},
        lambda part: {"score": UNMEASURED},
        lambda part: {"length": math.nextafter(part.length, math.inf)},
        lambda part: {"length": 0.0},
    ],
)
async def test_what_a_syncer_states_falsely_of_a_contribution_is_found(
    town: AuditTown, lie: Callable[[Contributor], dict[str, Any]]
) -> None:
    honest = (await town.version(voters=3)).header
    parts = honest.contributors
    assert {part.score for part in parts} - {UNMEASURED, UNCLEAR} and all(part.length for part in parts)
    false = (parts[0], replace(parts[1], **lie(parts[1])), parts[2])
    stated = {"update_digest": honest.update_digest, "limits": honest.limits}
    assert await town.auditor.audit(town.named(contributors=false, **stated)) is DIFFERENT
    assert await town.auditor.audit(town.named(contributors=parts, **stated)) is SAME


@pytest.mark.parametrize("poison", [b"short", "nan"])
async def test_no_honest_syncer_merges_what_is_no_contribution(town: AuditTown, poison: Any) -> None:
    version = await town.version()
    poisoned = bytearray(poison if poison != "nan" else bytes(len(town.payloads[0]) - 4) + b"\0\0\xc0\x7f")
    learner = town.learners[0]
    learner.chain.contributions[content_digest(poisoned)] = poisoned
    labels = [learner.label(poisoned, 0), *version.header.contributors[1:]]
    facts = {"update_digest": version.header.update_digest, "contributors": tuple(labels)}
    assert await town.auditor.audit(town.named(**facts)) is DIFFERENT


async def test_false_bytes_of_a_learner_do_not_count(town: AuditTown) -> None:
    version = await town.version()
    liar, payload = town.learners[0], town.payloads[0]
    liar.chain.contributions[content_digest(payload)] = town.payloads[1]
    assert await town.auditor.audit(version) is SAME
    assert liar.given_bytes and town.syncer.given_bytes == len(payload)
    liar.chain.contributions[content_digest(payload)] = bytes(len(payload) + 1)
    await town.gone(town.syncer)
    assert await town.auditor.audit(version) is MISSING, "nor does what is too long"


async def test_a_learner_that_says_nothing_holds_nothing_up(
    town: AuditTown, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await town.version()

    async def silence(*_: object) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(merge_audits, "SOURCE_S", 0.05)
    town.learners[0].chain.contribution_of = silence
    assert await town.auditor.audit(version) is SAME
    assert town.syncer.given_bytes == len(town.payloads[0])
    monkeypatch.setattr(merge_audits, "AUDIT_S", 0.1)
    town.syncer.chain.contribution_of = silence
    town.syncer.transfers.merged.give_up()
    assert await town.auditor.audit(version) is MISSING


async def test_what_finds_no_place_in_memory_lies_on_the_disk(
    town: AuditTown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_audits, "SHARE_BYTES", 0)
    version, spool = await town.version(), town.auditor.spool
    taken: list[int] = []
    take = spool.take
    monkeypatch.setattr(spool, "take", lambda size: taken.append(size) or take(size))
    assert await town.auditor.audit(version) is SAME
    assert taken == [len(town.payloads[0])] * 3
    monkeypatch.setattr(spool, "fits", lambda _size: False)
    assert await town.auditor.audit(version) is MISSING


async def test_an_audit_takes_no_memory_that_is_wanted(town: AuditTown) -> None:
    version, memory = await town.version(), town.auditor.memory
    memory.fetch_bytes, memory.most_bytes = 100, 100 + len(town.payloads[0]) - 1
    assert await town.auditor.audit(version) is MISSING
    assert memory.refused


async def test_a_damage_of_our_own_accuses_nobody(town: AuditTown, monkeypatch: pytest.MonkeyPatch) -> None:
    version = await town.version()
    place = Auditing._place

    async def damaged(self: Auditing, fetched: Any, payload: Any, size: int) -> Any:
        payload[0] ^= 1
        return await place(self, fetched, payload, size)

    monkeypatch.setattr(Auditing, "_place", damaged)
    assert await town.auditor.audit(version) is MISSING


async def test_who_finds_a_merge_false_gives_others_what_they_need_to_find_the_same(town: AuditTown) -> None:
    version = await town.version(update_digest=content_digest(b"noise"))
    accuser, other = town.auditor, town.learners[0]
    assert await accuser.audit(version) is DIFFERENT
    await town.gone(*town.learners[1:], town.syncer)
    assert await other.audit(version) is MISSING
    assert await other.audit(version, accuser) is DIFFERENT
    assert accuser.given_bytes == sum(map(len, town.payloads[1:]))


async def test_what_is_kept_of_false_merges_is_bounded_by_the_newest_and_by_time(
    town: AuditTown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_audits, "KEEP_S", 0.05)
    kept, payload = town.auditor.transfers.merged, town.payloads[0]
    kept.keep_audited(0, {b"one": payload})
    kept.keep(0, [(b"own", 99, payload)])
    kept.keep_audited(0, {b"two": payload})
    for _ in range(2):  # the same version may be audited twice
        kept.keep_audited(0, {b"own": payload, b"one": payload})
    assert all(kept.get(0, name) for name in (b"one", b"two", b"own")) and kept.held_bytes == 3 * len(payload)
    monkeypatch.setattr(merge_audits, "MOST_MEMORY_BYTES", 2 * len(payload))
    kept.keep_audited(0, {b"one": payload})
    assert not kept.get(0, b"two") and kept.get(0, b"own") and kept.get(0, b"one"), "the oldest goes"
    await until(lambda: not kept.get(0, b"one"), "it is forgotten")


async def test_who_does_not_calculate_as_all_others_do_finds_nothing_and_says_so(
    town: AuditTown, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(merge_audits, "merges_as_everywhere", lambda: False)
    for _ in range(2):
        version = await town.version(update_digest=content_digest(b"noise"))
        assert await town.auditor.audit(version) is AuditOutcome.UNABLE
    assert caplog.text.count("does not calculate as all others do") == 1


async def test_a_merge_that_does_not_come_out_the_same_twice_accuses_nobody(
    town: AuditTown, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, maker = await town.version(update_digest=content_digest(b"noise")), town.auditor.vault.maker
    remake, times = maker.remake, iter(range(9))

    def flickering(*asked: Any) -> Any:
        return replace(remake(*asked), update_digest=bytes([next(times)] * 32))

    monkeypatch.setattr(maker, "remake", flickering)
    assert await town.auditor.audit(version) is MISSING


async def test_audits_take_turns_and_few_wait(town: AuditTown) -> None:
    version = await town.version()
    many = [town.auditor.audit(version) for _ in range(merge_audits.MAX_WAITING + 3)]
    found = await asyncio.gather(*many)
    assert found.count(SAME) == merge_audits.MAX_WAITING + 1 and found.count(MISSING) == 2


async def test_contributions_are_given_to_members_and_within_bounds(town: AuditTown) -> None:
    version = await town.version()
    learner, auditor, digest = town.learners[0], town.auditor, content_digest(town.payloads[0])

    async def refusal(holder: AuditNode, digest: bytes, fragment: int = 0) -> PullRefusal:
        with pytest.raises(PullRefused) as caught:
            await auditor.ask(holder, digest, fragment)
        return caught.value.why

    assert version.header.contributors[0].payload_digest == digest
    assert await refusal(learner, bytes(32)) is PullRefusal.NOT_HERE
    assert await refusal(learner, digest, 999) is PullRefusal.UNKNOWN_FRAGMENT
    learner.chain.strangers.add(auditor.name)
    assert await refusal(learner, digest) is PullRefusal.NOT_A_MEMBER
    learner.chain.strangers.clear()
    learner.chain.may_serve = False
    assert await refusal(learner, digest) is PullRefusal.NOT_READY
    learner.chain.may_serve = True
    for _ in range(merge_audits.COPIES):
        assert await auditor.ask(learner, digest) == town.payloads[0]
    assert await refusal(learner, digest) is PullRefusal.BUSY
    assert await town.learners[1].ask(learner, digest) == town.payloads[0]


async def test_a_syncer_keeps_what_it_merged_for_a_while_however_fast_it_merges(
    town: AuditTown, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, memory, size = town.syncer.transfers.merged, town.syncer.memory, len(town.payloads[0])
    first = content_digest(town.payloads[0])
    await town.version()
    assert kept.held_bytes == memory.claimed_bytes == 3 * size
    other = [learner.contribute(7 + n) for n, learner in enumerate(town.learners)]
    await town.version(other)
    assert kept.held_bytes == 6 * size and kept.get(0, first) is not None, "those of the version before, too"
    memory.most_bytes = 4 * size
    assert not memory.fits_push(5 * size) and kept.held_bytes, "nothing is won by letting go"
    assert memory.fits_push(2 * size) and kept.held_bytes == 0, "whatever comes is more important"
    monkeypatch.setattr(merge_audits, "MOST_MEMORY_BYTES", 2 * size)
    await town.version()
    assert kept.held_bytes == 2 * size and kept.get(0, first) is None, "the oldest goes"


async def test_what_a_syncer_keeps_on_the_disk_is_given_from_there(
    town: AuditTown, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncer, size = town.syncer, len(town.payloads[0])
    version = await town.version(await syncer.spooled(town.payloads))
    assert syncer.transfers.merged.held_bytes == 0 and syncer.spool.held_bytes == 3 * size
    await town.gone(*town.learners)
    assert await town.auditor.audit(version) is SAME
    assert syncer.given_bytes == 3 * size
    syncer.memory.most_bytes = size - 1
    monkeypatch.setattr(merge_audits, "AUDIT_S", 0.2)  # until then it says that it is busy
    assert await town.auditor.audit(version) is MISSING, "what is read must have room"
    monkeypatch.setattr(merge_audits, "MOST_SCRATCH_BYTES", size)
    await town.version(await syncer.spooled(town.payloads))
    await until(lambda: syncer.spool.held_bytes == size, "the others are gone")
    syncer.transfers.merged.forget()


async def test_what_was_merged_is_not_kept_for_long(town: AuditTown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_audits, "KEEP_S", 0.0)
    await town.version()
    await until(lambda: town.syncer.memory.claimed_bytes == 0, "it goes by itself")


async def test_members_audit_what_they_merged(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path, seats=("one", "two")) as swarm:
        one = await swarm.member("one", genesis=True)
        two = await swarm.member("two")
        members = [one, two]
        version, both = None, 0
        while both < 2:  # on a busy machine one may come too late for a round
            await swarm.round(*members)
            version = one.chain_of(0).logged(one.number())
            both = len(version.header.contributors) if version is not None else 0
        assert version is not None
        for member in members:
            parts = [part for part in version.header.contributors if part.learner == member.core.shared.me]
            own = await member.chain.contribution_of(0, parts[0].payload_digest)
            assert own is not None and digest_of(own) == parts[0].payload_digest
        assert await one.chain.contribution_of(0, bytes(32)) is None
        auditor = next(m for m in members if m.core.shared.me != version.header.syncer)
        held, bulk = auditor.holdings, auditor.transfers
        tools = auditor.chain, auditor.transport, held.compute, bulk.merged, bulk.true_updates
        found = await Auditing(*tools, held.memory, held.spool).audit(ev.Audit(0, version))
        assert found.outcome is SAME

"""Partial merges of groups through the daemon: added up, pushed, judged, answered, merged again.

The core is scripted here: it asks for what the test says and writes down what it hears.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from audit_kit import AuditNode, AuditTown, memory_town
from chain_kit import PaperChain, no_meter
from daemon_kit import signed_run, until
from fanout_kit import PAYLOAD, update
from msgspec.structs import replace

from p2pdiloco.adapters import framing
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import AuditOutcome, PullRefusal, Verdict
from p2pdiloco.core.api.types import (
    MAX_CONTRIBUTORS,
    MAX_PEERS,
    Contributor,
    Head,
    MergeLimits,
    Stamp,
    Watermark,
)
from p2pdiloco.core.api.versions import (
    MAX_PARTIALS,
    USUAL,
    Mean,
    MergedPartial,
    PartialHeader,
    SignedPartial,
    SignedVersion,
)
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import Background
from p2pdiloco.daemon.bulk import merge_audits, updates
from p2pdiloco.daemon.bulk import pushes as arrivals
from p2pdiloco.daemon.bulk import updates as arriving_updates
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.daemon.bulk.updates import MAX_GIVEN, MAX_SERVED, Fanout
from p2pdiloco.daemon.driver import Executors, Merging, Post, Runner
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network.link import LinkMeters
from p2pdiloco.daemon.payloads import Compute, Tickets
from p2pdiloco.daemon.run_files.run import Run, genesis_versions, open_run
from p2pdiloco.errors import RemoteError
from p2pdiloco.hashing import content_digest
from p2pdiloco.identity import Identity
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.merge import partial_bytes
from p2pdiloco_lab.memory_net import MemoryNetwork

HEAD = Head(7, b"h" * 32, 70, 3)
GROUP = "4/0/1"
TOKEN = 5
WORK = [(256, 1), (300, 2), (512, 3)]
UNUSED = ["outbound", "learner", "kept", "committing", "durable"]


class ScriptedCore:
    """Accepts every partial and payload unless told otherwise."""

    def __init__(self) -> None:
        self.heard: list[ev.Event] = []
        self.refuses: Verdict | None = None
        self.wanted: list[ev.Effect] = []

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        self.heard.append(event)
        match event:
            case ev.Tick():
                wanted, self.wanted = self.wanted, []
                return wanted
            case ev.Offered(transfer) if self.refuses is not None:
                return [ev.AnswerTransfer(transfer, 0, self.refuses)]
            case ev.Offered(transfer, _, signed):
                return [ev.AcceptTransfer(transfer, 0, signed.header.payload_bytes)]
            case ev.PayloadReceived(transfer):
                return [ev.AnswerTransfer(transfer, 0, Verdict.IN_ROUND)]
        return []

    def next_deadline(self) -> float:
        return asyncio.get_running_loop().time() + 1000.0


class Node:
    """A runner with everything real beneath it but the core."""

    def __init__(self, hub: MemoryNetwork, run: Run) -> None:
        identity = Identity.generate()
        self.run, vault = open_run(run.signed, identity)
        self.peer = identity.peer_id
        self.transport = hub.transport(self.peer)
        self.compute = Compute(vault, None)  # type: ignore[arg-type]
        self.tickets, self.core = Tickets(), ScriptedCore()
        self.post, self.background = Post(), Background()
        self.meters = LinkMeters(self.transport)
        chain = PaperChain(HEAD)
        chain.run = self.run.id
        post = self.post.put
        self.transfers = Transfers(chain, self.transport, self.compute, self.tickets, post, self.meters)
        hands = Executors(
            tickets=self.tickets,
            transfers=self.transfers,
            merging=Merging(self.compute, self.tickets, post),
            record=lambda record: None,
            loss_auditing=SimpleNamespace(audit=None),  # type: ignore[arg-type]
            trying=SimpleNamespace(tried=None),  # type: ignore[arg-type]
            **dict.fromkeys(UNUSED),  # type: ignore[arg-type]
        )
        self.runner = Runner(self.core, self.post, self.background, hands)  # type: ignore[arg-type]
        self.door = FrontDoor()
        self.door.enter(self.run.id, self.transfers, None)  # type: ignore[arg-type]

    def want(self, asked: ev.Effect, *others: ev.Effect) -> None:
        self.core.wanted += [ev.Ask(TOKEN, asked), *others]
        self.post.put(ev.Tick())

    async def hears(self, kind: type[Any]) -> Any:
        def found() -> Any:
            return next((event for event in self.core.heard if isinstance(event, kind)), None)

        return await until(found, kind.__name__)

    async def answer(self, kind: type[Any]) -> Any:
        """What came of the effect that was asked for: something of this kind."""
        answered = await self.hears(ev.Answered)
        self.core.heard.remove(answered)
        assert answered.token == TOKEN and isinstance(answered.answer, kind), answered
        return answered.answer

    def payload(self, value: float) -> bytearray:
        return codec("int8").encode(torch.full((self.run.layouts[0].numel,), value))

    def inputs(self, first: int = 0, last: int = len(WORK)) -> tuple[ev.MergeInput, ...]:
        """Contributions of invented learners, who have all trust."""
        return tuple(map(self._input, range(first, last)))

    def _input(self, i: int) -> ev.MergeInput:
        payload = self.payload(0.1 + i)
        who = Contributor(f"learner {i}", Stamp(1, 1), *WORK[i], payload_digest=content_digest(payload))
        return ev.MergeInput(who, self.tickets.put(payload), Mean(USUAL, 100))

    def summed(self, ticket: int) -> ev.PartialInput:
        """A partial that is to be merged."""
        return ev.PartialInput(ticket, content_digest(self.tickets.get(ticket)))

    async def partial(self, *below: int, first: int = 0, last: int = len(WORK)) -> ev.PartialMerged:
        """Add up contributions and tickets of partials."""
        self.want(ev.MergePartial(0, self.inputs(first, last), tuple(map(self.summed, below))))
        merged: ev.PartialMerged = await self.answer(ev.PartialMerged)
        return merged

    def label(self, payload: Any, last: int = len(WORK), **changes: Any) -> SignedPartial:
        parts = tuple(Contributor(f"learner {i}", Stamp(1, 1), *WORK[i]) for i in range(last))
        honest = PartialHeader(
            run=self.run.id,
            group=GROUP,
            fragment=0,
            syncer=self.peer,
            number=HEAD.number,
            digest=HEAD.digest,
            parts=parts,
            due=True,
            payload_digest=content_digest(payload),
            payload_bytes=len(payload),
        )
        return SignedPartial(msgspec.structs.replace(honest, **changes), b"")

    def offer(self, to: Node, signed: SignedPartial, payload: Any) -> None:
        ticket = self.tickets.put(payload)
        # Released in the same breath: the stream must not depend on the ticket.
        self.want(ev.Offer(to.peer, signed, ticket), ev.Release(ticket))


@pytest.fixture
async def nodes(tmp_path: Path) -> Any:
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    made = [Node(hub, run), Node(hub, run)]
    for node in made:
        await node.transport.start(node.door)
    yield made
    for node in made:
        node.runner.close()
        await node.background.close()
        node.compute.close()
        await node.transport.close()
        assert not node.background.broken.done() or node.background.broken.exception() is None


async def test_whose_contribution_was_cut_is_told(nodes: list[Node]) -> None:
    node = nodes[0]
    limits = MergeLimits(most_tokens=1 << 40, longest=1.5 * math.sqrt(node.run.layouts[0].numel))
    node.want(ev.Merge(0, 1, node.inputs(), (), 24, limits))
    assert (await node.answer(ev.Merged)).cut == ("learner 2",)
    node.want(ev.MergePartial(0, node.inputs(), (), limits))
    assert (await node.answer(ev.PartialMerged)).cut == ("learner 2",)


async def test_partials_of_two_levels_arrive_and_merge_like_everything_at_once(nodes: list[Node]) -> None:
    leaf, root = nodes
    lower = await leaf.partial(last=1)
    merged = await leaf.partial(lower.ticket, first=1, last=2)
    payload = leaf.tickets.get(merged.ticket)
    assert merged.payload_bytes == len(payload) == partial_bytes(leaf.run.layouts[0])
    assert merged.payload_digest == content_digest(payload)
    leaf.offer(root, leaf.label(payload, last=2), payload)
    answered = await leaf.answer(ev.OfferAnswered)
    assert (answered.verdict, answered.head) == (Verdict.IN_ROUND, HEAD)
    received = await root.hears(ev.PayloadReceived)
    assert root.transfers.bytes_in == leaf.transfers.bytes_out == len(payload)
    assert leaf.meters.uplink.own._total_bytes() == len(payload)
    assert root.meters.uplink.own._total_bytes() == 0

    root.want(ev.Merge(0, 1, root.inputs(2, 3), (root.summed(received.ticket),), 24))
    grouped = await root.answer(ev.Merged)
    leaf.want(ev.Merge(0, 1, leaf.inputs(), (), 24))
    flat = await leaf.answer(ev.Merged)
    numel = leaf.run.layouts[0].numel
    updates = [torch.empty(numel), torch.empty(numel)]
    for node, answer, out in zip((root, leaf), (grouped, flat), updates, strict=True):
        codec("int8").decode(node.tickets.get(answer.ticket), out)
    torch.testing.assert_close(*updates, rtol=1e-4, atol=1e-4)


async def test_a_partial_that_is_refused_on_sight_costs_no_payload(nodes: list[Node]) -> None:
    leaf, root = nodes
    merged = await leaf.partial()
    payload = leaf.tickets.get(merged.ticket)
    root.core.refuses = Verdict.NOT_SYNCER
    leaf.offer(root, leaf.label(payload), payload)
    answered = await leaf.answer(ev.OfferAnswered)
    assert (answered.verdict, answered.head) == (Verdict.NOT_SYNCER, HEAD)
    assert root.transfers.bytes_in == leaf.transfers.bytes_out == 0 and not root.transport.refusals


def flipped(payload: bytearray) -> bytearray:
    return bytearray([*payload[:-2], payload[-2] ^ 0x10, payload[-1]])


def poisoned(payload: bytearray) -> bytearray:
    return payload[:-4] + b"\0\0\xc0\x7f"


LIES: dict[str, tuple[str, Any]] = {
    "other bytes than the label's": ("wrong-digest", lambda n, p: (n.label(p), flipped(p))),
    "a NaN": ("non-finite", lambda n, p: (n.label(poisoned(p)), poisoned(p))),
    "more weight than the labels have": ("wrong-count", lambda n, p: (n.label(p, last=2), p)),
    "other work than the labels": ("wrong-weight", lambda n, p: (more_work(n.label(p)), p)),
}


def more_work(signed: SignedPartial) -> SignedPartial:
    first, *others = signed.header.parts
    parts = (msgspec.structs.replace(first, tokens=first.tokens + 1), *others)
    return SignedPartial(msgspec.structs.replace(signed.header, parts=parts), b"")


@pytest.mark.parametrize("lie", LIES)
async def test_a_payload_that_belies_its_label_is_refused_with_the_reason(
    lie: str, nodes: list[Node]
) -> None:
    leaf, root = nodes
    reason, make = LIES[lie]
    merged = await leaf.partial()
    signed, sent = make(leaf, leaf.tickets.get(merged.ticket))
    leaf.offer(root, signed, sent)
    answered = await leaf.answer(ev.OfferAnswered)
    assert answered.verdict.value == reason
    assert (await root.hears(ev.PayloadBroken)).verdict is answered.verdict
    assert len(root.tickets) == 0 and root.transfers.pushes_in._arriving_bytes == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"payload_bytes": 1 << 50}, "wrong-size"),
        ({"payload_bytes": 0}, "wrong-size"),
        ({"fragment": 99}, "unknown-fragment"),
    ],
)
async def test_a_size_that_no_partial_has_is_refused_unread_and_counted(
    changes: dict[str, int], reason: str, nodes: list[Node]
) -> None:
    leaf, root = nodes
    merged = await leaf.partial()
    payload = leaf.tickets.get(merged.ticket)
    leaf.offer(root, leaf.label(payload, **changes), payload)
    await leaf.answer(ev.Undone)
    await until(lambda: root.transport.refusals == {reason: 1}, "it is counted")
    assert not root.core.heard


async def test_a_cut_in_the_middle_leaves_nothing_behind(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf, root = nodes
    merged = await leaf.partial()
    payload = leaf.tickets.get(merged.ticket)
    network = root.transport._hub

    async def cut(*_: object) -> None:
        network.cut(leaf.peer, root.peer)

    monkeypatch.setattr(arrivals._PushSink, "write", cut)
    leaf.offer(root, leaf.label(payload), payload)
    await leaf.answer(ev.Undone)
    assert (await root.hears(ev.PayloadBroken)).verdict is Verdict.CUT
    assert root.transfers.pushes_in._arriving_bytes == 0 and len(root.tickets) == 0


async def test_what_is_arriving_has_one_budget(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, root = nodes
    merged = await leaf.partial()
    payload = leaf.tickets.get(merged.ticket)
    monkeypatch.setattr(arrivals, "SHARE_BYTES", 0)
    monkeypatch.setattr(arrivals, "MAX_ARRIVING_BYTES", len(payload) + 10)
    root.transfers.pushes_in._arriving_bytes = 11
    leaf.offer(root, leaf.label(payload), payload)
    answered = await leaf.answer(ev.OfferAnswered)
    assert (answered.verdict, answered.head) == (Verdict.BUSY, None)


async def test_a_merge_with_an_unusable_partial_fails_and_the_worker_goes_on(nodes: list[Node]) -> None:
    leaf, root = nodes
    merged = await leaf.partial()
    bad = root.tickets.put(poisoned(bytearray(leaf.tickets.get(merged.ticket))))
    root.want(ev.MergePartial(0, root.inputs(), (root.summed(bad),)))
    failed = await root.answer(ev.Undone)
    assert "non-finite" in failed.reason
    assert failed.unusable == ((bad, Verdict.NON_FINITE),), "not our own inputs"
    root.want(ev.Merge(0, 1, (), (root.summed(bad),), 24))
    assert "non-finite" in (await root.answer(ev.Undone)).reason
    assert await root.partial()


def test_the_longest_labels_fit_into_a_header(tmp_path: Path) -> None:
    run, vault = open_run(signed_run(tmp_path).signed, Identity.generate())
    stamp = Stamp(2_000_000_000_000, 1_000_000)
    peers = [f"12D3KooW{i:044d}" for i in range(MAX_CONTRIBUTORS)]
    parts = tuple(
        Contributor(peer, stamp, 1 << 30, 100_000, stamp, bytes(32), None, bytes(64)) for peer in peers
    )
    limits = MergeLimits(1 << 40, 1.5, 3.0)
    below = tuple(
        MergedPartial(f"99/9/{n}", peers[n], bytes(32), bytes(64), limits) for n in range(MAX_PARTIALS)
    )
    key = run.id, "9/0/9", 0, peers[0], 1 << 30, bytes(32), parts, True, bytes(32), 1 << 30
    header = PartialHeader(*key, limits, below)
    genesis = genesis_versions(run, vault)[0].header
    version = SignedVersion(msgspec.structs.replace(genesis, contributors=parts, partials=below), bytes(64))
    marks = tuple(Watermark(peer, stamp, 1 << 30) for peer in peers[: 3 * MAX_PEERS])
    for label in (wire.PushPartial(SignedPartial(header, bytes(64))), wire.StateHeader(version, marks)):
        data = wire.encode(label)
        assert len(data) <= framing.MAX_HEADER_BYTES
        assert wire.decode(data, type(label)) == label


# Bounds of what waits to be passed on.


def asking(fragment: int = 0, **more: Any) -> wire.PullUpdate:
    return wire.PullUpdate("run", fragment, 1, relays=True, **more)


async def test_places_tables_and_waiting_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    fan = Fanout("me", no_meter(), lambda: now)
    found = (update(PAYLOAD), PAYLOAD)
    given: list[Any] = [await fan.serve(f"q{i}", asking(insist=True), found) for i in range(MAX_SERVED + 10)]
    assert all(isinstance(source, PullSource) for source in given)
    assert len(next(iter(fan._given.values())).takers) == MAX_SERVED
    answer: Any = await fan.serve("late", asking(), found)
    named = wire.decode(answer.answer, wire.Elsewhere)
    assert len(named.peers) == wire.MAX_NAMED and named.patience_ms == 30_000
    now = 2 * updates.FRESH_S
    assert isinstance(await fan.serve("late", asking(), found), Refusal), "streams are still under way"
    for source in given:
        source.release()
    now = 4 * updates.FRESH_S
    assert isinstance(await fan.serve("late", asking(), found), PullSource), "it is given out anew"
    for fragment in range(MAX_GIVEN + 10):
        await fan.serve("q", asking(fragment), found)
    assert len(fan._given) == MAX_GIVEN
    monkeypatch.setattr(updates, "MAX_WAITING", 0)
    fan.arriving(0, 1)
    waits: Any = await fan.serve("z", asking(version=found[0].header.digest()), None)
    assert wire.decode(waits.answer, wire.Refused).reason is PullRefusal.LATER


async def test_invented_versions_take_no_place_and_one_peer_not_all_that_wait() -> None:
    now = 0.0
    fan = Fanout("me", no_meter(), lambda: now)
    arriving, true = fan.arriving(0, 1), update(PAYLOAD)
    waiting = [
        asyncio.create_task(fan.serve("liar", asking(version=bytes([i]) * 32), None))
        for i in range(updates.MAX_WAITING_PER_PEER)
    ]
    await until(lambda: fan._waiting.total() == len(waiting), "all of them to wait")
    one_more: Any = await fan.serve("liar", asking(version=true.header.digest()), None)
    assert wire.decode(one_more.answer, wire.Refused).reason is PullRefusal.LATER
    child = asyncio.create_task(fan.serve("child", asking(version=true.header.digest()), None))
    await until(lambda: fan._waiting.total() == len(waiting) + 1, "the child too")
    now = 1.5
    part = arriving_updates.Unfinished(true.header.update_digest, len(PAYLOAD))
    part.payload[:], part.have_bytes = PAYLOAD, len(PAYLOAD)
    arriving.begun(true, part)
    for answer in await asyncio.gather(*waiting):
        assert wire.decode(answer.answer, wire.Refused).reason is PullRefusal.GONE  # type: ignore[union-attr]
    given = await child
    assert isinstance(given, PullSource)
    assert wire.decode(given.header, wire.UpdateHeader).waited_ms == 1500
    for i in range(5):
        late: Any = await fan.serve("liar", asking(version=bytes([i]) * 32), None)
        assert wire.decode(late.answer, wire.Refused).reason is PullRefusal.GONE
    assert len(fan._given) == 1, "only what there is"


async def test_a_place_comes_free_when_the_peer_stays_away() -> None:
    now = 0.0
    fan = Fanout("me", no_meter(), lambda: now)
    found = (update(PAYLOAD), PAYLOAD)
    one, two = [await fan.serve(peer, asking(), found) for peer in ("one", "two")]
    assert isinstance(one, PullSource) and isinstance(two, PullSource)
    one.release()  # cut
    two.delivered()
    two.release()
    assert isinstance(await fan.serve("three", asking(), found), Refusal), "it may come back"
    now = updates.IDLE_S + 1
    assert isinstance(await fan.serve("three", asking(), found), PullSource)


async def test_an_update_that_was_not_fetched_is_not_passed_on() -> None:
    fan = Fanout("me", no_meter(), lambda: 0.0)
    arriving = fan.arriving(0, 1)
    digest = update(PAYLOAD).header.digest()
    waiting = asyncio.create_task(fan.serve("child", asking(version=digest), None))
    await until(lambda: fan._waiting.total() == 1, "the child to wait")
    fan.failed(0, arriving)
    answer: Any = await waiting
    assert wire.decode(answer.answer, wire.Refused).reason is PullRefusal.GONE
    assert not fan._arriving and not fan._waiting and not fan._given
    with pytest.raises(RemoteError):
        wire.decode(wire.encode(wire.Elsewhere(digest, 1, ("p",) * 9)), wire.Elsewhere)


# False versions that are taken back: the true update is kept, and whoever has it makes the same repair.

SAME, DIFFERENT, MISSING = AuditOutcome.SAME, AuditOutcome.DIFFERENT, AuditOutcome.MISSING


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[AuditTown]:
    async with await memory_town(tmp_path) as made:
        yield made


async def lie(town: AuditTown, *found_by: AuditNode) -> SignedVersion:
    """A version of noise, which these hold and find false."""
    run = town.syncer.run
    noise = torch.randn(run.layouts[0].numel, generator=torch.Generator().manual_seed(77)) * 0.01
    update = codec(run.manifest.codec.update).encode(noise)
    false = await town.version(update_digest=content_digest(update))
    for node in found_by:
        node.chain.updates[1] = false, update
        assert await node.audit(false) is DIFFERENT
    return false


async def test_who_finds_a_version_false_keeps_what_it_should_have_been(town: AuditTown) -> None:
    honest, false = await town.version(), await lie(town, town.auditor)
    kept = town.auditor.transfers.true_updates
    correction = await kept.correction(false)
    assert correction is not None
    assert content_digest(correction.true) == honest.header.update_digest
    assert content_digest(correction.false) == false.header.update_digest
    assert kept.held_bytes == len(correction.true)
    assert await kept.correction(honest) is None and await kept.correction(None) is None
    town.auditor.chain.updates[1] = honest, correction.true
    assert await kept.correction(false) is None, "another chain's"


async def test_the_next_version_has_the_difference_and_whoever_found_it_audits_that(town: AuditTown) -> None:
    syncer, other, late = town.syncer, town.auditor, town.learners[0]
    false = await lie(town, syncer, other)
    plain, mended = await town.version(), await town.version(mends=false)
    assert mended.header.repairs == false.header.digest()
    assert mended.header.update_digest != plain.header.update_digest
    assert await other.audit(mended, repairs=false) is SAME
    assert await late.audit(mended, repairs=false) is MISSING, "it never found that false"
    assert await other.audit(mended, repairs=None) is MISSING, "nor has it the version"
    claims = {"repairs": false.header.digest()}
    assert await other.audit(await town.version(**claims), repairs=false) is DIFFERENT, "no repair is in it"


async def test_where_something_is_gone_nothing_is_repaired(town: AuditTown) -> None:
    false = await lie(town, town.syncer)
    town.syncer.transfers.true_updates.give_up()
    plain, mended = await town.version(), await town.version(mends=false)
    assert mended.header.repairs is None and mended.header.update_digest == plain.header.update_digest


async def test_damaged_memory_of_ours_takes_nothing_back_and_accuses_nobody(town: AuditTown) -> None:
    syncer, other = town.syncer, town.auditor
    false = await lie(town, syncer, other)
    plain, mended = await town.version(), await town.version(mends=false)
    for node in (syncer, other):
        correction = await node.transfers.true_updates.correction(false)
        assert correction is not None and isinstance(correction.true, bytearray)
        correction.true[1000] ^= 0x40
    assert await other.audit(mended, repairs=false) is MISSING
    unmended = await town.version(mends=false)
    assert unmended.header.repairs is None and unmended.header.update_digest == plain.header.update_digest


async def test_what_states_falsely_but_merges_rightly_needs_no_repair(town: AuditTown) -> None:
    honest = await town.version()
    first, *rest = honest.header.contributors
    parts = {"contributors": (replace(first, length=7.0), *rest)}
    assert await town.auditor.audit(await town.version(**parts)) is DIFFERENT
    assert not town.auditor.transfers.true_updates.held_bytes


async def test_true_updates_are_bounded(town: AuditTown, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = town.auditor.transfers.true_updates
    monkeypatch.setattr(merge_audits, "MOST_BYTES", 25)
    for name in (b"a", b"b", b"c"):
        kept.keep(name, bytearray(10), bytes(32))
    assert [kept.has(name) for name in (b"a", b"b", b"c")] == [False, True, True]
    monkeypatch.setattr(merge_audits, "MOST_KEPT", 1)
    kept.keep(b"d", bytearray(1), bytes(32))
    assert kept.held_bytes == 1

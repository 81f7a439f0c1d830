"""Partial merges of groups through the daemon: added up, pushed, judged, answered, merged again.

The core is scripted here: it asks for what the test says and writes down what it hears.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from chain_kit import PaperChain
from daemon_kit import signed_run, until

from p2pdiloco.adapters import framing
from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import (
    MAX_CONTRIBUTORS,
    MAX_WATERMARKS,
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
from p2pdiloco.daemon.bulk import pushes as arrivals
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.daemon.driver import Executors, Merging, Post, Runner
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network.link import LinkMeters
from p2pdiloco.daemon.payloads import Compute, Tickets
from p2pdiloco.daemon.run_files.run import Run, genesis_versions, open_run
from p2pdiloco.hashing import content_digest
from p2pdiloco.identity import Identity
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.merge import partial_bytes
from p2pdiloco_lab.memory_net import MemoryNetwork

HEAD = Head(7, b"h" * 32, 70, 3)
GROUP = "4/0/1"
WORK = [(256, 1), (300, 2), (512, 3)]
UNUSED = ["outbound", "learner", "kept", "committing", "durable", "loss_auditing"]


class ScriptedCore:
    """Accepts every partial and payload unless told otherwise."""

    def __init__(self) -> None:
        self.heard: list[ev.Event] = []
        self.refuses: Verdict | None = None
        self.wanted: list[ef.Effect] = []

    def handle(self, event: ev.Event, now: float) -> list[ef.Effect]:
        self.heard.append(event)
        match event:
            case ev.Tick():
                wanted, self.wanted = self.wanted, []
                return wanted
            case ev.Offered(transfer) if self.refuses is not None:
                return [ef.AnswerTransfer(transfer, 0, self.refuses)]
            case ev.Offered(transfer, _, signed):
                return [ef.AcceptTransfer(transfer, 0, signed.header.payload_bytes)]
            case ev.PayloadReceived(transfer):
                return [ef.AnswerTransfer(transfer, 0, Verdict.IN_ROUND)]
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
        post, nothing = self.post.put, None
        self.transfers = Transfers(chain, self.transport, self.compute, self.tickets, post, self.meters)
        hands = Executors(
            tickets=self.tickets,
            transfers=self.transfers,
            merging=Merging(self.compute, self.tickets, post),
            record=lambda record: None,
            **dict.fromkeys(UNUSED, nothing),  # type: ignore[arg-type]
        )
        self.runner = Runner(self.core, self.post, self.background, hands)  # type: ignore[arg-type]
        self.door = FrontDoor()
        self.door.enter(self.run.id, self.transfers, None)  # type: ignore[arg-type]

    def want(self, *effects: ef.Effect) -> None:
        self.core.wanted += effects
        self.post.put(ev.Tick())

    async def hears(self, kind: type[Any]) -> Any:
        def found() -> Any:
            return next((event for event in self.core.heard if isinstance(event, kind)), None)

        return await until(found, kind.__name__)

    def payload(self, value: float) -> bytearray:
        return codec("int8").encode(torch.full((self.run.layouts[0].numel,), value))

    def inputs(self, first: int = 0, last: int = len(WORK)) -> tuple[ef.MergeInput, ...]:
        """Contributions of invented learners, who have all trust."""
        return tuple(map(self._input, range(first, last)))

    def _input(self, i: int) -> ef.MergeInput:
        payload = self.payload(0.1 + i)
        who = Contributor(f"learner {i}", Stamp(1, 1), *WORK[i], payload_digest=content_digest(payload))
        return ef.MergeInput(who, self.tickets.put(payload), Mean(USUAL, 100))

    def summed(self, ticket: int) -> ef.PartialInput:
        """A partial that is to be merged."""
        return ef.PartialInput(ticket, content_digest(self.tickets.get(ticket)))

    async def partial(self, *below: int, first: int = 0, last: int = len(WORK)) -> ev.PartialMerged:
        """Add up contributions and tickets of partials."""
        self.core.heard.clear()
        self.want(ef.MergePartial(0, GROUP, 5, self.inputs(first, last), tuple(map(self.summed, below))))
        merged: ev.PartialMerged = await self.hears(ev.PartialMerged)
        assert (merged.fragment, merged.group, merged.attempt) == (0, GROUP, 5)
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
        self.core.heard.clear()
        ticket = self.tickets.put(payload)
        # Released in the same breath: the stream must not depend on the ticket.
        self.want(ef.Offer(to.peer, signed, ticket, 5), ef.Release(ticket))


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
    node.want(
        ef.Merge(0, 1, 1, node.inputs(), (), 24, limits),
        ef.MergePartial(0, GROUP, 5, node.inputs(), (), limits),
    )
    for kind in (ev.Merged, ev.PartialMerged):
        assert (await node.hears(kind)).cut == ("learner 2",)


async def test_partials_of_two_levels_arrive_and_merge_like_everything_at_once(nodes: list[Node]) -> None:
    leaf, root = nodes
    lower = await leaf.partial(last=1)
    merged = await leaf.partial(lower.ticket, first=1, last=2)
    payload = leaf.tickets.get(merged.ticket)
    assert merged.payload_bytes == len(payload) == partial_bytes(leaf.run.layouts[0])
    assert merged.payload_digest == content_digest(payload)
    leaf.offer(root, leaf.label(payload, last=2), payload)
    answered = await leaf.hears(ev.OfferAnswered)
    assert (answered.offer.peer, answered.offer.attempt) == (root.peer, 5)
    assert (answered.verdict, answered.head) == (Verdict.IN_ROUND, HEAD)
    received = await root.hears(ev.PayloadReceived)
    assert root.transfers.bytes_in == leaf.transfers.bytes_out == len(payload)
    assert leaf.meters.uplink.own._total_bytes() == len(payload)
    assert root.meters.uplink.own._total_bytes() == 0

    root.want(ef.Merge(0, 1, 1, root.inputs(2, 3), (root.summed(received.ticket),), 24))
    grouped = await root.hears(ev.Merged)
    leaf.want(ef.Merge(0, 1, 1, leaf.inputs(), (), 24))
    flat = await leaf.hears(ev.Merged)
    numel = leaf.run.layouts[0].numel
    updates = [torch.empty(numel), torch.empty(numel)]
    for node, event, out in zip((root, leaf), (grouped, flat), updates, strict=True):
        codec("int8").decode(node.tickets.get(event.ticket), out)
    torch.testing.assert_close(*updates, rtol=1e-4, atol=1e-4)


async def test_a_partial_that_is_refused_on_sight_costs_no_payload(nodes: list[Node]) -> None:
    leaf, root = nodes
    merged = await leaf.partial()
    payload = leaf.tickets.get(merged.ticket)
    root.core.refuses = Verdict.NOT_SYNCER
    leaf.offer(root, leaf.label(payload), payload)
    answered = await leaf.hears(ev.OfferAnswered)
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
    answered = await leaf.hears(ev.OfferAnswered)
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
    await leaf.hears(ev.OfferUndelivered)
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
    assert (await leaf.hears(ev.OfferUndelivered)).offer.attempt == 5
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
    answered = await leaf.hears(ev.OfferAnswered)
    assert (answered.verdict, answered.head) == (Verdict.BUSY, None)


async def test_a_merge_with_an_unusable_partial_fails_and_the_worker_goes_on(nodes: list[Node]) -> None:
    leaf, root = nodes
    merged = await leaf.partial()
    bad = root.tickets.put(poisoned(bytearray(leaf.tickets.get(merged.ticket))))
    root.want(ef.MergePartial(0, GROUP, 9, root.inputs(), (root.summed(bad),)))
    failed = await root.hears(ev.PartialFailed)
    assert (failed.fragment, failed.group, failed.attempt) == (0, GROUP, 9) and "non-finite" in failed.reason
    assert failed.unusable == ((bad, Verdict.NON_FINITE),), "not our own inputs"
    root.want(ef.Merge(0, 1, 1, (), (root.summed(bad),), 24))
    assert "non-finite" in (await root.hears(ev.MergeFailed)).reason
    assert await root.partial()


def test_the_longest_labels_fit_into_a_header(tmp_path: Path) -> None:
    run, vault = open_run(signed_run(tmp_path).signed, Identity.generate())
    stamp = Stamp(2_000_000_000_000, 1_000_000)
    peers = [f"12D3KooW{i:044d}" for i in range(MAX_CONTRIBUTORS)]
    parts = tuple(Contributor(peer, stamp, 1 << 30, 100_000, stamp, bytes(32), bytes(64)) for peer in peers)
    limits = MergeLimits(1 << 40, 1.5, 3.0)
    below = tuple(
        MergedPartial(f"99/9/{n}", peers[n], bytes(32), bytes(64), limits) for n in range(MAX_PARTIALS)
    )
    key = run.id, "9/0/9", 0, peers[0], 1 << 30, bytes(32), parts, True, bytes(32), 1 << 30
    header = PartialHeader(*key, limits, below)
    genesis = genesis_versions(run, vault)[0].header
    version = SignedVersion(msgspec.structs.replace(genesis, contributors=parts, partials=below), bytes(64))
    marks = tuple(Watermark(peer, stamp, 1 << 30) for peer in peers[:MAX_WATERMARKS])
    for label in (wire.PushPartial(SignedPartial(header, bytes(64))), wire.StateHeader(version, marks)):
        data = wire.encode(label)
        assert len(data) <= framing.MAX_HEADER_BYTES
        assert wire.decode(data, type(label)) == label

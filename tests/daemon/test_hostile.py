"""Peers that send anything but what they should: each is refused with a reason, and nothing is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from daemon_kit import Neighbourhood, QuickMember, Rogue, neighbours, until

from p2pdiloco import WIRE_VERSION
from p2pdiloco.core.api.messages import MAX_MESSAGE_BYTES, Announce, Leaving, OfficeQuery, Progress
from p2pdiloco.core.api.messages import encode as encode_message
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import WHOLE_RUN, Head, Reach, Stamp, signed_bytes
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.daemon import wire
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.identity import Identity
from p2pdiloco.ports import PullSource
from p2pdiloco.tensors.codecs import state_digest


def a_message(rogue: Rogue, run: str = "") -> bytes:
    return encode_message(run or rogue.run.id, OfficeQuery(WHOLE_RUN, 0, 0))


def other_version(rogue: Rogue) -> bytes:
    parts = msgspec.msgpack.decode(a_message(rogue))
    return msgspec.msgpack.encode([WIRE_VERSION + 1, *parts[1:]])


BAD_MESSAGES: dict[str, tuple[str, Any]] = {
    "nothing": ("garbage", lambda rogue: b""),
    "neither message nor query": ("garbage", lambda rogue: b"x" + a_message(rogue)),
    "noise": ("garbage", lambda rogue: b"m" + bytes(range(256))),
    "noise as a query": ("garbage", lambda rogue: b"q\xff\xff"),
    "deeply nested": ("garbage", lambda rogue: b"m" + b"\x91" * 50_000),
    "truncated": ("garbage", lambda rogue: b"m" + a_message(rogue)[:-1]),
    "with a tail": ("garbage", lambda rogue: b"m" + a_message(rogue) + b"\0"),
    "pickled": ("garbage", lambda rogue: b"m" + b"\x80\x04cos\nsystem\n"),
    "another protocol version": ("wire-version", lambda rogue: b"m" + other_version(rogue)),
    "another run": ("other-run", lambda rogue: b"m" + a_message(rogue, run="f" * 64)),
}


@pytest.mark.parametrize("case", BAD_MESSAGES)
async def test_a_bad_message_is_refused_counted_and_forgotten(case: str, tmp_path: Path) -> None:
    reason, make = BAD_MESSAGES[case]
    async with neighbours(tmp_path) as (around, member):
        rogue = await around.rogue()
        with pytest.raises(RemoteError) as refused:
            await rogue.transport.send(member.core.shared.me, make(rogue), 2.0)
        assert refused.value.reason == reason
        assert member.transport.refusals == {reason: 1}
        assert member.report.snapshot(0.0).refusals == {reason: 1}  # people see it
        await around.round(member)


async def test_an_oversized_message_is_refused_unread(tmp_path: Path) -> None:
    async with neighbours(tmp_path) as (around, member):
        rogue = await around.rogue()
        reply = await rogue.transport._call(member.core.shared.me, bytes(MAX_MESSAGE_BYTES + 1), 2.0)
        assert reply.startswith(b"\1oversized") and member.transport.refusals == {"oversized": 1}
        await around.round(member)


async def test_a_good_bye_is_its_senders_and_nobody_elses(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        rogue = await around.rogue()
        peer = two.core.shared.me
        leaving = encode_message(around.run.id, Leaving(two.core.shared.incarnation))
        await rogue.transport.send(one.core.shared.me, wire.MESSAGE + leaving, 2.0)  # it has left, if anybody
        assert peer in one.core.shared.view.members(asyncio.get_running_loop().time())
        await around.round(one, two)


def forged(rogue: Rogue, member: QuickMember, payload: bytes) -> Any:
    return rogue.sign(rogue.header(member, payload), Identity.generate())


BAD_LABELS: dict[str, tuple[str, dict[str, Any]]] = {
    "too large": ("wrong-size", {"payload_bytes": 1 << 40}),
    "empty": ("wrong-size", {"payload_bytes": 0}),
    "another codec": ("wrong-codec", {"codec": "fp32"}),
    "too many tokens": ("implausible-tokens", {"tokens": 1 << 50}),
    "no tokens": ("implausible-tokens", {"tokens": 0}),
    "unknown base": ("unknown-base", {"base_digest": b"?" * 32}),
    "base of the future": ("behind", {"base_number": 1 << 40}),
    "another's": ("false-learner", {"learner": "somebody"}),
    "unknown fragment": ("unknown-fragment", {"fragment": 99}),
    "another run": ("other-run", {"run": "f" * 64}),
    "a gap before it": ("behind", {"after": Stamp(1, 5), "stamp": Stamp(1, 6)}),
}


async def test_bad_labels_are_refused_on_sight_and_rounds_go_on(tmp_path: Path) -> None:
    async with neighbours(tmp_path) as (around, member):
        await around.round(member)  # in office now
        rogue = await around.rogue()
        payload = rogue.payload(member)
        for name, (reason, changes) in BAD_LABELS.items():
            fragment = changes.get("fragment", 0)
            header = rogue.header(member, payload, **({**changes, "fragment": 0}))
            header = msgspec.structs.replace(header, fragment=fragment)
            answer = await rogue.push(member, rogue.sign(header), payload)
            assert answer.verdict.value == reason, name
        answer = await rogue.push(member, forged(rogue, member, payload), payload)
        assert answer.verdict is Verdict.BAD_SIGNATURE
        faults = {"wrong-size", "wrong-codec", "implausible-tokens", "false-learner", "bad-signature"}
        assert faults | {"unknown-fragment", "other-run"} <= set(member.refused())
        await around.round(member)
        assert len(member.holdings.tickets) <= 3  # nothing of the rogue's is kept


def not_a_number(payload: bytearray) -> bytes:
    return b"\xff" * len(payload)


async def test_bad_payloads_are_refused_when_they_are_here(tmp_path: Path) -> None:
    async with neighbours(tmp_path) as (around, member):
        await around.round(member)
        rogue = await around.rogue()
        honest = rogue.payload(member)

        poison = not_a_number(honest)
        answer = await rogue.push(member, rogue.sign(rogue.header(member, poison)), poison)
        assert answer.verdict is Verdict.NON_FINITE

        short = bytes(honest[:-8])
        answer = await rogue.push(member, rogue.sign(rogue.header(member, short)), short)
        assert answer.verdict is Verdict.WRONG_SIZE

        other = bytes(len(honest))
        answer = await rogue.push(member, rogue.sign(rogue.header(member, honest)), other)
        assert answer.verdict is Verdict.WRONG_DIGEST

        # Less than announced: the transport ends it.
        with pytest.raises((RemoteError, TransportError)):
            await rogue.push(member, rogue.sign(rogue.header(member, honest)), short)
        await until(lambda: member.transport.refusals.get("wrong-size") == 1, "it to be counted")
        assert {"non-finite", "wrong-digest"} <= set(member.refused())
        await around.round(member)
        # After all that, an honest one of the same learner is welcome.
        answer = await rogue.push(member, rogue.sign(rogue.header(member, honest)), honest)
        assert answer.verdict.taken


async def test_a_replayed_contribution_is_merged_once(tmp_path: Path) -> None:
    async with neighbours(tmp_path) as (around, member):
        await around.round(member)
        rogue, thief = await around.rogue(), await around.rogue()
        payload = rogue.payload(member)
        signed = rogue.sign(rogue.header(member, payload))
        assert (await rogue.push(member, signed, payload)).verdict.taken
        chain = member.core.fragments[0].chain
        member.learner.contribute(0)
        await until(lambda: chain.marks.stamp(rogue.id) == Stamp(1, 1), "the contribution is merged")

        tokens = member.head().tokens
        answer = await rogue.push(member, signed, payload)
        assert answer.verdict is Verdict.ALREADY_MERGED
        answer = await thief.push(member, signed, payload)
        assert answer.verdict is Verdict.FALSE_LEARNER
        await around.round(member)
        assert member.head().tokens == tokens + 256


# --- liars as donors ----------------------------------------------------------------------------------


def boast(rogue: Rogue, member: QuickMember, heads: tuple[Head, ...]) -> Progress:
    numbered = tuple(enumerate(heads))
    way = Reach.DIRECT
    return Progress(1, 0.01, 1, 1, 1.0, None, False, True, False, numbered, (), False, way, False, True)


def forged_version(
    rogue: Rogue, number: int, signer: Identity, syncer: str, digest: bytes = b"s" * 32
) -> SignedVersion:
    numel = rogue.run.layouts[0].numel
    header = VersionHeader(
        rogue.run.id,
        WHOLE_RUN,
        0,
        number,
        b"p" * 32,
        9,
        syncer,
        1 << 40,
        digest,
        b"u" * 32,
        numel,
        "int8",
        (),
    )
    return SignedVersion(header, signer.sign(signed_bytes("version", header)))


@pytest.mark.parametrize(
    "what", ["noise", "false signature", "false digest", "oversized", "another fragment"]
)
async def test_a_donor_that_lies_is_not_believed(what: str, tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path, seats=("one", "two", "liar")) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.round(one, two)
        rogue = await around.rogue("liar")
        numel = rogue.run.layouts[0].numel
        signer = Identity.generate() if what == "false signature" else rogue.identity
        # Where something else is false, the digest is right: it alone must not be what saves us.
        zeros = torch.zeros(numel)
        number = one.head().number + 2  # of one that is far ahead no update would be asked for
        right = state_digest(number, zeros, zeros)
        digest = b"s" * 32 if what == "false digest" else right
        version = forged_version(rogue, number, signer, rogue.id, digest)
        asked = []

        def serve(pull: Any) -> PullSource:
            asked.append(pull)
            shown = version
            if what == "another fragment":
                shown = msgspec.structs.replace(
                    version, header=msgspec.structs.replace(version.header, fragment=1)
                )
            header = b"\0noise" if what == "noise" else wire.encode(wire.StateHeader(shown, ()))
            size = 8 * numel + (1 << 20 if what == "oversized" else 0)
            return PullSource(header, (bytes(size),), lambda: None)

        rogue.pulls = serve
        before = one.head()
        heads = (version.header.head(), *(one.head(f) for f in (1, 2, 3)))
        await rogue.say(one, boast(rogue, one, heads))
        await rogue.say(one, Announce(version.header.fragment, version.header.head(), version.header.syncer))
        await until(lambda: asked, "the heavier head to be asked for")
        await around.round(one, two)
        assert one.head().digest != version.header.digest() and one.head().tokens >= before.tokens
        assert one.head().tokens < 1 << 40
        await until(lambda: one.compute.vault.version(0) == one.head().number, "the commit")


async def test_a_newcomer_waits_for_a_donor_that_tells_the_truth(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path, seats=("one", "two")) as around:
        one = await around.member("one", genesis=True)
        await around.round(one)
        rogue = await around.rogue()
        version = forged_version(rogue, 1000, rogue.identity, rogue.id)
        numel = rogue.run.layouts[0].numel
        asked = []

        def serve(pull: Any) -> PullSource:
            asked.append(pull)
            return PullSource(wire.encode(wire.StateHeader(version, ())), (bytes(8 * numel),), lambda: None)

        rogue.pulls = serve
        newcomer_id = Identity.load_or_create(tmp_path / "two" / "identity.key").peer_id
        around.hub.cut(one.core.shared.me, newcomer_id)
        two = await around.member("two", trained=False)
        await rogue.say(two, boast(rogue, two, (version.header.head(),) * 4))
        await until(lambda: len(asked) > 2, "the newcomer to ask the liar")
        assert not two.core.confirmed and two.number() == 0
        around.hub.heal(one.core.shared.me, newcomer_id)
        await until(lambda: two.report.state == "training", "the newcomer to catch up")
        assert two.head(1) == one.head(1)

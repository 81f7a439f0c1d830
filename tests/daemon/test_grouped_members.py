"""Members in rotating groups, with everything real but the learners and the network."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch
from daemon_kit import QuickMember, neighbours, until

from p2pdiloco.core.api.types import NEVER, Contributor, Stamp, signed_bytes
from p2pdiloco.core.api.versions import PartialHeader, SignedPartial
from p2pdiloco.core.delegate import UpperElectorate
from p2pdiloco.core.posts import GroupPost
from p2pdiloco.daemon import wire
from p2pdiloco.identity import Identity
from p2pdiloco.tensors.merge import partial_bytes

NAMES = ("one", "two", "three", "four", "five")


GROUPED = {"size": 2, "expected_members": 5}


async def test_every_contribution_of_every_group_is_merged_once(tmp_path: Path) -> None:
    async with neighbours(tmp_path, *NAMES, group=GROUPED | {"term_versions": 2}) as (around, *members):
        rounds = 6
        for _ in range(rounds):
            await around.round(*members)
        await until(lambda: len({m.head() for m in members}) == 1, "equal heads")
        assert members[0].head().tokens == rounds * len(members) * 256
        partials = [e for m in members for e in m.records("partial") if "contributors" in e]
        assert len({e["group"] for e in partials}) > 2
        assert any(e["contributors"] > 2 for m in members for e in m.records("merge") if "contributors" in e)
        plans = {e["epoch"]: e["groups"] for m in members for e in m.records("groups")}
        assert plans and 3 in plans.values(), "the groups rotate; of five members there are three"

        row = members[1].report.status(asyncio.get_running_loop().time()).fragments[0]
        header = members[1].core.fragments[0].chain.header
        # On a machine so busy that somebody was not heard in time, the newest plan may be one for four.
        assert (row.groups, row.epoch) == (header.groups, header.epoch) and row.groups in (2, 3)
        assert row.levels == row.groups
        assert row.root in {m.core.shared.me for m in members}
        assert any("fragment 0 group " in line for m in members for line in m.diary.recent)
        for member in members:
            await until(lambda m=member: m.compute.vault.version(0) == m.number(), "the commit")
        thetas = [m.compute.vault.theta(0) for m in members]
        assert all(torch.equal(thetas[0], theta) for theta in thetas)
        for member in members:
            held = member.holdings.tickets
            await until(lambda t=held: len(t) <= 4 * 3, "what was merged to be let go of")
            assert member.transfers.pushes_in._arriving_bytes == 0


@pytest.mark.long
async def test_a_vanished_root_costs_no_contribution_of_the_others(tmp_path: Path) -> None:
    async with neighbours(tmp_path, *NAMES, group=GROUPED | {"term_versions": 3}) as (around, *members):
        await around.round(*members)
        header = members[0].core.fragments[0].chain.header
        root = next(m for m in members if m.core.shared.me == header.syncer)
        survivors = [m for m in members if m is not root]
        around.hub.kill(root.core.shared.me)
        before = survivors[0].head().tokens
        for _ in range(2):
            await around.round(*survivors)
        await until(lambda: len({m.head() for m in survivors}) == 1, "equal heads")
        assert survivors[0].head().tokens == before + 2 * len(survivors) * 256


async def test_a_run_that_outgrows_one_group_falls_into_several_by_itself(tmp_path: Path) -> None:
    async with neighbours(tmp_path, *NAMES, group={"size": 2, "term_versions": 2}) as (around, *members):
        assert {m.core.fragments[0].chain.header.groups for m in members} == {1}
        rounds = 5
        for _ in range(rounds):
            await around.round(*members)
        await until(lambda: len({m.head() for m in members}) == 1, "equal heads")
        assert members[0].core.fragments[0].chain.header.groups == 3
        assert members[0].head().tokens == rounds * len(members) * 256


async def upper_seat(members: list[QuickMember]) -> tuple[QuickMember, GroupPost]:
    """A member that is the syncer of a group of groups."""

    def found() -> tuple[QuickMember, GroupPost] | None:
        for member in members:
            for post in member.core.fragments[0].posts.taken[1:]:
                if post.office.holding:
                    return member, post
        return None

    return await until(found, "a syncer above the leaves")


WORK = Contributor("somebody", Stamp(3, 3), 256, 1)
BAD_PARTS: dict[str, tuple[str, list[Contributor]]] = {
    "more tokens than steps": ("implausible-tokens", [msgspec.structs.replace(WORK, tokens=257)]),
    "no tokens": ("implausible-tokens", [msgspec.structs.replace(WORK, tokens=0)]),
    "steps without end": ("implausible-tokens", [msgspec.structs.replace(WORK, inner_steps=1 << 40)]),
    "one learner twice": ("repeated-learner", [WORK, WORK]),
    "no stamp": ("false-stamp", [msgspec.structs.replace(WORK, stamp=NEVER)]),
    "a learner of another group": ("other-group", [WORK]),
    "a group that is not the author's": ("not-heard-of", [WORK]),
}


def pass_for_syncer(patch: pytest.MonkeyPatch, post: GroupPost, group: str, peer: str) -> None:
    """Let that peer count as the syncer of that group below the post."""
    true = post.electorate.child_of
    patch.setattr(post.electorate, "child_of", lambda p, now: group if p == peer else true(p, now))


async def test_false_partials_are_refused_on_sight_and_rounds_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"term_versions": 999, "log_versions": 999}
    async with neighbours(tmp_path, *NAMES, group=GROUPED | long) as (around, *members):
        await around.round(*members)
        rogue = await around.rogue()
        size = partial_bytes(rogue.run.layouts[0])
        for name, (reason, contributors) in BAD_PARTS.items():
            member, post = await upper_seat(members)
            assert isinstance(post.electorate, UpperElectorate)
            other = next(iter(post.electorate.children))
            if reason == "other-group":
                names = (f"somebody{i}" for i in range(100))
                outside = next(n for n in names if not post.electorate.all_below(other, [n]))
                contributors = [msgspec.structs.replace(WORK, learner=outside)]
            header = PartialHeader(
                run=rogue.run.id,
                group=other,
                fragment=0,
                syncer=rogue.id,
                number=member.number(),
                digest=member.head().digest,
                parts=tuple(contributors),
                due=True,
                payload_digest=bytes(32),
                payload_bytes=size,
            )
            stranger = reason == "not-heard-of"
            if not stranger:  # it passes for the syncer of that group
                pass_for_syncer(monkeypatch, post, other, rogue.id)
            forged = "not-heard-of" if stranger else "bad-signature"
            for identity, expected in ((rogue.identity, reason), (Identity.generate(), forged)):
                signed = SignedPartial(header, identity.sign(signed_bytes("partial", header)))
                label = wire.encode(wire.PushPartial(signed))
                _, raw = await rogue.transport.push(member.core.shared.me, label, (bytes(size),), 5.0)
                answer = wire.decode(raw, wire.Answer)
                assert answer.verdict.value == expected, name
            monkeypatch.undo()
            assert stranger or expected in member.refused()
        await around.round(*members)

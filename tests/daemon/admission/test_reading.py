"""Visitors of a run that is not open: a pass lets them read its states, and do nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from daemon_kit import QuickMember, Rogue, until
from guests_kit import ClosedNeighbourhood, ask, give, show
from test_door import refused

from p2pdiloco.adapters import streams
from p2pdiloco.core.api.messages import Leaving
from p2pdiloco.core.api.papers import Grant, Word
from p2pdiloco.core.api.reasons import AdmissionFault
from p2pdiloco.daemon import budgets, wire
from p2pdiloco.daemon.admission import passes
from p2pdiloco.daemon.notice import Invite, signed
from p2pdiloco.daemon.wire import JoinAnswer, ShowPass
from p2pdiloco.errors import RemoteError
from p2pdiloco.identity import Identity


async def offer(rogue: Rogue, member: QuickMember, shown: ShowPass) -> AdmissionFault | None:
    """What a member says to a pass."""
    return wire.decode(await ask(rogue, member, shown), JoinAnswer).fault


def made_out(rogue: Rogue, key: Identity, grant: Grant | None = None) -> ShowPass:
    return signed(ShowPass(rogue.run.id, rogue.id, key.peer_id, grant), key)


def by_invite(rogue: Rogue, invite: Invite) -> ShowPass:
    (shown,) = passes(rogue.run.id, rogue.id, invite, ())
    return shown


async def refused_after(rogue: Rogue, peer: str, pull: Any, most: int) -> int:
    """How many times something was given, pulled again and again."""
    for given in range(most):
        try:
            await rogue.transport.pull(peer, wire.encode(pull), 1 << 24, 5.0)
        except RemoteError as error:
            assert error.reason == "busy"
            return given
    raise AssertionError("nothing was refused")


async def pulled(rogue: Rogue, member: QuickMember, pull: Any) -> Any:
    return await rogue.transport.pull(member.transport.peer_id, wire.encode(pull), 1 << 24, 2.0)


async def test_a_pass_by_a_used_up_invite_lets_states_be_read_and_nothing_else(tmp_path: Path) -> None:
    async with ClosedNeighbourhood(tmp_path, uses=2, seats=("a", "b")) as swarm:
        a = await swarm.member("a", genesis=True)
        b = await swarm.member("b")
        await swarm.round(a, b)
        rogue, run = await swarm.rogue(), swarm.run.id
        known, state = a.membership.register.admissions, wire.PullState(run, 0, 1)
        assert (await show(rogue, a, swarm.invite.admit(rogue.id))).fault is AdmissionFault.USED_UP
        assert await refused(pulled(rogue, a, state)) == "not-admitted"
        assert await offer(rogue, a, by_invite(rogue, swarm.invite)) is None
        header, payload = await pulled(rogue, a, state)
        assert wire.decode(header, wire.StateHeader).version.header.number and payload
        for pull in (wire.PullUpdate(run, 0, 1), wire.PullContribution(run, 0, bytes(32))):
            assert await refused(pulled(rogue, a, pull)) == "not-admitted"
        assert await refused(rogue.say(a, Leaving(1))) == "not-admitted"
        contribution = rogue.payload(a)
        pushed = rogue.push(a, rogue.sign(rogue.header(a, contribution)), contribution)
        assert await refused(pushed) == "not-admitted"
        # It is nobody's member, and has taken no place.
        assert a.membership.register.admissions == known
        assert a.membership.register.fault(rogue.id) is AdmissionFault.NOT_SHOWN
        assert a.peer.door.is_stranger(rogue.id) and not a.peer.door.is_member(rogue.id)
        await swarm.round(a, b)


async def test_a_reader_has_the_budget_of_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "SMALL_BYTES", 1)
    monkeypatch.setattr(streams, "PEER_AT_ONCE", 1 << 20)  # it is bytes that are counted here
    monkeypatch.setattr(streams, "OTHERS_AT_ONCE", 1 << 20)
    async with ClosedNeighbourhood(tmp_path, seats=("a",)) as swarm:
        a = await swarm.member("a", genesis=True)
        await swarm.round(a)
        rogue = await swarm.rogue()
        assert await offer(rogue, a, by_invite(rogue, swarm.invite)) is None
        sizes = [8 * layout.numel for layout in swarm.run.layouts]
        given = await refused_after(rogue, a.transport.peer_id, wire.PullState(swarm.run.id, 0, 1), 1000)
        assert given * sizes[0] <= (budgets.COPIES + 1) * sum(sizes)
        await until(lambda: a.transport.refusals == {"enough-states": 1}, "the refusal to be counted")


async def test_an_ended_invite_lets_nobody_read(tmp_path: Path) -> None:
    async with ClosedNeighbourhood(tmp_path, seats=("a",)) as swarm:
        a = await swarm.member("a", genesis=True)
        await swarm.round(a)
        rogue, state = await swarm.rogue(), wire.PullState(swarm.run.id, 0, 1)
        late = swarm.make_invite(expires=1)
        assert await offer(rogue, a, by_invite(rogue, late)) is AdmissionFault.EXPIRED
        closed, revoked = swarm.make_invite(), swarm.make_invite()
        word = signed(Word(swarm.run.id, closed.grant.key, 1, False), swarm.owner)
        ends: list[tuple[Invite, dict[str, Any]]] = [
            (closed, {"seats": (word,)}),
            (revoked, {"seats": (word,), "revoked": (revoked.grant.key,)}),
        ]
        for number, (invite, ending) in enumerate(ends):
            assert await offer(rogue, a, by_invite(rogue, invite)) is None
            await pulled(rogue, a, state)
            await give(rogue, a, swarm.notice(1 + number, **ending))
            assert await refused(pulled(rogue, a, state)) == "not-admitted", "at once"
            assert await offer(rogue, a, by_invite(rogue, invite)) is AdmissionFault.REVOKED


@pytest.mark.parametrize("mode", ["invite", "list"])
async def test_a_member_and_the_owner_let_a_visitor_read(tmp_path: Path, mode: str) -> None:
    async with ClosedNeighbourhood(tmp_path, mode, seats=("a",)) as swarm:
        friend, rogue = await swarm.rogue(), await swarm.rogue()
        own, theirs = tmp_path / "a" / "owner.key", tmp_path / "friend" / "identity.key"
        theirs.parent.mkdir()
        for path, key in ((own, swarm.owner), (theirs, friend.identity)):
            path.write_bytes(key.encoded())
            path.chmod(0o600)
        a = await swarm.member("a", genesis=True)  # the owner's key admits its own node
        await swarm.round(a)
        state = wire.PullState(swarm.run.id, 0, 1)
        (shown,) = passes(swarm.run.id, rogue.id, None, [theirs.parent])
        stranger = AdmissionFault.NOT_SHOWN if mode == "invite" else AdmissionFault.NOT_LISTED
        assert await offer(rogue, a, shown) is stranger, "no member yet"
        assert await refused(pulled(rogue, a, state)) == "not-admitted"
        await show(friend, a, swarm.invite.admit(friend.id))
        listed = {"members": (friend.id,)} if mode == "list" else {}
        await give(rogue, a, swarm.notice(1, **listed))
        owner, member = passes(swarm.run.id, rogue.id, None, [own.parent])
        assert (owner.by, member.by) == (swarm.owner.peer_id, a.transport.peer_id)
        for one in (owner, member, shown):
            assert await offer(rogue, a, one) is None
            await pulled(rogue, a, state)
        await give(rogue, a, swarm.notice(2, banned=(friend.id,), **listed))
        assert await refused(pulled(rogue, a, state)) == "not-admitted", "that member is banned"
        if mode == "list":
            fault = await offer(rogue, a, by_invite(rogue, swarm.make_invite()))
            assert fault is AdmissionFault.NOT_LISTED, "invites are nothing here"


async def test_a_pass_is_of_one_visitor_and_one_key(tmp_path: Path) -> None:
    async with ClosedNeighbourhood(tmp_path, seats=("a",)) as swarm:
        a = await swarm.member("a", genesis=True)
        rogue, other, key = await swarm.rogue(), await swarm.rogue(), Identity.generate()
        good = by_invite(rogue, swarm.invite)
        forged = msgspec.structs.replace(swarm.invite.grant, key=key.peer_id)
        cases = {
            AdmissionFault.OTHER_PEER: by_invite(other, swarm.invite),
            AdmissionFault.ADMISSION_SIGNATURE: made_out(rogue, key, swarm.invite.grant),
            AdmissionFault.GRANT_SIGNATURE: made_out(rogue, key, forged),
        }
        for fault, shown in cases.items():
            assert await offer(rogue, a, shown) is fault
        claimed = msgspec.structs.replace(made_out(rogue, key), by=a.transport.peer_id)
        assert await offer(rogue, a, claimed) is AdmissionFault.ADMISSION_SIGNATURE
        assert await refused(ask(rogue, a, msgspec.structs.replace(good, run="cd" * 32))) == "not-a-member"
        assert not a.membership.gate.may_read(rogue.id)

"""The door of a run that is not open: what strangers can do there is read, what members do just works."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from daemon_kit import Rogue, until
from guests_kit import ClosedNeighbourhood, ask, give, show

from p2pdiloco.core.api.events import Guided, Record
from p2pdiloco.core.api.messages import Leaving
from p2pdiloco.core.api.papers import Admission, Word
from p2pdiloco.core.api.reasons import AdmissionFault, PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import decode_status
from p2pdiloco.daemon.notice import admission, signed
from p2pdiloco.daemon.wire import JoinAnswer, MayJoin, NoticeQuery
from p2pdiloco.errors import RemoteError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.ports import Refusal, Transport
from p2pdiloco.release import WIRE_VERSION


async def refused(what: object) -> str:
    """The reason of a refusal."""
    with pytest.raises(RemoteError) as caught:
        await what  # type: ignore[misc]
    return caught.value.reason


async def test_a_stranger_reads_and_does_nothing_else(tmp_path: Path) -> None:
    async with ClosedNeighbourhood(tmp_path, seats=("a", "b")) as swarm:
        a = await swarm.member("a", genesis=True)
        b = await swarm.member("b")
        await swarm.round(a, b)
        rogue, payload = await swarm.rogue(), b""
        head, me = a.head(), a.transport.peer_id
        assert a.peer.door.is_stranger(rogue.id) and not a.peer.door.is_stranger(b.transport.peer_id)
        assert await refused(rogue.say(a, Leaving(1))) == "not-admitted"
        payload = rogue.payload(a)
        contribution = rogue.sign(rogue.header(a, payload))
        assert await refused(rogue.push(a, contribution, payload)) == "not-admitted"
        run, one = swarm.run.id, bytes(32)
        asked = wire.PullUpdate(run, 0, 1), wire.PullState(run, 0, 1), wire.PullContribution(run, 0, one)
        for pull in asked:
            assert await refused(rogue.transport.pull(me, wire.encode(pull), 1 << 20, 2.0)) == "not-admitted"
        assert await refused(rogue.transport.pull(me, b"\xff" * 99, 0, 2.0)) == "not-admitted"
        assert await refused(rogue.transport.push(me, b"\xff" * 99, (b"x",), 2.0)) == "not-admitted"
        assert await refused(rogue.transport.send(me, wire.MESSAGE + b"\xff" * 99, 2.0)) == "not-admitted"
        punch = wire.encode(wire.Punch(rogue.id, ("/ip4/7.0.0.1/udp/1/quic-v1",)))
        assert await refused(b.transport.send(me, wire.QUERY + punch, 2.0)) == "not-admitted"
        assert a.report.status(0.0).refusals["not-admitted"] == 9
        # What a newcomer reads before it joins:
        manifest = await rogue.transport.pull(me, wire.encode(wire.PullManifest(swarm.run.id)), 0, 2.0)
        assert not isinstance(manifest, Refusal)
        reply = await rogue.transport.send(me, wire.QUERY + wire.encode(wire.RunsQuery()), 2.0)
        assert wire.decode(reply, wire.RunList).runs[0].run == swarm.run.id
        tokenizer = await rogue.transport.pull(me, wire.encode(wire.PullTokenizer(swarm.run.id)), 0, 2.0)
        assert isinstance(tokenizer, Refusal)
        assert wire.decode(tokenizer.answer, wire.Refused).reason is PullRefusal.UNKNOWN_RUN
        assert a.head() == head and rogue.id not in a.core.shared.view.members(0.0)
        await swarm.round(a, b)


async def test_a_stranger_reads_decisions_and_no_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A log may name paths, and so may the reason of a decision that was this machine's own trouble."""
    caplog.set_level("INFO", "p2pdiloco")
    async with ClosedNeighbourhood(tmp_path, seats=("a", "b")) as swarm:
        a = await swarm.member("a", genesis=True)
        b = await swarm.member("b")
        await swarm.round(a, b)
        own, question = "/home/ann/p2pdiloco: No space left on device", wire.StatusQuery(swarm.run.id)
        log = logging.getLogger("p2pdiloco.daemon")
        log.addHandler(a.diary._recent)
        try:
            log.warning("%s", own)
            a.diary.on_record(Record("leave", None, "said good-bye", (("peer", "p1"),)))
        finally:
            log.removeHandler(a.diary._recent)
        a.diary.on_record(Record("office", 0, f"laid down: cannot save: {own}", (("term", 1),)))
        a.diary.on_record(Record("election", 0, f"vote could not be saved: {own}", ()))
        a.diary.on_record(Record("office", 0, "follows", (("syncer", "p1"), ("term", 2))))

        async def latest(transport: Transport) -> str:
            asked = wire.QUERY + wire.encode(question)
            told = decode_status(await transport.send(a.transport.peer_id, asked, 2.0))
            return "\n".join(told.recent)

        told = await latest((await swarm.rogue()).transport)
        assert own not in told and "follows" in told and "good-bye" in told
        assert (await latest(b.transport)).count(own) == 3


async def test_members_know_each_other_again_whoever_forgot(tmp_path: Path) -> None:
    async with ClosedNeighbourhood(tmp_path, seats=("a", "b")) as swarm:
        a = await swarm.member("a", genesis=True)
        b = await swarm.member("b")
        await swarm.round(a, b)
        await swarm.end(b)
        b = await swarm.member("b", invite=None)  # its admission is kept
        await swarm.round(a, b)
        # A member that comes back without its memory of the others is shown their admissions.
        await swarm.end(a)
        (a.store.folder / "admitted").write_bytes(b"damaged")
        a = await swarm.member("a", invite=None)
        await swarm.round(a, b)


async def test_who_is_shown_and_who_is_not(tmp_path: Path) -> None:
    async with ClosedNeighbourhood(tmp_path, uses=3, seats=("a", "b")) as swarm:
        a = await swarm.member("a", genesis=True)
        one, two, three = [await swarm.rogue() for _ in range(3)]
        assert (await show(one, a, None)).fault is AdmissionFault.NOT_SHOWN
        stolen = swarm.invite.admit(two.id)
        assert (await show(one, a, stolen)).fault is AdmissionFault.OTHER_PEER
        own_key = Identity.generate()
        forged = admission(msgspec.structs.replace(stolen.grant, key=own_key.peer_id), one.id, own_key)
        assert (await show(one, a, forged)).fault is AdmissionFault.GRANT_SIGNATURE
        late = swarm.make_invite(expires=1)
        assert (await show(one, a, late.admit(one.id))).fault is AdmissionFault.EXPIRED
        for rogue in (one, two):
            shown = await show(rogue, a, swarm.invite.admit(rogue.id))
            assert shown.fault is None and isinstance(shown.admission, Admission)
            await rogue.say(a, Leaving(1))
        assert {other.peer for other in shown.others} >= {one.id}
        assert (await show(three, a, swarm.invite.admit(three.id))).fault is AdmissionFault.USED_UP
        assert await refused(three.say(a, Leaving(1))) == "not-admitted"
        answer = await ask(three, a, MayJoin(swarm.run.id, three.id, swarm.invite.grant))
        assert wire.decode(answer, JoinAnswer).fault is AdmissionFault.USED_UP
        answer = await ask(three, a, MayJoin(swarm.run.id, one.id, swarm.invite.grant))
        assert wire.decode(answer, JoinAnswer).fault is None
        # Members tell each other whom they have seen: uses are counted together.
        b = await swarm.member("b", invite=swarm.make_invite())
        await until(lambda: b.membership.register.fault(one.id) is None, "b to hear of whom a has seen")
        assert (await show(three, b, swarm.invite.admit(three.id))).fault is AdmissionFault.USED_UP


async def test_whoever_is_admitted_is_no_stranger_before_it_has_worked(tmp_path: Path) -> None:
    async with ClosedNeighbourhood(tmp_path, seats=("a",)) as swarm:
        a = await swarm.member("a", genesis=True)
        rogue = await swarm.rogue()
        a.core.shared.has_worked = lambda _peer: False  # type: ignore[method-assign]
        assert not a.membership.gate.has_papers(rogue.id) and not a.measurements.counts(rogue.id)
        await show(rogue, a, swarm.invite.admit(rogue.id))
        assert a.membership.gate.has_papers(rogue.id) and a.measurements.counts(rogue.id)


async def test_a_record_of_a_stranger_is_a_place_to_dial_and_no_more(tmp_path: Path) -> None:
    async with ClosedNeighbourhood(tmp_path, seats=("a", "b")) as swarm:
        a = await swarm.member("a", genesis=True)
        rogue = await swarm.rogue()
        key = wire.members_key(swarm.run.id)
        record = wire.encode(wire.Presence(WIRE_VERSION, 1, "rogue", ("/memory/p2p/x",)))
        await rogue.transport.put_record(key, record, 60.0)
        await until(lambda: rogue.heard, "it to be dialled")
        await a.presence.look()
        assert rogue.id not in a.presence.names
        assert rogue.id not in [peer for peer, _ in a.presence._roster.members]
        reading = wire.encode(wire.Reading("data", 0, b"\xff"))
        await rogue.transport.put_record(wire.reading_key(swarm.run.id), reading, 60.0)
        assert await a.sharing.look() == 0, "nor does it say what is read"
        b = await swarm.member("b")
        await a.presence.look()
        assert b.transport.peer_id in [peer for peer, _ in a.presence._roster.members]


async def test_a_newcomer_joins_members_whose_invites_are_over(tmp_path: Path) -> None:
    """They were let in in time, which it cannot know yet; later it can: they have marks."""
    async with ClosedNeighbourhood(tmp_path, seats=("a", "b")) as swarm:
        over = swarm.make_invite(expires=1)
        a = await swarm.member("a", genesis=True, invite=over)
        await swarm.round(a)
        rogue = await swarm.rogue()
        assert (await show(rogue, a, over.admit(rogue.id))).fault is AdmissionFault.EXPIRED
        b = await swarm.member("b", trained=False)
        assert (await show(rogue, b, over.admit(rogue.id))).fault is None, "it is a newcomer itself"
        assert over.admit(rogue.id) not in b.membership.register.admissions
        await until(lambda: b.report.state == "training", "b to train")
        await swarm.round(a, b)
        assert (await show(rogue, b, over.admit(rogue.id))).fault is AdmissionFault.EXPIRED
        assert a.membership.register.fault(rogue.id) is AdmissionFault.NOT_SHOWN
        assert await refused(rogue.say(b, Leaving(1))) == "not-admitted"


async def test_without_an_invite_a_node_says_so_at_once(tmp_path: Path) -> None:
    async with ClosedNeighbourhood(tmp_path, seats=("a",)) as swarm:
        with pytest.raises(UserError, match="takes members by invite"):
            await swarm.member("a", genesis=True, invite=None)


async def test_queries_of_strangers_are_bounded_and_damaged_ones_refused(tmp_path: Path) -> None:
    async with ClosedNeighbourhood(tmp_path, seats=("a",)) as swarm:
        a = await swarm.member("a", genesis=True)
        rogue: Rogue = await swarm.rogue()
        query = wire.encode(MayJoin("cd" * 32, rogue.id, None))
        reasons = [await refused(rogue.transport.send(a.transport.peer_id, wire.QUERY + query, 2.0))]
        reasons.append(await refused(rogue.transport.send(a.transport.peer_id, wire.QUERY + query[:-9], 2.0)))
        assert reasons == ["not-a-member", "garbage"]
        forged = msgspec.structs.replace(swarm.notice(3), sequence=9)
        assert await refused(give(rogue, a, forged)) == "notice-signature"
        for _ in range(40):
            try:
                await ask(rogue, a, NoticeQuery(swarm.run.id, 0))
            except RemoteError as error:
                assert error.reason == "busy"
                break
        assert a.transport.refusals["enough-admissions"] == 1
        await a.presence.look()


async def test_who_is_banned_is_out_at_once_and_the_word_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("p2pdiloco.daemon.admission.FIRST_ROUND_S", 1e6)
    async with ClosedNeighbourhood(tmp_path, seats=("a", "b")) as swarm:
        a = await swarm.member("a", genesis=True)
        b = await swarm.member("b")
        rogue = await swarm.rogue()
        await show(rogue, a, swarm.invite.admit(rogue.id))
        await rogue.say(a, Leaving(1))
        notice = swarm.notice(5, banned=(rogue.id,))
        await give(rogue, a, notice)
        await until(lambda: b.membership.register.sequence == 5, "b to hear of it")
        for member in (a, b):
            assert await refused(rogue.say(member, Leaving(1))) == "banned"
            manifest = rogue.transport.pull(
                member.transport.peer_id, wire.encode(wire.PullManifest(swarm.run.id)), 0, 2.0
            )
            assert await refused(manifest) == "banned"
        assert (await show(rogue, a, swarm.make_invite().admit(rogue.id))).fault is AdmissionFault.BANNED
        # It is kept, and an older one takes nothing back.
        await swarm.end(a)
        a = await swarm.member("a")
        assert (await give(rogue, a, swarm.notice(4))).notice == notice
        assert await refused(rogue.say(a, Leaving(1))) == "banned"
        # Whoever came with an invite that is revoked is out, too.
        b_was = b.transport.peer_id
        book = a.membership.register
        await give(rogue, a, swarm.notice(6, revoked=(swarm.invite.grant.key,), banned=(b_was,)))
        assert book.fault(b_was) is None, "but for those that have a seat"
        end = signed(Word(swarm.run.id, b_was, 1, False), swarm.owner)
        await give(rogue, a, swarm.notice(7, revoked=(swarm.invite.grant.key,), seats=(end,)))
        await until(lambda: book.fault(b_was) is AdmissionFault.NOT_SHOWN, "the end of its seat")
        assert a.membership.register.fault(rogue.id) is AdmissionFault.NOT_SHOWN, "no longer banned"
        assert (await show(rogue, a, swarm.invite.admit(rogue.id))).fault is AdmissionFault.REVOKED
        # It says so itself, to its owner first.
        await until(lambda: "revoked the invite: nobody of run closed takes" in caplog.text, "b to say so")


async def test_a_list_is_what_the_newest_notice_says(tmp_path: Path) -> None:
    async with ClosedNeighbourhood(tmp_path, "list", seats=("a", "b")) as swarm:
        (tmp_path / "a" / "owner.key").write_bytes(swarm.owner.encoded())
        (tmp_path / "a" / "owner.key").chmod(0o600)
        a = await swarm.member("a", genesis=True)  # the owner's key admits its own node
        rogue = await swarm.rogue()
        assert (await show(rogue, a, swarm.invite.admit(rogue.id))).fault is AdmissionFault.NOT_LISTED
        b = await swarm.member("b", trained=False)
        await until(lambda: b.membership.introductions._said, "b to hear why it is not let in")
        await give(rogue, a, swarm.notice(1, members=(b.transport.peer_id,)))
        await until(lambda: b.report.state == "training", "b to be let in")
        await swarm.round(a, b)


async def test_the_core_hears_of_words_on_seats_and_of_whoever_was_admitted(tmp_path: Path) -> None:
    async with ClosedNeighbourhood(tmp_path) as swarm:
        a = await swarm.member("a", genesis=True)
        told: list[Guided] = []
        put = a.post.put
        a.post.put = lambda event: (told.append(event) if isinstance(event, Guided) else None, put(event))[1]  # type: ignore[method-assign]
        rogue, shown = await swarm.rogue(), swarm.invite.admit(a.transport.peer_id)
        own = swarm.invite.admit(rogue.id)
        assert (await show(rogue, a, own)).fault is None
        assert told[-1].papers == (shown, own), "admissions, its own too"
        word = signed(Word(swarm.run.id, rogue.id, 1, True), swarm.owner)
        await give(rogue, a, swarm.notice(1, seats=(word,)))
        assert told[-1].papers == (word, shown, own)
        await until(lambda: a.core.shared.has_seat(rogue.id), "it to count as one that may have a seat soon")

"""One member's life with a scripted learner: rounds, a dead learner, going on alone."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from daemon_kit import Neighbourhood, QuickMember, Rogue, neighbours, short_run, until
from scripted_learner import ScriptedLearner

from p2pdiloco.adapters.spool import Spool
from p2pdiloco.cli.top import HeardReport, picture_of
from p2pdiloco.core.api.config import Amendment, Going
from p2pdiloco.core.api.events import (
    Answered,
    Ask,
    ContributionSent,
    Effect,
    Event,
    LeaveRequested,
    Offer,
    OfferAnswered,
)
from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.daemon import admission, course, learner_link, wire
from p2pdiloco.daemon.notice import Notice, signed
from p2pdiloco.daemon.run_files.saved_state import FILE
from p2pdiloco.daemon.wire import GiveNotice
from p2pdiloco.errors import RemoteError, TransportError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.learner import channel as ch


async def test_a_round_moves_everybody_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        for _ in range(3):
            await around.round(one, two)
        await until(lambda: one.head() == two.head(), "equal heads")
        # The tensor worker commits, and the learner hears of it, right after the core's head has moved.
        for member in (one, two):
            await until(lambda m=member: m.compute.vault.version(0) == m.number(), "the commit")
        assert torch.equal(one.compute.vault.theta(0), two.compute.vault.theta(0))
        assert one.head().tokens == 6 * 256  # every token once
        seen = one.report.snapshot(0.0)
        shares = [seen.me.weighs, *(row.weighs for row in seen.peers)]
        assert shares == [1.0, 1.0], "of two none weighs less"
        assert [row.expelled for row in seen.peers] == [None]
        audits = one.core.shared.loss_audits
        monkeypatch.setattr(audits, "finding", {two.core.shared.me: LossFinding.NOTHING}.get)
        assert [row.expelled for row in one.report.snapshot(0.0).peers] == [LossFinding.NOTHING]

        def merged() -> int:
            return sum(isinstance(c, ch.Install) and c.mode == "merged" for c in one.learner.commands)

        await until(lambda: merged() >= 3, "the installs")
        assert merged() == 3


async def test_who_has_few_seats_for_company_says_so(tmp_path: Path) -> None:
    seats = "one", "two", "three", "four", "five"
    async with Neighbourhood(tmp_path, seats=seats) as around:
        one = await around.member("one", genesis=True)
        assert one.report.status(0.0).doubt == "few seats are here: 1 of 5"
        for name in seats[1:3]:
            await around.member(name)
        now = asyncio.get_running_loop().time
        await until(lambda: one.report.status(now()).doubt == "", "three of five")


async def test_a_dead_learner_starts_again_from_the_vault(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        await around.round(one, two)
        tokens = one.head().tokens
        one.learner.contribute(0)
        await until(lambda: not one.core.fragments[0].own.idle or one.head().tokens > tokens, "its encoding")
        one.learner.die()  # what was copied out is not lost
        two.learner.contribute(0)
        await until(lambda: two.head().tokens == tokens + 2 * 256, "both contributions merged")
        await until(lambda: one.learner.running, "a new learner")
        await until(lambda: two.head() == one.head(), "equal heads")
        await around.round(one, two)
        base = one.holdings.exchange.base(0, one.learner.bases[0].buffer)
        await until(lambda: one.learner.bases[0].number == one.number(), "the newest version installed")
        base = one.holdings.exchange.base(0, one.learner.bases[0].buffer)
        assert torch.equal(base, one.compute.vault.theta(0))


async def test_a_process_started_ahead_that_dies_is_replaced_when_it_is_needed(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        await around.end(two)
        around.hub.cut(one.core.shared.me, two.core.shared.me)
        waiting = await around.member("two", trained=False)
        await until(lambda: waiting.learner.running, "the process")
        restarts, restart = list[float](), waiting.learner_link._restart
        waiting.learner_link._restart = lambda pause_s: (restarts.append(pause_s), restart(pause_s))[1]  # type: ignore[method-assign]
        waiting.learner.die()
        assert not restarts, "it would begin before the versions are confirmed, and twice"
        around.hub.heal(one.core.shared.me, two.core.shared.me)
        await until(lambda: waiting.report.state == "training", "its training")
        assert waiting.learner.bases


async def test_three_learners_in_a_row_that_make_no_step_end_the_node_with_their_hint(tmp_path: Path) -> None:
    async with neighbours(tmp_path) as (_, one):
        link, restart = one.learner_link, one.learner_link._restart
        link._restart = lambda pause_s: restart(0.0)  # type: ignore[method-assign]
        for lives in ((False, False), (True,), (False, False, False)):  # a step in between: it begins anew
            for one.learner.steps in lives:
                one.learner.die("a larger device")
                assert not link.fatal.done()
                await until(lambda: one.learner.running, "the next one")
        one.learner.die("a larger device")
        error = link.fatal.exception()
        assert isinstance(error, UserError) and error.hint == "a larger device"
        assert str(error) == "the learner cannot start: killed by SIGKILL"


async def test_a_learner_that_hangs_is_ended_and_another_one_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(learner_link, "TICK_S", 0.001)  # a tick still counts for all of its seconds
    caplog.set_level(logging.INFO)
    async with neighbours(tmp_path) as (around, one):
        await around.round(one)
        bases = one.learner.bases
        await until(lambda: "nothing has been heard of the learner for 60 s" in caplog.text, "a warning")
        await until(lambda: "it hung: nothing was heard of it for 600 s" in caplog.text, "its end")
        await until(lambda: one.learner.running and one.learner.bases is not bases, "another one")


async def test_the_core_hears_that_a_payload_is_about_to_be_whole_before_it_hears_an_answer(
    tmp_path: Path,
) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        await around.round(one, two)
        await until(lambda: not two.learner.slot_in_use, "a free slot")
        heard: list[type] = []
        handle = two.core.handle

        def listen(event: Event, now: float) -> list[Effect]:
            heard.append(type(event.answer if isinstance(event, Answered) else event))
            return handle(event, now)

        two.core.handle = listen  # type: ignore[method-assign]
        for _ in range(20 * around.run.manifest.group.term_versions):
            if OfferAnswered in heard:  # the contributor may be the syncer itself
                break
            await around.round(one, two)  # both, so that both vote, and the office goes round
        assert heard.index(ContributionSent) < heard.index(OfferAnswered)


async def test_alone_it_goes_on_from_what_it_saved_after_a_while(tmp_path: Path) -> None:
    async with neighbours(tmp_path) as (around, one):
        for _ in range(3):
            await around.round(one)
        head = one.head()
        await around.end(one, orderly=True)
        again = await around.member("one")  # without --genesis
        assert again.head() == head
        assert "goes on from the saved state" in str(again.records("join"))
        await around.round(again)
        assert again.head().tokens == head.tokens + 256


async def test_saved_updates_are_applied_with_their_own_steps(tmp_path: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    """One inner step makes its share of a step of momentum, on the way back too."""
    async with neighbours(tmp_path) as (around, one):
        for _ in range(4):
            await around.round(one)
        head, steps = one.head(), one.core.fragments[0].chain.header.longest_steps()
        assert 0 < steps < around.run.manifest.sync.inner_steps
        await until(lambda: (one.store.folder / f"updates/000/{head.number}.update").exists(), "its file")
        await around.end(one)
        again = await around.member("one")
        assert again.head() == head and again.compute.vault.version(0) == head.number
        assert "not sound" not in caplog.text


async def test_without_genesis_and_without_peers_it_waits(tmp_path: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level("INFO", "p2pdiloco")
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", trained=False)
        await until(lambda: "waiting: no member of run test" in caplog.text, "it to say so")
        assert not one.core.confirmed and not one.learner.bases


async def test_an_overwrite_makes_the_copy_under_way_void(tmp_path: Path) -> None:
    """The chain has a contribution of ours that this life cannot name: θ is taken as it is there."""
    async with neighbours(tmp_path) as (around, one):
        await around.round(one)
        link = one.learner_link
        link._slots[0].next = "overwrite"
        one.learner.slot_in_use.add(0)
        one.learner._on_event(ch.CopiedOut(0, 256, 1, 1, one.learner.bases[0].buffer, 1, True))
        link.after_commit(0)
        await until(lambda: link._slots[0].installing is None, "the install")
        assert one.core.fragments[0].own.idle  # it was never offered
        modes = [c.mode for c in one.learner.commands if isinstance(c, ch.Install)]
        assert modes[-1] == "overwrite"
        await around.round(one)


async def test_versions_that_come_while_one_is_installed_are_folded(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        await around.round(one, two)
        await until(lambda: one.head() == two.head(), "equal heads")
        link, sent = one.learner_link, len(one.learner.commands)
        obeyed = one.learner._obey
        held: list[object] = []
        one.learner._obey = held.append  # type: ignore[method-assign]  # a learner in a long inner step
        one.learner.contribute(0)
        number = two.number()
        for _ in range(3):
            two.learner.contribute(0)
            number += 1
            await until(lambda n=number: one.number() >= n and two.number() >= n, "versions")
        await until(lambda: one.compute.vault.version(0) == one.number(), "the commit")
        installs = [c for c in one.learner.commands[sent:] if isinstance(c, ch.Install)]
        assert len(installs) == 1 and link._slots[0].next is not None
        one.learner._obey = obeyed  # type: ignore[method-assign]
        for command in held:
            obeyed(command)
        await until(
            lambda: link._slots[0].installing is None and link._slots[0].next is None, "both installs"
        )
        installs = [c for c in one.learner.commands[sent:] if isinstance(c, ch.Install)]
        assert len(installs) == 2 and "merged" in [c.mode for c in installs]
        assert installs[-1].number == one.number() and installs[0].buffer != installs[1].buffer
        assert 0 not in one.learner.slot_in_use


async def test_a_status_has_one_count_of_merged_tokens(tmp_path: Path) -> None:
    async with neighbours(tmp_path) as (around, one):
        await around.round(one, fragment=1)
        told = one.report.status(0.0)
        assert told.run_tokens == told.course.tokens == 256 // 4, "the mean over fragments"
        picture = picture_of({"one": HeardReport(told, 0.0)}, 0.0)
        assert picture.run_tokens == told.run_tokens


# Leaving of a member: what it hands over, saves and notes, and takes up again.


async def test_leaving_sends_what_there_is_and_comes_back_where_it_was(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        await around.round(one, two)
        await until(lambda: not two.learner.slot_in_use, "a free slot")
        tokens, me = one.head().tokens, two.core.shared.me
        two.learner.contribute(0)  # it is still being encoded when the node is told to leave
        await around.end(two, orderly=True)
        # Merged before it left, and not by a version that went away with it.
        assert one.head().tokens == tokens + 256
        assert [e["peer"] for e in one.records("leave")] == [me]
        note = json.loads((two.store.folder / FILE).read_text())
        assert note["0"]["slot"] is None  # nothing in flight

        await around.round(one)
        again = await around.member("two")
        assert again.core.shared.me == me and again.learner.restored == ("all",) * 4
        assert again.head(1).number == one.head(1).number
        await until(lambda: again.head() == one.head(), "it to catch up")
        await around.round(one, again)


async def test_what_nobody_answered_before_it_left_is_taken_up_again(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        await around.round(one, two)
        # Who is syncer merges its own work also when it is cut off: the other one goes.
        goes = two if await around.syncer(one, two) is one else one
        await until(lambda: not goes.learner.slot_in_use, "a free slot")
        link = (one.core.shared.me, two.core.shared.me)
        around.hub.cut(*link)
        goes.learner.contribute(0)
        await until(lambda: not goes.core.fragments[0].own.idle, "its encoding")
        await around.end(goes, orderly=True)
        note = json.loads((goes.store.folder / FILE).read_text())
        assert note["0"]["slot"] is not None, "one was pending"
        around.hub.heal(*link)
        again = await around.member(goes.settings.data_dir.name)
        assert again.learner.restored == ("all",) * 4


async def left_by(two: QuickMember, one: QuickMember, around: Neighbourhood) -> Path:
    """The note of a member's orderly end, which another one outlives."""
    await around.round(one, two)
    await around.end(two, orderly=True)
    return two.store.folder / FILE


async def test_a_learner_that_dies_before_it_contributes_has_used_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        note, start, given = await left_by(two, one, around), ScriptedLearner.start, list[tuple[str, ...]]()

        async def dies_twice(
            learner: ScriptedLearner, bases: list[ch.BaseRef], path: Path | None, restore: tuple[str, ...]
        ) -> None:
            given.append(restore)
            if len(given) > 1:
                await start(learner, bases, path, restore)
            if len(given) < 3:  # before it is ready; then in its first inner step
                learner.die()

        monkeypatch.setattr(ScriptedLearner, "start", dies_twice)
        again = await around.member("two")
        await until(lambda: len(given) == 3 and again.learner.running, "the third learner")
        assert given == [("all",) * 4] * 3 and note.exists()
        again.learner.contribute(0)
        await until(lambda: not note.exists(), "the note to go, before anything of it can go out")
        again.learner.die()
        await until(lambda: len(given) == 4, "the fourth learner")
        assert given[3] == (), "what the third one had is gone with it"


async def test_who_leaves_before_its_learner_made_anything_leaves_what_it_found(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        note = await left_by(two, one, around)
        left = note.read_bytes()
        again = await around.member("two")
        again.learner_link._ready = False
        stop = again.learner.stop

        async def ready_only_now(path: Path | None, timeout_s: float) -> int | None:
            again.learner._on_event(ch.Ready("cpu", 1, 1, 0, True))
            return await stop(path, timeout_s)

        again.learner.stop = ready_only_now  # type: ignore[method-assign]
        await around.end(again, orderly=True)
        assert note.read_bytes() == left


async def test_a_note_that_cannot_be_removed_ends_the_node_and_nothing_goes_out(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        note = await left_by(two, one, around)
        again = await around.member("two")
        note.unlink()
        note.mkdir()
        tickets = len(again.holdings.tickets)
        again.learner.contribute(0)
        await again.learner_link.save()
        fatal = again.learner_link.fatal.exception()
        assert isinstance(fatal, UserError) and "resume.json cannot be removed" in str(fatal)
        assert len(again.holdings.tickets) == tickets
        assert not any(isinstance(command, ch.Save) for command in again.learner.commands)
        note.rmdir()


async def test_nothing_is_on_its_way_any_more_when_it_is_noted_what_is_left(tmp_path: Path) -> None:
    async with neighbours(tmp_path) as (around, one):
        own, under_way = one.core.fragments[0].own, []
        noted = own.unmerged
        own.unmerged = lambda: (under_way.append(len(one.runner._offers)), noted())[1]  # type: ignore[method-assign]

        async def endless(*_: object) -> Any:
            await asyncio.Event().wait()

        one.transfers.offer = endless  # type: ignore[method-assign]
        signed, ticket = cast(Any, None), one.holdings.tickets.put(b"payload")
        one.runner._ask(Ask(0, Offer("peer", signed, ticket)))
        await around.end(one, orderly=True)
        assert under_way == [0]


async def test_a_push_that_is_under_way_at_the_end_is_cut_and_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context))
    async with Neighbourhood(tmp_path) as around:
        one, rogue = await around.member("one", genesis=True), await around.rogue()
        await until(lambda: one.core.fragments[0].office.holding, "a syncer")
        one.holdings.memory.fits_push = lambda size: False  # type: ignore[method-assign]
        began, chunk, write = asyncio.Event(), asyncio.Event(), Spool.write

        async def late(spool: Spool, at: int, data: memoryview) -> None:
            began.set()
            await chunk.wait()
            await write(spool, at, data)

        monkeypatch.setattr(Spool, "write", late)
        payload = rogue.payload(one)
        pushing = asyncio.create_task(rogue.push(one, rogue.sign(rogue.header(one, payload)), payload))
        await began.wait()
        training = around._life.pop(one)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await around.lives[one].close()
        chunk.set()
        with pytest.raises(TransportError):
            await pushing
        assert not bugs


async def test_what_was_merged_at_the_very_end_is_not_saved_as_unmerged(tmp_path: Path) -> None:
    """The last version comes while the learner is in an inner step: it is told before it saves."""
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        await around.round(one, two)
        obeyed, stopped = two.learner._obey, two.learner.stop
        loop = asyncio.get_running_loop()
        two.learner._obey = lambda c: loop.call_later(0.2, obeyed, c)  # type: ignore[assignment, method-assign]
        copies: list[set[int]] = []

        async def stop(path: Path | None, timeout_s: float) -> int | None:
            copies.append(set(two.learner.slot_in_use))
            return await stopped(path, timeout_s)

        two.learner.stop = stop  # type: ignore[method-assign]
        two.learner.contribute(0)
        await around.end(two, orderly=True)
        assert two.learner.slot_in_use == set() and copies[0] == set()
        assert two.learner.commands.count(ch.StopStepping()) == 1, "it need not come to the end of its step"
        assert (two.store.folder / FILE).exists()


async def test_while_leaving_nothing_new_is_taken_in(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        await around.round(one, two)
        two.post.put(LeaveRequested())
        await until(two.runner.departure.done, "it to have left")  # in far less than its whole patience
        assert "nothing was pending" in two.records("leave")[-1]["reason"]
        tickets = len(two.holdings.tickets)
        two.learner.contribute(0)  # the learner does not know yet
        await until(lambda: len(two.holdings.tickets) == tickets, "the late copy to be let go")
        assert two.core.fragments[0].own.idle


async def test_a_learner_that_could_not_save_leaves_no_note(tmp_path: Path) -> None:
    async with neighbours(tmp_path) as (around, one):
        await around.round(one)
        one.learner.save_works = False
        await around.end(one, orderly=True)
        assert not (one.store.folder / FILE).exists()


async def test_a_node_that_never_trained_leaves_the_note_of_its_last_life(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        note = await left_by(two, one, around)
        left = note.read_bytes()
        around.hub.cut(one.core.shared.me, two.core.shared.me)
        impatient = await around.member("two", trained=False)
        await around.end(impatient, orderly=True)
        assert note.read_bytes() == left


# A run that comes to its end: learners stop, nodes say so, save, and go on giving.


async def train(around: Neighbourhood, *members: QuickMember) -> None:
    """Every fragment is merged once by everybody."""
    for fragment in range(4):
        await around.round(*members, fragment=fragment)


async def test_a_run_that_is_over_stops_learners_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(course, "SETTLE_S", 0.1)
    async with Neighbourhood(tmp_path, seats=("one", "two")) as around:
        around.run = short_run(tmp_path, 4 * 256, seats=("one", "two"))
        results = tmp_path / "results"
        often = {"result_dir": results, "result_every": "1000merges"}
        one = await around.member("one", genesis=True, **often)
        two = await around.member("two")
        await train(around, one, two)
        assert one.report.status(0.0).course.rests == "no"
        await train(around, one, two)
        for member in (one, two):
            await until(lambda m=member: m.report.state == "ended", "the end")
            assert member.learner.course.rests == "ended"
            assert "the run has ended" in member.records("course")[-1]["reason"]
            status = member.report.status(0.0)
            assert (status.state, status.course.rests, status.course.tokens) == ("ended", "ended", 4 * 256)
            assert status.members[0].confirmed
            await until(lambda m=member: ch.Save in map(type, m.learner.commands), "its moments are saved")
        await until(lambda: caplog.text.count("all is merged and saved") == 2, "both save")
        assert [path.name[-17:-12] for path in results.iterdir()] == [f"{one.compute.vault.merges:05d}"]
        for fragment in range(4):
            saved = f"fragments/{fragment:03d}/checkpoint-{one.number(fragment)}.safetensors"
            assert (one.store.folder / saved).exists()
        await around.end(two, orderly=True)
        two = await around.member("two", trained=False)  # who comes when it is over does not begin
        await until(lambda: two.report.state == "ended", "the end")
        assert two.learner.begun_with.rests == "ended"
        # What somebody still had is merged: nothing is lost at an end.
        await around.round(one, two)


async def give(rogue: Rogue, member: QuickMember, notice: Notice) -> bytes:
    query = wire.QUERY + wire.encode(GiveNotice(notice))
    return await rogue.transport.send(member.transport.peer_id, query, 2.0)


async def test_what_an_owner_changes_holds_for_all_at_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "FIRST_ROUND_S", 0.2)
    owner, first, second = Identity.generate(), 3 * 256, 7 * 256
    async with Neighbourhood(tmp_path, seats=("one", "two", "gone")) as around:
        around.run = short_run(tmp_path, 1 << 20, owner=owner, seats=("one", "two", "gone"))
        one = await around.member("one", genesis=True)
        two, gone = await around.member("two"), await around.member("gone")
        await train(around, one, two, gone)
        await around.end(gone, orderly=True)
        rogue = await around.rogue()

        def notice(sequence: int, *amendments: Amendment) -> Notice:
            return signed(Notice(around.run.id, sequence, amendments=amendments), owner)

        slower = Amendment(1, first, rate_factor=0.5)
        pause = Amendment(2, second, 0, 0.5, Going.PAUSE, "to repair a link")
        forged = msgspec.structs.replace(notice(9, pause), sequence=10)
        with pytest.raises(RemoteError, match="notice-signature"):
            await give(rogue, one, forged)
        await give(rogue, one, notice(2, slower, pause))
        for member in (one, two):  # from one to the other
            told = member.learner
            await until(lambda at=told: at.course.amendments == (slower, pause), "their word")
            assert member.learner.course.rests == "no"
            assert member.report.status(0.0).course.message == "to repair a link"
        await give(rogue, two, notice(1))  # an older one
        for _ in range(2):
            await train(around, one, two)
        for member in (one, two):
            await until(lambda m=member: m.report.state == "paused", "the pause")
            assert member.course.tokens == second
            assert member.report.status(0.0).course.rate_factor == 0.5
        gone = await around.member("gone", trained=False)  # who was away hears of it by who is here
        await until(lambda: gone.report.state == "paused", "the pause, there too")
        assert gone.learner.course.amendments == (slower, pause)
        await around.end(gone, orderly=True)
        await give(rogue, two, notice(3, slower, Amendment(3, second, rate_factor=0.5)))
        for member in (one, two):
            await until(lambda m=member: m.report.state == "training", "that it goes on")
        gone = await around.member("gone")  # its own notice says otherwise, to begin with
        await train(around, one, two, gone)
        for fragment in range(4):
            await until(
                lambda f=fragment: one.head(f) == two.head(f) == gone.head(f) is not None, "equal heads"
            )


async def test_a_run_goes_on_where_its_manifest_says_so(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        around.run = short_run(tmp_path, 4 * 256, "go-on")
        one = await around.member("one", genesis=True)
        for _ in range(5):
            await train(around, one)
        await until(lambda: one.records("course"), "that is said")
        assert "at the floor" in one.records("course")[0]["reason"]
        assert one.learner.course.rests == "no"
        assert one.report.state == "training"

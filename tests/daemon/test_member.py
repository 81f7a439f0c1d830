"""One member's life with a scripted learner: disk full, learner dead, leaving, coming back."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from daemon_kit import Neighbourhood, ScriptedLearner, until

from p2pdiloco.adapters.disk.files import Files
from p2pdiloco.adapters.disk.spool import Spool
from p2pdiloco.core.api.events import ContributionSent, Event, LeaveRequested, OfferAnswered
from p2pdiloco.daemon.learner import learner_link
from p2pdiloco.daemon.member import UPDATES_IN_MEMORY
from p2pdiloco.daemon.run_files.resume import FILE
from p2pdiloco.errors import TransportError, UserError
from p2pdiloco.learner import channel_messages as ch


class FullDisk(Files):
    """ENOSPC while `full`."""

    full = False

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(file, data)


async def test_a_round_moves_everybody_to_the_same_bytes(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        for _ in range(3):
            await around.round(one, two)
        await until(lambda: one.head() == two.head(), "equal heads")
        # The tensor worker commits, and the learner hears of it, right after the core's head has moved.
        for member in (one, two):
            await until(lambda m=member: m.compute.vault.version(0) == m.number(), "the commit")
        assert torch.equal(one.compute.vault.theta(0), two.compute.vault.theta(0))
        assert one.head().tokens == 6 * 256  # every token once

        def merged() -> int:
            return sum(isinstance(c, ch.Install) and c.mode == "merged" for c in one.learner.commands)

        await until(lambda: merged() >= 3, "the installs")
        assert merged() == 3


async def test_older_updates_are_given_from_the_disk(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        for _ in range(UPDATES_IN_MEMORY + 2):
            await around.round(one, two)
        assert one._updates.get(0, 1) is None, "no longer in memory"
        await until(lambda: (one._store.folder / "updates/000/1.update").exists(), "its file")
        found = await one.runner.transfers._chain.update_of(0, 1)
        assert found is not None and found[0] == one.core.fragments[0].chain.logged(1)
        assert one.compute.vault.check_payload(0, found[1], found[0].header.codec) is None
        assert await one.runner.transfers._chain.update_of(0, 999) is None


async def test_a_full_disk_costs_an_office_not_a_contribution(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        others = [await around.member("two"), await around.member("three")]
        await around.round(one, *others)
        disk = FullDisk()
        disk.full = True
        one._store._files = disk
        one._store._votes._files = disk
        published = len([e for e in one.records("publish") if "digest" in e])
        # Whoever is in office, it must end with one that can save; nothing that was made is lost.
        await around.round(one, *others)
        await around.round(one, *others)
        assert one.head().tokens == 9 * 256
        assert len([e for e in one.records("publish") if "digest" in e]) == published
        await one.save_fragments()
        assert "not saved" in one.records("checkpoint")[-1]["reason"]
        disk.full = False
        await one.save_fragments()
        assert one.records("checkpoint")[-1]["reason"] == "all fragments are saved"
        await around.round(one, *others)


async def test_of_two_members_one_with_a_full_disk_does_not_stop_the_other(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.round(one, two)
        disk = FullDisk()
        disk.full = True
        two._store._files = disk
        two._store._votes._files = disk
        for _ in range(8):  # more than a term: offices are filled again, by one vote of one
            await around.round(one, two)
        assert one.head().tokens == two.head().tokens == 9 * 2 * 256
        assert [row.votes for row in one.report.snapshot(0.0).peers] == [False]
        disk.full = False
        await until(lambda: two.core.shared.saving.works, "the vote that is tried again")
        await until(lambda: [row.votes for row in one.report.snapshot(0.0).peers] == [True], "the word of it")
        for _ in range(8):
            await around.round(one, two)
        assert len(two.records("disk")) == 2


async def test_a_full_disk_alone_waits_and_goes_on(tmp_path: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        await around.round(one)
        disk = FullDisk()
        disk.full = True
        one._store._files = disk
        one._store._votes._files = disk
        number = one.number()
        one.learner.contribute(0)
        await until(
            lambda: any("could not be saved" in e["reason"] for e in one.records("publish")), "a refused save"
        )
        await until(lambda: len(one.records("election")) > 4, "some tries more")
        told = [r.message for r in caplog.records if "the disk is full" in r.message]
        assert len(told) == 1, "whichever files could not be saved, and however often"
        assert one.number() == number  # nothing that is not durable is announced or applied
        disk.full = False
        await until(lambda: one.number() == number + 1, "the contribution to be merged after all")
        assert one.head().tokens == 2 * 256


async def test_a_dead_learner_starts_again_from_the_vault(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
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
        base = one._exchange.base(0, one.learner.bases[0].buffer)
        await until(lambda: one.learner.bases[0].number == one.number(), "the newest version installed")
        base = one._exchange.base(0, one.learner.bases[0].buffer)
        assert torch.equal(base, one.compute.vault.theta(0))


async def test_leaving_sends_what_there_is_and_comes_back_where_it_was(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.round(one, two)
        await until(lambda: not two.learner.slot_in_use, "a free slot")
        tokens, me = one.head().tokens, two.core.shared.me
        two.learner.contribute(0)  # it is still being encoded when the node is told to leave
        await around.end(two, orderly=True)
        # Merged before it left, and not by a version that went away with it.
        assert one.head().tokens == tokens + 256
        assert [e["peer"] for e in one.records("leave")] == [me]
        note = json.loads((two._store.folder / FILE).read_text())
        assert note["0"]["slot"] is None  # nothing in flight

        await around.round(one)
        again = await around.member("two")
        assert again.core.shared.me == me and again.learner.restored == ("all",) * 4
        assert again.head(1).number == one.head(1).number
        await until(lambda: again.head() == one.head(), "it to catch up")
        await around.round(one, again)


async def test_what_nobody_answered_before_it_left_is_taken_up_again(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.round(one, two)
        await until(lambda: not two.learner.slot_in_use, "a free slot")
        link = (one.core.shared.me, two.core.shared.me)
        around.hub.cut(*link)
        two.learner.contribute(0)
        await until(lambda: not two.core.fragments[0].own.idle, "its encoding")
        await around.end(two, orderly=True)
        note = json.loads((two._store.folder / FILE).read_text())
        assert note["0"]["slot"] is not None, "one was pending"
        around.hub.heal(*link)
        again = await around.member("two")
        assert again.learner.restored == ("all",) * 4


async def left_by_two(around: Neighbourhood) -> Path:
    """The note of a member's orderly end, which another one outlives."""
    one = await around.member("one", genesis=True)
    two = await around.member("two")
    await around.round(one, two)
    await around.end(two, orderly=True)
    return two._store.folder / FILE


async def test_a_learner_that_dies_before_it_contributes_has_used_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Neighbourhood(tmp_path) as around:
        note, start, given = await left_by_two(around), ScriptedLearner.start, list[tuple[str, ...]]()

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
        assert not note.exists(), "before anything of it can go out"
        again.learner.die()
        await until(lambda: len(given) == 4, "the fourth learner")
        assert given[3] == (), "what the third one had is gone with it"


async def test_who_leaves_before_its_learner_made_anything_leaves_what_it_found(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        note = await left_by_two(around)
        left = note.read_bytes()
        again = await around.member("two")
        again.runner.learner._ready = False
        stop = again.learner.stop

        async def ready_only_now(path: Path | None, timeout_s: float) -> int | None:
            again.learner._on_event(ch.Ready("cpu", 1, 1, 0, True))
            return await stop(path, timeout_s)

        again.learner.stop = ready_only_now  # type: ignore[method-assign]
        await around.end(again, orderly=True)
        assert note.read_bytes() == left


async def test_a_process_started_ahead_that_dies_is_replaced_when_it_is_needed(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.end(two)
        around.hub.cut(one.core.shared.me, two.core.shared.me)
        waiting = await around.member("two", trained=False)
        await until(lambda: waiting.learner.running, "the process")
        restarts, restart = list[float](), waiting.runner.learner._restart
        waiting.runner.learner._restart = lambda pause_s: (restarts.append(pause_s), restart(pause_s))[1]  # type: ignore[method-assign]
        waiting.learner.die()
        assert not restarts, "it would begin before the versions are confirmed, and twice"
        around.hub.heal(one.core.shared.me, two.core.shared.me)
        await until(lambda: waiting.report.state == "training", "its training")
        assert waiting.learner.bases


async def test_three_learners_in_a_row_that_make_no_step_end_the_node_with_their_hint(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        link, restart = one.runner.learner, one.runner.learner._restart
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
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        await around.round(one)
        bases = one.learner.bases
        await until(lambda: "nothing has been heard of the learner for 60 s" in caplog.text, "a warning")
        await until(lambda: "it hung: nothing was heard of it for 600 s" in caplog.text, "its end")
        await until(lambda: one.learner.running and one.learner.bases is not bases, "another one")


async def test_a_note_that_cannot_be_removed_ends_the_node_and_nothing_goes_out(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        note = await left_by_two(around)
        again = await around.member("two")
        note.unlink()
        note.mkdir()
        tickets = len(again.tickets)
        again.learner.contribute(0)
        again.runner.learner.save()
        fatal = again.runner.learner.fatal
        assert isinstance(fatal.exception(), UserError) and len(again.tickets) == tickets
        assert not any(isinstance(command, ch.Save) for command in again.learner.commands)
        note.rmdir()


async def test_the_core_hears_that_a_payload_is_about_to_be_whole_before_it_hears_an_answer(
    tmp_path: Path,
) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.round(one, two)
        await until(lambda: not two.learner.slot_in_use, "a free slot")
        heard: list[type] = []
        transfers, post = two.runner.transfers, two.runner.transfers._post

        def listen(event: Event) -> None:
            heard.append(type(event))
            post(event)

        transfers._post = listen
        while OfferAnswered not in heard:  # on a busy machine the contributor may be the syncer itself
            await until(lambda: not two.learner.slot_in_use, "a free slot")
            tokens = one.head().tokens
            two.learner.contribute(0)
            await until(lambda tokens=tokens: one.head().tokens > tokens, "its merge")
        assert heard.index(ContributionSent) < heard.index(OfferAnswered)


async def test_nothing_is_on_its_way_any_more_when_it_is_noted_what_is_left(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        own, under_way = one.core.fragments[0].own, []
        noted = own.unmerged
        own.unmerged = lambda: (under_way.append(len(one.runner._offers)), noted())[1]  # type: ignore[method-assign]

        async def endless() -> None:
            await asyncio.Event().wait()

        one.runner._up(endless())
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
        one.memory.room = lambda size: False  # type: ignore[method-assign]
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
        await one.close()
        chunk.set()
        with pytest.raises(TransportError):
            await pushing
        assert not bugs


async def test_what_was_merged_at_the_very_end_is_not_saved_as_unmerged(tmp_path: Path) -> None:
    """The last version comes while the learner is in an inner step: it is told before it saves."""
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
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
        assert (two._store.folder / FILE).exists()


async def test_while_leaving_nothing_new_is_taken_in(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.round(one, two)
        two.runner.post(LeaveRequested())
        await until(two.runner.left.done, "it to have left")  # in far less than its whole patience
        assert "nothing was pending" in two.records("leave")[-1]["reason"]
        tickets = len(two.tickets)
        two.learner.contribute(0)  # the learner does not know yet
        await until(lambda: len(two.tickets) == tickets, "the late copy to be let go")
        assert two.core.fragments[0].own.idle


async def test_a_learner_that_could_not_save_leaves_no_note(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        await around.round(one)
        one.learner.save_works = False
        await around.end(one, orderly=True)
        assert not (one._store.folder / FILE).exists()


async def test_a_node_that_never_trained_leaves_the_note_of_its_last_life(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.round(one, two)
        await around.end(two, orderly=True)
        note = (two._store.folder / FILE).read_bytes()
        around.hub.cut(one.core.shared.me, two.core.shared.me)
        impatient = await around.member("two", trained=False)
        await around.end(impatient, orderly=True)
        assert (two._store.folder / FILE).read_bytes() == note


async def test_alone_it_goes_on_from_what_it_saved_after_a_while(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
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
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        for _ in range(4):
            await around.round(one)
        head, steps = one.head(), one.core.fragments[0].chain.header.longest_steps()
        assert 0 < steps < around.run.manifest.sync.inner_steps
        await until(lambda: (one._store.folder / f"updates/000/{head.number}.update").exists(), "its file")
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
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        await around.round(one)
        link = one.runner.learner
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
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.round(one, two)
        await until(lambda: one.head() == two.head(), "equal heads")
        link, sent = one.runner.learner, len(one.learner.commands)
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

"""Leaving of a member: what it hands over, saves and notes, and takes up again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from daemon_kit import Neighbourhood, until
from scripted_learner import ScriptedLearner

from p2pdiloco.adapters.spool import Spool
from p2pdiloco.core.api.events import LeaveRequested
from p2pdiloco.daemon.run_files.saved_state import FILE
from p2pdiloco.errors import TransportError, UserError
from p2pdiloco.learner import channel as ch


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
        note = json.loads((two.store.folder / FILE).read_text())
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


async def left_by_two(around: Neighbourhood) -> Path:
    """The note of a member's orderly end, which another one outlives."""
    one = await around.member("one", genesis=True)
    two = await around.member("two")
    await around.round(one, two)
    await around.end(two, orderly=True)
    return two.store.folder / FILE


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
        await until(lambda: not note.exists(), "the note to go, before anything of it can go out")
        again.learner.die()
        await until(lambda: len(given) == 4, "the fourth learner")
        assert given[3] == (), "what the third one had is gone with it"


async def test_who_leaves_before_its_learner_made_anything_leaves_what_it_found(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        note = await left_by_two(around)
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
    async with Neighbourhood(tmp_path) as around:
        note = await left_by_two(around)
        again = await around.member("two")
        note.unlink()
        note.mkdir()
        tickets = len(again.holdings.tickets)
        again.learner.contribute(0)
        await again.learner_link.save()
        fatal = again.learner_link.fatal
        assert isinstance(fatal.exception(), UserError) and len(again.holdings.tickets) == tickets
        assert not any(isinstance(command, ch.Save) for command in again.learner.commands)
        note.rmdir()


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
        assert (two.store.folder / FILE).exists()


async def test_while_leaving_nothing_new_is_taken_in(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.round(one, two)
        two.post.put(LeaveRequested())
        await until(two.runner.departure.done, "it to have left")  # in far less than its whole patience
        assert "nothing was pending" in two.records("leave")[-1]["reason"]
        tickets = len(two.holdings.tickets)
        two.learner.contribute(0)  # the learner does not know yet
        await until(lambda: len(two.holdings.tickets) == tickets, "the late copy to be let go")
        assert two.core.fragments[0].own.idle


async def test_a_learner_that_could_not_save_leaves_no_note(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        await around.round(one)
        one.learner.save_works = False
        await around.end(one, orderly=True)
        assert not (one.store.folder / FILE).exists()


async def test_a_node_that_never_trained_leaves_the_note_of_its_last_life(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.round(one, two)
        await around.end(two, orderly=True)
        note = (two.store.folder / FILE).read_bytes()
        around.hub.cut(one.core.shared.me, two.core.shared.me)
        impatient = await around.member("two", trained=False)
        await around.end(impatient, orderly=True)
        assert (two.store.folder / FILE).read_bytes() == note

"""One member's life with a scripted learner: rounds, a dead learner, going on alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from daemon_kit import Neighbourhood, until

from p2pdiloco.cli.top import HeardReport, picture_of
from p2pdiloco.core.api.events import ContributionSent, Event, OfferAnswered
from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.daemon import learner_link
from p2pdiloco.errors import UserError
from p2pdiloco.learner import channel as ch


async def test_a_round_moves_everybody_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        seen = one.report.snapshot(0.0)
        shares = [seen.weighs, *(row.weighs for row in seen.peers)]
        assert shares == [1.0, 1.0], "of two none weighs less"
        assert [row.expelled for row in seen.peers] == [None]
        audits = one.core.shared.loss_audits
        monkeypatch.setattr(audits, "finding", {two.core.shared.me: LossFinding.NOTHING}.get)
        assert [row.expelled for row in one.report.snapshot(0.0).peers] == [LossFinding.NOTHING]

        def merged() -> int:
            return sum(isinstance(c, ch.Install) and c.mode == "merged" for c in one.learner.commands)

        await until(lambda: merged() >= 3, "the installs")
        assert merged() == 3


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
        base = one.holdings.exchange.base(0, one.learner.bases[0].buffer)
        await until(lambda: one.learner.bases[0].number == one.number(), "the newest version installed")
        base = one.holdings.exchange.base(0, one.learner.bases[0].buffer)
        assert torch.equal(base, one.compute.vault.theta(0))


async def test_a_process_started_ahead_that_dies_is_replaced_when_it_is_needed(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
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
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
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
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        await around.round(one)
        bases = one.learner.bases
        await until(lambda: "nothing has been heard of the learner for 60 s" in caplog.text, "a warning")
        await until(lambda: "it hung: nothing was heard of it for 600 s" in caplog.text, "its end")
        await until(lambda: one.learner.running and one.learner.bases is not bases, "another one")


async def test_the_core_hears_that_a_payload_is_about_to_be_whole_before_it_hears_an_answer(
    tmp_path: Path,
) -> None:
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.round(one, two)
        await until(lambda: not two.learner.slot_in_use, "a free slot")
        heard: list[type] = []
        transfers, post = two.transfers, two.transfers._post

        def listen(event: Event) -> None:
            heard.append(type(event))
            post(event)

        transfers._post = listen
        for _ in range(20 * around.run.manifest.group.term_versions):
            if OfferAnswered in heard:  # the contributor may be the syncer itself
                break
            await around.round(one, two)  # both, so that both vote, and the office goes round
        assert heard.index(ContributionSent) < heard.index(OfferAnswered)


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
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
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
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
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
    async with Neighbourhood(tmp_path) as around:
        one = await around.member("one", genesis=True)
        await around.round(one, fragment=1)
        told = one.report.status(0.0)
        assert told.run_tokens == told.course.tokens == 256 // 4, "the mean over fragments"
        picture = picture_of({"one": HeardReport(told, 0.0)}, 0.0)
        assert picture is not None and picture.run_tokens == told.run_tokens

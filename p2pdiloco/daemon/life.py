"""Life of a member: joining, training and its regular work, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal

from p2pdiloco.core.api import events as ev
from p2pdiloco.daemon.display.timeline import save_timeline
from p2pdiloco.daemon.learner.evaluating import evaluate_regularly
from p2pdiloco.daemon.links.uplink_file import save_uplink
from p2pdiloco.daemon.member import Member
from p2pdiloco.daemon.run_files.result_files import ResultPlan, ResultWriter
from p2pdiloco.daemon.run_files.resume import Resume, write_resume
from p2pdiloco.daemon.run_files.tokenizers import kept_tokenizer
from p2pdiloco.learner.lifeline import save_takes_s
from p2pdiloco.util import daemon_niceness, lower_session, lower_thread, patiently

logger = logging.getLogger(__name__)
FLUSH_S = 0.5
SAY_EVERY_S = 10
COURSE_EVERY_S = 1.0
SAY_ALONE_S, SAY_WAITING_S = 3, 5
"""Seconds out of each `SAY_EVERY_S` at which it is said that nobody is here, and what is waited for."""


class Life:
    """Life of one member, from its start to its end."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._loop = asyncio.get_running_loop()
        self._results: ResultWriter | None = None
        self._save_s = save_takes_s(sum(layout.numel for layout in member.run.layouts))

    async def run(self) -> None:
        """Join, catch up, train, until cancelled or broken. Raises what broke us."""
        member = self._member
        await member.merging.examine()
        await member.ask_joined()
        self._begin_presence()
        await member.learner_link.prepare()
        self._watch_guest()
        member.report.enter("waiting")
        waiting = member.background.spawn(self._say_waiting())
        ready = {member.runner.confirmed, member.background.broken}
        await asyncio.wait(ready, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if member.background.broken.done():
            member.background.broken.result()
        member.course.look(self._loop.time())
        await member.learner_link.start(Resume(member.holdings.store.folder, member.core))
        member.report.enter("training")
        member.diary.write("join", "training")
        self._begin_regular_work()
        ends = {member.background.broken, member.learner_link.fatal}
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()

    @property
    def ends_in_s(self) -> float:
        """Time that the learner may take to listen, and all that is saved to be written."""
        return self._save_s + self._member.learner_link.listens_in_s

    async def leave(self) -> None:
        """Finish what is in flight, say good-bye, save. Bounded by its parts to about 6 s and `ends_in_s`."""
        member = self._member
        member.report.enter("leaving")
        broken = member.background.broken
        in_order = not broken.done()
        if in_order:
            member.learner_link.take_part(1)
            member.post.put(ev.LeaveRequested())
            patience_s = member.core.shared.timing.leave_s + 0.5
            ends = {member.runner.departure, broken}
            await asyncio.wait(ends, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            await member.outbound.flush(FLUSH_S)
        await member.runner.end_offers()
        left = {fragment.index: fragment.own.unmerged() for fragment in member.core.fragments}
        last = self._save_last_result() if in_order else asyncio.sleep(0)
        saved, *_ = await asyncio.gather(member.learner_link.stop(self._save_s), self.save(), last)
        if saved:
            write_resume(member.holdings.store.folder, left)
        member.diary.close("left")

    async def _save_last_result(self) -> None:
        """Write a result of what was merged since the last one, as long as the learner's state may take."""
        if self._results is None:
            return
        try:
            async with asyncio.timeout(self._save_s):
                await self._results.save_last()
        except TimeoutError:
            self._on_result(f"result not saved: not within {self._save_s:.0f} s", False)

    async def close(self) -> None:
        """Let go of everything; after `leave`, or after we broke."""
        member = self._member
        member.peer.door.leave()
        await member.peer.transport.end_incoming()  # the threads that they need end below
        if member.learner_link.pid is not None:
            await member.learner_link.stop(0.1)
        member.learner_link.close()
        await member.membership.close()
        member.outbound.close()
        member.runner.close()
        await member.background.close()
        if member.keeper is not None:
            member.keeper.close()
        member.holdings.close()

    # --- before it trains ----------------------------------------------------------------------------

    def _begin_presence(self) -> None:
        """Let others find us, and look for them."""
        member, spawn = self._member, self._member.background.spawn
        spawn(self._watch_p2pd())
        if member.peer.reach is not None:
            spawn(member.peer.reach.watch(lambda reach: member.post.put(ev.ReachChanged(reach))))
        spawn(member.membership.watch())
        spawn(member.holdings.durable.sync_regularly())
        spawn(member.presence.publish())
        spawn(member.link_teller.tell_regularly())
        spawn(member.sharing.publish())
        spawn(member.sharing.watch())
        spawn(member.presence.watch(lambda: member.core.confirmed))
        if member.keeper is not None:
            spawn(member.keeper.watch(member.history_filling))

    async def _say_waiting(self) -> None:
        """Tell a person every second what is new, and now and then what we wait for."""
        member = self._member
        for second in itertools.count():
            now = self._loop.time()
            members = member.core.shared.view.members(now)
            if members and member.report.state == "waiting":
                member.report.enter("catching up")
                logger.info("catching up from %(peers)d peers", {"peers": len(members)})
            if members and second % SAY_EVERY_S == SAY_WAITING_S:
                logger.info("waiting for %s", member.core.waits_for(now))
            elif not members and second % SAY_EVERY_S == SAY_ALONE_S:
                self._say_alone()
            await asyncio.sleep(1)

    def _say_alone(self) -> None:
        if self._member.settings.genesis:
            logger.info("listening for members before starting the run")
        else:
            logger.info(
                "waiting: no member of run %s can be reached yet (to start it from version 0: --genesis)",
                self._member.run.name,
            )

    def _watch_guest(self) -> None:
        settings = self._member.settings
        if settings.learner_socket is not None and settings.learner_wait_s:
            self._member.background.spawn(self._leave_without_guest(settings.learner_wait_s))

    async def _leave_without_guest(self, wait_s: float) -> None:
        """Leave as if the node had been told to, when its training program is gone for good."""
        await self._member.learner_link.left_alone(wait_s)
        logger.warning("no training program for %(waited_s)g s: leaving", {"waited_s": wait_s})
        signal.raise_signal(signal.SIGTERM)

    # --- while it trains -----------------------------------------------------------------------------

    def _begin_regular_work(self) -> None:
        member, spawn = self._member, self._member.background.spawn
        spawn(self._step_back())
        spawn(self._follow_course())
        committed = member.committing.done
        spawn(evaluate_regularly(member.measurements, member.learner_link, member.core, committed))
        spawn(self._save_regularly())
        plan = ResultPlan.of(member.settings)
        if plan is not None:
            held = member.holdings
            tokenizer = kept_tokenizer(member.settings.data_dir, member.run.id)
            self._results = ResultWriter(
                member.run, held.compute, held.results_io, plan, tokenizer, self._on_result
            )
            spawn(self._results.watch(committed))

    async def _follow_course(self) -> None:
        """Look where the run is with every version; save when it rests."""
        member = self._member
        committed, course = member.committing.done, member.course
        while True:
            now = self._loop.time()
            course.look(now)
            self._look_back()
            if member.report.state != "leaving":
                member.report.enter("training" if course.rests == "no" else course.rests)
            if course.settles(now):
                await member.learner_link.save()
                await self.save()
                if self._results is not None:
                    await self._results.save_last()
                logger.info("all is merged and saved")
            committed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COURSE_EVERY_S):
                    await committed.wait()

    def _look_back(self) -> None:
        """Remember what has come since the last look."""
        member = self._member
        timeline, newest = member.diary.timeline, member.measurements.newest
        timeline.look(fragment.chain.header for fragment in member.core.fragments)
        if newest is not None:
            timeline.measured(newest, newest.loss, member.course.tokens)

    async def _step_back(self) -> None:
        """Step back behind the learner and everybody else on this machine: rounds can wait, and we have
        caught up.

        The event loop, which answers others, stays first in our session.
        """
        member = self._member
        await member.learner_link.ready.wait()
        niceness = daemon_niceness(member.learner_link.device, member.settings.daemon_nice)
        await member.holdings.compute.run(lower_thread, niceness)
        await self._loop.run_in_executor(member.holdings.results_io, lower_thread, niceness)
        await member.peer.transport.step_back(niceness)
        if not await patiently(lower_session, os.getpid(), niceness):
            logger.warning("the system does not let this node's session step back for others")

    async def _watch_p2pd(self) -> None:
        transport = self._member.peer.transport
        while True:
            await transport.restarted.wait()
            transport.restarted.clear()
            self._member.diary.write("p2pd", "died and was started again", restarts=transport.restarts)

    def _on_result(self, words: str, saved: bool) -> None:
        self._member.diary.say(logging.INFO if saved else logging.ERROR, "checkpoint", words)

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._member.settings.checkpoint_every_s)
            await self._member.learner_link.save()
            await self.save()

    async def save(self) -> None:
        """Write what the next start goes on from."""
        member = self._member
        save_uplink(member.settings.data_dir, member.meters.uplink.measured_bits_per_s)
        save_timeline(member.holdings.store.folder, member.diary.timeline)
        await member.checkpoints.save()

"""Member of a run: the parts between an open transport and a training learner.

`Member` makes and owns them, `Life` runs them from joining to an orderly end, `RunHoldings` are its files and
what of them is in memory from the start. `Approval` shows a person what a run takes before anything is made
of it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from p2pdiloco.adapters.data_dir import EventsLog
from p2pdiloco.adapters.run_store import KeptFiles, RunStore
from p2pdiloco.adapters.spool import Spool
from p2pdiloco.config.manifest import BYTES, DataSection, Manifest
from p2pdiloco.config.settings import NodeSettings, rates
from p2pdiloco.config.values import parse_size, size_text
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.config import Amendment, Restored, Timing
from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.node import Core
from p2pdiloco.core.proofs import telling
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.admission import Membership, check_owner
from p2pdiloco.daemon.budgets import Background, LinkCapacity, free_disk_bytes, free_memory_bytes
from p2pdiloco.daemon.bulk.merge_audits import LossAuditing
from p2pdiloco.daemon.bulk.pushes import OwnChain
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.daemon.course import FIRST_EVALUATION_S, Measurements, RunCourse, Turns, evaluate_regularly
from p2pdiloco.daemon.diary import Diary, LearnerDiary
from p2pdiloco.daemon.display.logs import RecentLines
from p2pdiloco.daemon.display.snapshot import count
from p2pdiloco.daemon.display.timeline import load_timeline, save_timeline
from p2pdiloco.daemon.driver import Committing, Executors, Merging, Outbound, Post, Runner
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.history import Filling, HistoryDoor, HistoryKeeper, pull_page
from p2pdiloco.daemon.learner_host import GuestHost, LearnerHost, OnEvent
from p2pdiloco.daemon.learner_link import LearnerLink
from p2pdiloco.daemon.network.discovery import OurRecord, Presence, Sharing
from p2pdiloco.daemon.network.holes import Holes
from p2pdiloco.daemon.network.link import (
    LinkMeters,
    LinkTeller,
    LinkWatch,
    control_doubts,
    load_uplink,
    save_uplink,
)
from p2pdiloco.daemon.network.reach import Reachability
from p2pdiloco.daemon.network.router import Router
from p2pdiloco.daemon.payloads import (
    IN_MEMORY_BYTES,
    Compute,
    Durable,
    KeptPayloads,
    Memory,
    Tickets,
    UpdateLog,
    check_budget,
)
from p2pdiloco.daemon.report import Report
from p2pdiloco.daemon.run_files.footprint import (
    DAEMON_BYTES,
    LEARNER_BYTES,
    UPDATES_IN_MEMORY,
    Footprint,
    footprint_of,
)
from p2pdiloco.daemon.run_files.known_runs import PublishedRun, WaysIn, change_ways, note_ways, peers_of
from p2pdiloco.daemon.run_files.run import Run, core_config, genesis_versions, save_run
from p2pdiloco.daemon.run_files.saved_state import (
    Checkpoints,
    ResultPlan,
    ResultWriter,
    Resume,
    restore,
    write_resume,
)
from p2pdiloco.daemon.run_files.shared_files import kept_initial, kept_tokenizer
from p2pdiloco.daemon.trying import Trying
from p2pdiloco.errors import StorageError, UserError, clean
from p2pdiloco.identity import Identity
from p2pdiloco.learner.channel import LearnerOptions
from p2pdiloco.learner.lifeline import save_takes_s
from p2pdiloco.learner.ranks import accelerators
from p2pdiloco.ports import Transport
from p2pdiloco.priority import daemon_niceness, lower_session, lower_thread, patiently
from p2pdiloco.tensors.layout import Exchange
from p2pdiloco.tensors.vault import Vault
from p2pdiloco.util import Frozen, loop_s

logger = logging.getLogger(__name__)
MAX_KEEPERS_ASKED = 16
"""Members that are asked at one go for what is missing of the history."""
ASK_JOINED_S = 4.0
"""Longest wait for the peers of the join line, before others are looked for."""


class OwnPeer(Frozen):
    """Peer that this node is, before it is a member of anything."""

    identity: Identity
    transport: Transport
    door: FrontDoor
    """Front door that answers peers; the transport is open already."""
    reach: Reachability | None = None
    """Reachability of this node: whether others can dial it, and what to look at again; None: they can."""
    router: Router | None = None
    holes: Holes | None = None


class Member:
    """Parts of one node in one run, each made of those above it."""

    def __init__(
        self,
        peer: OwnPeer,
        run: Run,
        vault: Vault,
        settings: NodeSettings,
        recent: RecentLines,
        timing: Timing,
    ) -> None:
        self.peer, self.run, self.settings = peer, run, settings
        self._me, self._data_dir = peer.identity.peer_id, settings.data_dir
        self.holdings = RunHoldings(run, vault, settings, timing)
        self.post, self.background = Post(), Background()
        self._make_core()
        self._admit()
        self._anchors: tuple[str, ...] = ()
        self._guide()
        peer.transport.introduce_by(self.membership.introductions.again)
        self._look_for_others()
        timeline = load_timeline(self.holdings.store.folder)
        names, events = self.presence.names, self.holdings.events
        self.diary = Diary(self._me, settings.name, names, events, recent, timeline)
        for problem in self.holdings.found.problems:
            self.diary.write("checkpoint", problem)
        self._measure_the_link()
        self._open_streams()
        self._make_learner()
        self._keep_history()
        self._carry_out_effects()
        self._keep_and_show()
        if peer.reach is not None:
            peer.reach.believe(self._counts)
            self.post.put(ev.ReachChanged(peer.reach.reach))
        peer.door.add_run(run, self._data_dir)
        given = HistoryDoor(run.id, self._log_of, self.keeper)
        peer.door.enter(run.id, self.transfers, self.report, self.membership.gate, given, self.post.put)

    def _make_core(self) -> None:
        held, restored = self.holdings, self.holdings.found.restored
        self._incarnation = next_incarnation(restored, self._me)
        rng, now = random.Random(f"{self._me}/{self._incarnation}"), loop_s()
        crypto, genesis = self.peer.identity, self.settings.genesis
        self.core = Core(held.config, self._me, self._incarnation, crypto, rng, restored, genesis, now)

    async def ask_joined(self) -> None:
        """Ask the peers of the join line whether they are members, and for the owner's notice: whoever has
        nothing goes by that."""
        if not self.core.came_with_run:
            joined = peers_of(self.settings.join)
            self._anchors = await self.membership.introductions.members_of(joined, ASK_JOINED_S)
            self._guide()

    def _keep_history(self) -> None:
        self.keeper: HistoryKeeper | None = None
        """Keeper of the run's history, if this node keeps it."""
        if self.settings.keep_history:
            folder = self.holdings.store.folder / "history"
            self.keeper = HistoryKeeper(self.run.id, len(self.run.layouts), folder, self.presence.names)
            for fragment in self.core.fragments:
                self.keeper.begin(fragment.chain.logged_all())

    def history_filling(self) -> Filling:
        """Ask for what is missing of the history: of members, in any order."""
        members = self.core.shared.view.confirmed(loop_s())
        others = [peer for peer in members if peer != self._me]
        random.shuffle(others)
        return Filling(self.run.id, partial(pull_page, self.peer.transport), others[:MAX_KEEPERS_ASKED])

    def _log_of(self, fragment: int) -> tuple[SignedVersion, ...]:
        fragments = self.core.fragments
        return fragments[fragment].chain.logged_all() if 0 <= fragment < len(fragments) else ()

    def _guide(self) -> None:
        register = self.membership.register
        vouches, words = (notice.vouch, notice.seats) if (notice := register.notice) is not None else ((), ())
        self.post.put(ev.Guided(self._anchors, vouches, (*words, *register.admissions)))

    def _counts(self, peer: str) -> bool:
        """Tell whether to listen to what a peer says of the world: it is not banned, and has a seat."""
        return self.membership.introductions.admits(peer) and self.core.shared.has_seat(peer)

    def _on_proof(self, peer: str, proof: Evidence) -> None:
        """Take in the evidence for which a peer excludes us."""
        self.post.put(ev.MessageReceived(peer, telling(proof)))

    def _admit(self) -> None:
        self.membership = Membership(
            self.peer.transport,
            self.run,
            self._data_dir,
            worked=self.core.shared.has_mark,
            settled=lambda: self.core.confirmed,
            on_news=self._guide,
            proof_of=self.core.shared.excluded.proof_of,
            has_seat=lambda peer: any(peer in part.context.roster.seats for part in self.core.fragments),
            proven=self._on_proof,
        )

    def _look_for_others(self) -> None:
        run, settings, group = self.run, self.settings, self.run.manifest.group
        transport, vault = self.peer.transport, self.holdings.compute.vault
        self.outbound = Outbound(transport, partial(wire.message, run.id), self.post.put)
        turns = Turns(run.id, self._me, settings.eval_every_s, FIRST_EVALUATION_S, group.term_versions)
        alone = settings.evaluate == "each"
        self.measurements = Measurements(turns, vault, group.log_versions, alone, self._counts)
        shared, keeps = self.core.shared, settings.keep_history
        ours = OurRecord(self._incarnation, settings.name, shared, self.measurements, keeps)
        self.presence = Presence(
            transport,
            run.id,
            ours,
            self.post.put,
            keep=partial(note_ways, self._data_dir, WaysIn.having_met),
            dial_at_once=group.size,
            guests=self.membership.introductions,
            has_worked=shared.takes_part,
        )

    def _measure_the_link(self) -> None:
        upload, download = rates(self.settings)
        limits = LinkCapacity(upload or math.inf, download or math.inf)
        for doubt in control_doubts(self.run.manifest, limits):
            logger.warning("%s", doubt)
        self.meters = LinkMeters(self.peer.transport, limits, load_uplink(self._data_dir))
        self.link_watch = LinkWatch(self.run.manifest, self.run.layouts, self.meters)

    def _open_streams(self) -> None:
        held, transport, post = self.holdings, self.peer.transport, self.post.put
        in_memory_bytes = 0 if held.memory_is_bounded else IN_MEMORY_BYTES
        self.kept = KeptPayloads(held.kept, held.tickets, held.compute, held.disk_io, in_memory_bytes)
        self.chain = OwnChain(self.core, self.run.layouts, held.updates, held.store, held.disk_io, self.kept)
        self.transfers = Transfers(
            self.chain, transport, held.compute, held.tickets, post, self.meters, held.memory, held.spool
        )
        held.memory.count(held.tickets, held.updates, self.transfers)
        held.memory.give_way_by(self.transfers.merged)
        held.memory.give_way_by(self.transfers.true_updates)

    def _make_learner(self) -> None:
        held = self.holdings
        self.learner_diary = LearnerDiary(self.diary, self.measurements, self.transfers.counters)
        self.learner_link = LearnerLink(
            self._make_host,
            held.compute,
            held.tickets,
            held.store.folder / "learner.safetensors",
            self.post.put,
            self.learner_diary.on_learner,
            self.background.spawn,
            self.core.shared,
        )
        self.sharing = Sharing(self.peer.transport, self.run.id, self.learner_link, self._counts)

    def _make_host(self, on_event: OnEvent) -> LearnerHost:
        run, settings, exchange = self.run, self.settings, self.holdings.exchange
        options = self._learner_options()
        log_path, at = self._data_dir / "learner.log", settings.learner_socket
        if at is None:
            return LearnerHost(run.manifest, run.layouts, exchange, options, on_event, log_path)
        return GuestHost(at, run.manifest, run.layouts, exchange, options, on_event, log_path)

    def _learner_options(self) -> LearnerOptions:
        return learner_options(self.settings, self.run, self._me, self.holdings.store.folder / "data.place")

    def _carry_out_effects(self) -> None:
        held, link, bulk = self.holdings, self.learner_link, self.transfers
        compute, tickets, post = held.compute, held.tickets, self.post.put
        self.committing = Committing(
            self._me, compute, tickets, held.updates, held.durable, link, self.keeper
        )
        self.merging = Merging(compute, tickets, post, bulk.merged.keep, bulk.true_updates.correction)
        executors = Executors(
            tickets=tickets,
            outbound=self.outbound,
            transfers=self.transfers,
            learner=link,
            kept=self.kept,
            merging=self.merging,
            committing=self.committing,
            durable=held.durable,
            loss_auditing=self._loss_auditing(),
            trying=Trying(
                compute,
                held.store.folder,
                self.run.manifest,
                self._learner_options(),
                self._data_dir / "learner.log",
            ),
            record=self.diary.on_record,
        )
        self.runner = Runner(self.core, self.post, self.background, executors)

    def _loss_auditing(self) -> LossAuditing:
        return LossAuditing(
            self.chain,
            self.holdings.compute,
            self.transfers.auditing,
            self.learner_link.questions,
            self.holdings.store.folder,
            self.run.manifest,
        )

    def _keep_and_show(self) -> None:
        held, run, link = self.holdings, self.run, self.learner_link
        log_versions = run.manifest.group.log_versions
        self.checkpoints = Checkpoints(held.compute, held.store, held.disk_io, log_versions, self.diary)
        self.link_teller = LinkTeller(self.link_watch, self.core.shared, link, self.diary, self.post.put)
        self.course = RunCourse(run.manifest, self.core, self._amendments, link.follow, self._on_course)
        self.report: Report = Report(
            run,
            self.core,
            self.diary,
            link,
            self.learner_diary,
            self.course,
            self.link_watch,
            self.outbound,
            self.transfers,
            self.peer.transport,
            held.memory,
            self.sharing,
            self.peer.router,
            self.peer.reach,
        )

    def _amendments(self) -> tuple[Amendment, ...]:
        notice = self.membership.register.notice
        return notice.amendments if notice is not None else ()

    def _on_course(self, words: str, tokens: int) -> None:
        self.diary.say(logging.INFO, "course", words, tokens=tokens)


FLUSH_S = 0.5
SAY_EVERY_S = 10
COURSE_EVERY_S = 1.0
SAY_ALONE_S, SAY_WAITING_S = 3, 5
"""Seconds out of each `SAY_EVERY_S` at which it is said that nobody is here, and what is waited for."""


class Life:
    """Life of one member: joining, training and its regular work, an orderly end."""

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
        member.course.look(loop_s())
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
        if member.peer.holes is not None:
            spawn(member.peer.holes.watch(lambda: member.presence.hidden))
        if member.keeper is not None:
            spawn(member.keeper.watch(member.history_filling))

    async def _say_waiting(self) -> None:
        member = self._member
        for second in itertools.count():
            now = loop_s()
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
        link = member.learner_link
        spawn(self._step_back())
        spawn(self._follow_course())
        committed = member.committing.done
        spawn(
            evaluate_regularly(
                member.measurements, link.ready, link.questions.evaluate, member.core, committed
            )
        )
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
            now = loop_s()
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
            with suppress(TimeoutError):
                async with asyncio.timeout(COURSE_EVERY_S):
                    await committed.wait()

    def _look_back(self) -> None:
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


class RunHoldings:
    """Files of a node in a run, and what of them is in memory from the start: opens, restores and closes
    all."""

    def __init__(self, run: Run, vault: Vault, settings: NodeSettings, timing: Timing) -> None:
        codecs, data_dir = run.manifest.codec, settings.data_dir
        most_bytes = parse_size(settings.max_memory, "--max-memory")
        self.memory = Memory.of_run(
            most_bytes, run.layouts, codecs.contribution, codecs.update, UPDATES_IN_MEMORY
        )
        self.memory_is_bounded = bool(most_bytes)
        self.store = RunStore(data_dir, run.id)
        save_run(data_dir, run, vault)
        self.events = EventsLog(data_dir / "events.jsonl")
        self.config = core_config(run, genesis_versions(run, vault), timing)
        self.updates = UpdateLog(min(self.config.log_versions, UPDATES_IN_MEMORY))
        self.found = restore(self.config, self.store, vault, self.updates)
        self.exchange = Exchange.create(run.layouts)
        self.compute = Compute(vault, self.exchange)
        self.compute.load(self.found.versions)
        self.disk_io = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self.results_io = ThreadPoolExecutor(1, "results")
        self.tickets = Tickets()
        self.kept = KeptFiles(self.store.folder / "kept")
        self.spool = Spool(self.store.folder)
        self.durable = Durable(self.store, self.tickets, self.disk_io, timing.durable_s)

    def close(self) -> None:
        """End the threads when their jobs are done, and let go of memory and files."""
        self.compute.close()
        self.disk_io.shutdown(wait=True)
        self.results_io.shutdown(wait=True, cancel_futures=True)
        self.spool.close()
        with suppress(StorageError):  # what is left over goes at the next start
            self.kept.clear()
        self.exchange.close()
        self.events.close()


Ask = Callable[[str], Awaitable[bool]]


class Approval:
    """Approval of runs before anything is made of them, by a node's settings, its machine, and a person.

    What a run takes of this machine is shown, compared, and, if somebody sits at the terminal, asked for
    once.
    """

    def __init__(
        self, settings: NodeSettings, say: Callable[[str, Mapping[str, object]], None], ask: Ask | None
    ) -> None:
        """`ask`: asks a person a question; None: there is nobody to ask."""
        self._settings, self._say = settings, say
        self._ask = None if settings.yes else ask
        self._learner_in_memory = _learner_in_memory(settings)

    async def approve(self, run: PublishedRun, is_new: bool) -> None:
        """Show what a run takes, and refuse it. `is_new`: this data folder has not been in it.

        Raises:
            UserError: it takes more than is here or permitted, or is of another owner than the link to it
                says, or the person says no.
            ConfigError: as `footprint_of`.
        """
        check_owner(self._settings, run)
        takes = self._footprint(run.manifest)
        memory, disk = free_memory_bytes(), free_disk_bytes(self._settings.data_dir)
        figures = {
            "memory_bytes": self._memory_bytes(takes),
            "memory_free_bytes": memory,
            "disk_bytes": takes.disk_bytes,
            "disk_free_bytes": disk,
            "download_bytes": takes.download_bytes,
            "parameters": takes.parameters,
            "run_name": run.name,
            "run": run.id,
            "owner": run.signed.owner,
        }
        first, *others = self._lines(run, takes, memory, disk)
        self._say(first, figures)
        for line in others:
            self._say(line, {})
        self._check_limits(run.manifest, takes)
        # Later, what is not free may be its own files, or memory of an earlier life that is ending.
        if is_new:
            self._check_machine(run.manifest, takes, memory, disk)
        if is_new and self._ask is not None and not await self._ask(f"join run {run.title}?"):
            raise UserError(f"run {run.name} is not joined", "--yes joins without a question")

    async def remember(self, run: str) -> None:
        """Remember a run as joined, with what this start was given. Raises: StorageError."""
        settings = self._settings
        await asyncio.to_thread(change_ways, settings.data_dir, WaysIn.joined, settings, run)

    def describe(self, run: PublishedRun) -> list[str]:
        """Say in lines what a run is and takes. Raises: ConfigError: as `footprint_of`."""
        takes = self._footprint(run.manifest)
        return self._lines(run, takes, free_memory_bytes(), free_disk_bytes(self._settings.data_dir))

    def check(self, manifest: Manifest) -> None:
        """Check that a run of our own fits this machine and the settings. Raises: as `approve`."""
        takes = self._footprint(manifest)
        self._check_limits(manifest, takes)
        disk = free_disk_bytes(self._settings.data_dir)
        self._check_machine(manifest, takes, free_memory_bytes(), disk)

    def _footprint(self, manifest: Manifest) -> Footprint:
        return footprint_of(manifest, self._settings.micro_batch_tokens)

    def _memory_bytes(self, takes: Footprint) -> int:
        learner = takes.learner_bytes + takes.pass_bytes if self._learner_in_memory else 0
        return takes.daemon_bytes + learner + self._loss_audit_bytes(takes) + takes.payload_bytes

    def _loss_audit_bytes(self, takes: Footprint) -> int:
        """Memory of loss audits, which programs of one's own do not make."""
        return takes.loss_audit_bytes if self._settings.learner_socket is None else 0

    @property
    def _programs_bytes(self) -> int:
        own = self._settings.learner_socket is None
        return DAEMON_BYTES + (LEARNER_BYTES if own else 0)

    def _check_limits(self, manifest: Manifest, takes: Footprint) -> None:
        """Check the person's limits. Raises: UserError."""
        check_budget(parse_size(self._settings.max_memory, "--max-memory"), takes.payload_bytes)
        most = parse_size(self._settings.max_disk, "--max-disk")
        if most and takes.disk_bytes > most:
            raise UserError(
                f"run {manifest.run.name} takes {size_text(takes.disk_bytes)} of disk, and --max-disk is "
                f"{size_text(most)}",
                "raise it, or join a run of a smaller model",
            )

    def _check_machine(self, manifest: Manifest, takes: Footprint, memory: int, disk: int) -> None:
        needed = self._memory_bytes(takes)
        beyond = [
            f"{size_text(wanted)} of {what}, of which {size_text(free)} are free"
            for what, wanted, free in (("memory", needed, memory), ("disk", takes.disk_bytes, disk))
            if wanted > free
        ]
        if beyond:
            raise UserError(
                f"run {manifest.run.name} takes more than this machine has: at least {' and '.join(beyond)}",
                "close other programs, raise a container's limit, or choose another disk with --data-dir",
            )

    def _lines(self, run: PublishedRun, takes: Footprint, memory: int, disk: int) -> list[str]:
        manifest, settings = run.manifest, self._settings
        if settings.learner_socket is not None:
            learner = "the learner is a program of its own"
        else:
            where = "" if self._learner_in_memory else " on its device"
            once = size_text(takes.pass_bytes) if takes.pass_bytes else "unknown memory"
            learner = f"learner {size_text(takes.learner_bytes)} and {once} for a pass{where}"
        audits = self._loss_audit_bytes(takes)
        learner += f", loss audits {size_text(audits)}" if audits else ""
        payloads = size_text(takes.payload_bytes)
        budget = f" to {settings.max_memory}" if settings.max_memory else " or more"
        most = f"; --max-disk {settings.max_disk}" if settings.max_disk else ""
        return [
            f"run {run.title} of owner {clean(run.signed.owner)}, task {manifest.run.task}",
            f"model: {count(takes.parameters)} parameters in {takes.tensors} tensors",
            f"memory: at least {size_text(self._memory_bytes(takes))} of {size_text(memory)} that are free: "
            f"daemon {size_text(takes.daemon_bytes)}, {learner}, payloads {payloads}{budget}; beside it "
            f"{size_text(self._programs_bytes)} for the programs themselves",
            f"disk: about {size_text(takes.disk_bytes)} of {size_text(disk)} that are free{most}",
            f"data: {_data_words(manifest.data)}; to download: {_download_words(manifest, takes)}",
        ]


def _learner_in_memory(settings: NodeSettings) -> bool:
    """Tell whether the learner that this node starts takes its memory from the machine's."""
    if settings.learner_socket is not None:
        return False
    kind = settings.device.partition(":")[0]
    return (next(iter(accelerators()), "cpu") if kind == "auto" else kind) in ("cpu", "mps")


def _data_words(data: DataSection) -> str:
    if data.is_each_nodes_own:
        return "your own (--data)"
    if data.source != "hub":
        return "what the task brings along"
    part = " ".join(filter(None, (data.config, data.split, data.revision)))
    return f"streams {data.dataset} ({clean(part)}) from Hugging Face while it trains, unless --data is given"


def _download_words(manifest: Manifest, takes: Footprint) -> str:
    tokenizer = ", a tokenizer file" if manifest.data.tokenizer != BYTES else ""
    return f"{size_text(takes.download_bytes)} of parameters{tokenizer}, from peers"


def next_incarnation(restored: Restored, me: str) -> int:
    """Make the incarnation of this life: milliseconds since 1970, but more than any in a restored chain.

    With the clock set back, our contributions would be taken for ones of an earlier life that are merged
    already.
    """
    marks = (mark for fragment in restored.fragments for mark in fragment.watermarks)
    earlier = max((mark.stamp.incarnation for mark in marks if mark.learner == me), default=0)
    return max(time.time_ns() // 1_000_000, earlier + 1)


COMPILED_CODE = "compiled"
"""Folder in the data folder for what the learner's compiler made: for all runs, and for its next start."""


def learner_options(settings: NodeSettings, run: Run, peer: str, place: Path) -> LearnerOptions:
    """Make the learner's options: what it is told of its node. `place`: file that keeps the place in the
    data."""
    plain = run.manifest.data.tokenizer == BYTES
    return LearnerOptions(
        peer=peer,
        data_path=settings.data,
        tokenizer_path=None if plain else kept_tokenizer(settings.data_dir, run.id),
        initial_path=kept_initial(settings.data_dir, run.id) if run.constants else None,
        place_path=place,
        device=settings.device,
        threads=settings.threads,
        nproc=0 if settings.nproc == "auto" else int(settings.nproc),
        shard=settings.shard,
        precision=settings.precision,
        compile=settings.compile,
        compile_cache=settings.data_dir / COMPILED_CODE,
        micro_batch_tokens=settings.micro_batch_tokens,
        niceness=settings.learner_nice,
    )

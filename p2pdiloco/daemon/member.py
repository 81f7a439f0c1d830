"""A member of a run: everything between an open transport and a training learner, and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from p2pdiloco.adapters.disk.events_log import EventsLog
from p2pdiloco.adapters.disk.kept_files import KeptFiles
from p2pdiloco.adapters.disk.run_store import RunStore
from p2pdiloco.adapters.disk.spool import Spool
from p2pdiloco.config.settings import NodeSettings, rates
from p2pdiloco.config.units import parse_size
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.config import Restored, Timing
from p2pdiloco.core.api.messages import encode as encode_message
from p2pdiloco.core.node import Core
from p2pdiloco.core.uplinks.meter import TELL_EVERY_S
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.chain_view import OwnChain
from p2pdiloco.daemon.bulk.transfers import Transfers
from p2pdiloco.daemon.display.logs import RecentLines
from p2pdiloco.daemon.finding.peers_file import save_peers
from p2pdiloco.daemon.finding.presence import Presence
from p2pdiloco.daemon.finding.reach import Reachability
from p2pdiloco.daemon.finding.sharing import NOT_TOLD, Sharing
from p2pdiloco.daemon.frontdoor import FrontDoor
from p2pdiloco.daemon.learner.evaluating import Turns
from p2pdiloco.daemon.learner.guest import GuestHost
from p2pdiloco.daemon.learner.host import LearnerHost
from p2pdiloco.daemon.learner.learner_link import LearnerLink
from p2pdiloco.daemon.learner.learner_options import learner_options
from p2pdiloco.daemon.links.link import Link
from p2pdiloco.daemon.links.linkplan import control_doubts
from p2pdiloco.daemon.links.linkwatch import LinkWatch
from p2pdiloco.daemon.links.meters import LinkMeters
from p2pdiloco.daemon.links.uplink_file import load_uplink, save_uplink
from p2pdiloco.daemon.outbound import Outbound
from p2pdiloco.daemon.payloads.compute import Compute
from p2pdiloco.daemon.payloads.keeper import IN_MEMORY_BYTES, Keeper
from p2pdiloco.daemon.payloads.memory import OUT_OF_BUDGET, Memory
from p2pdiloco.daemon.payloads.tickets import Tickets
from p2pdiloco.daemon.payloads.update_log import UpdateLog
from p2pdiloco.daemon.report import Report
from p2pdiloco.daemon.run_files.restore import restore
from p2pdiloco.daemon.run_files.result_files import Plan, Results
from p2pdiloco.daemon.run_files.resume import Resume, write_resume
from p2pdiloco.daemon.run_files.runs import Run, core_config, genesis_versions, save_run
from p2pdiloco.daemon.runner import Runner
from p2pdiloco.errors import StorageError
from p2pdiloco.identity import Identity
from p2pdiloco.learner.lifeline import saving_s
from p2pdiloco.ports import Transport
from p2pdiloco.priority import daemon_niceness, lower_session, lower_thread, patiently
from p2pdiloco.tensors.exchange import Exchange
from p2pdiloco.tensors.vault import Vault

logger = logging.getLogger(__name__)
UPDATES_IN_MEMORY = 3
FIRST_EVALUATION_S = 5.0
"""Who has just come back has something better to do: the others wait for its work."""
FLUSH_S = 0.5
GUEST_POLL_S = 0.5
LOOK_FOR_TURN_S = 1.0


class Member:
    """Owns core, vault, learner and store of one node in one run."""

    def __init__(
        self,
        run: Run,
        vault: Vault,
        identity: Identity,
        transport: Transport,
        door: FrontDoor,
        settings: NodeSettings,
        recent: RecentLines,
        timing: Timing,
        reach: Reachability | None = None,
    ) -> None:
        """`reach`: whether others can dial us, and what to look at again; None: they can."""
        self._run = run
        self._reach = reach
        self._settings = settings
        self._transport = transport
        self._door = door
        self._loop = asyncio.get_running_loop()
        codecs, most_bytes = run.manifest.codec, parse_size(settings.max_memory, "--max-memory")
        self.memory = Memory.of_run(
            most_bytes, run.layouts, codecs.contribution, codecs.update, UPDATES_IN_MEMORY
        )
        self._saving_s = saving_s(sum(layout.numel for layout in run.layouts))
        me = identity.peer_id
        self._store = RunStore(settings.data_dir, run.id)
        save_run(settings.data_dir, run, vault)
        self._events = EventsLog(settings.data_dir / "events.jsonl")
        config = core_config(run, genesis_versions(run, vault), timing)
        self._updates = updates = UpdateLog(min(config.log_versions, UPDATES_IN_MEMORY))
        found = restore(config, self._store, vault, updates)
        self._exchange = Exchange.create(run.layouts)
        self.compute = Compute(vault, self._exchange)
        self.compute.load(found.versions)
        self._io = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._results_io = ThreadPoolExecutor(1, "results")
        self.tickets = Tickets()
        incarnation = next_incarnation(found.restored, me)
        self.core = Core(
            config,
            me,
            incarnation,
            identity,
            random.Random(f"{me}/{incarnation}"),
            found.restored,
            settings.genesis,
            self._loop.time(),
        )
        self.report = Report(run, me, settings.name, self._events, recent)
        for problem in found.problems:
            self.report.write("checkpoint", problem)
        self.runner = Runner(
            self.core, self.compute, self.tickets, self._store, updates, self._io, self.report.on_record
        )
        self._kept = KeptFiles(self._store.folder / "kept")
        self._spool = Spool(self._store.folder)
        self.runner.keeper = Keeper(
            self._kept,
            self.tickets,
            self.compute,
            self._io,
            self.runner.post,
            0 if most_bytes else IN_MEMORY_BYTES,
        )
        self._measure_links()
        self._wire_up(config.run, me, incarnation)
        self._jobs: list[asyncio.Task[None]] = []

    def _wire_up(self, run: str, me: str, incarnation: int) -> None:
        core, runner, vault = self.core, self.runner, self.compute.vault
        runner.outbound = Outbound(
            self._transport,
            lambda message: wire.MESSAGE + encode_message(run, message),
            lambda peer: runner.post(ev.SendFailed(peer)),
            lambda peer, reason: logger.debug("%s refused a message: %s", peer, reason),
        )
        chain = OwnChain(core, self._run.layouts, self._updates, self._store, self._io)
        runner.transfers = Transfers(
            chain,
            self._transport,
            self.compute,
            self.tickets,
            runner.post,
            self.meters,
            self.memory,
            self._spool,
        )
        self.memory.count(self.tickets, self._updates, runner.transfers)
        runner.learner = LearnerLink(
            self._host_factory(me),
            self.compute,
            self.tickets,
            len(vault.layouts),
            self._store.folder / "learner.safetensors",
            runner.post,
            self.report.on_learner,
            runner.spawn,
        )
        runner.learner.learners = lambda: core.shared.training(self._loop.time())
        keep = partial(save_peers, self._settings.data_dir)
        name, group_size = self._settings.name, self._run.manifest.group.size
        self.presence = Presence(self._transport, run, incarnation, name, runner.post, keep, group_size)
        self.sharing = Sharing(self._transport, run, runner.learner)
        interval_s, term = self._settings.eval_every_s, self._run.manifest.group.term_versions
        self.turns = Turns(run, me, interval_s, FIRST_EVALUATION_S, term)
        self.presence.result, self.presence.heard = lambda: self.turns.own, self._on_result_heard
        self.report.turns, self.report.evaluated = self.turns, self._on_evaluated
        self.report.core, self.report.learner = core, runner.learner
        self.report.presence = self.presence
        self.report.traffic = lambda: (
            runner.outbound.bytes_sent + runner.transfers.bytes_out,
            runner.transfers.bytes_in,
        )
        self.report.bulk = runner.transfers.counters
        self.report.transport_refusals = self._refusals
        if self._reach is not None:
            self.runner.post(ev.ReachChanged(self._reach.reach))
        self._tell_uplink(1)
        self.presence.reach = lambda: core.shared.reach
        self._door.add_run(self._run, self._settings.data_dir)
        self._door.member = runner.transfers
        self._door.member_run = run
        self._door.status = lambda: self.report.status(self._loop.time())

    def _measure_links(self) -> None:
        limits = Link(*(rate or math.inf for rate in rates(self._settings)))
        manifest, layouts = self._run.manifest, self._run.layouts
        for doubt in control_doubts(manifest, limits):
            logger.warning("%s", doubt)
        self.meters = LinkMeters(self._transport, limits, load_uplink(self._settings.data_dir))
        self.link_watch = LinkWatch(manifest, layouts, self.meters)

    def _host_factory(self, me: str):  # type: ignore[no-untyped-def]
        options = learner_options(self._settings, self._run, me, self._store.folder / "data.place")
        log_path = self._settings.data_dir / "learner.log"
        common = (self._run.manifest, self._run.layouts, self._exchange, options)
        at = self._settings.learner_socket
        if at is not None:
            return lambda on_event: GuestHost(at, *common, on_event, log_path)
        return lambda on_event: LearnerHost(*common, on_event, log_path)

    def _refusals(self) -> dict[str, int]:
        counts = dict(self._transport.refusals)
        if self.memory.refused:
            counts[OUT_OF_BUDGET] = self.memory.refused
        if self.sharing.failures:
            counts[NOT_TOLD] = self.sharing.failures
        return counts

    # --- life ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Join, catch up, train, until cancelled or broken. Raises what broke us."""
        spawn = self.runner.spawn
        spawn(self._watch_p2pd())
        if self._reach is not None:
            spawn(self._reach.watch(lambda reach: self.runner.post(ev.ReachChanged(reach))))
        spawn(self.presence.publish())
        spawn(self._watch_link())
        spawn(self.sharing.publish())
        spawn(self.sharing.watch())
        spawn(self.presence.watch(lambda: self.core.confirmed))
        await self.runner.learner.prepare()
        if self._settings.learner_socket is not None and self._settings.learner_wait_s:
            spawn(self._watch_guest(self._settings.learner_wait_s))
        self.report.state = "waiting"
        waited_s = 0.0
        while not self.core.confirmed:
            await asyncio.sleep(0.05)
            waited_s += 0.05
            self._say_waiting(waited_s)
        await self.runner.learner.start(Resume(self._store.folder, self.core))
        self.report.state = "training"
        self.report.write("join", "training")
        spawn(self._step_back())
        spawn(self._evaluate_regularly())
        spawn(self._save_regularly())
        plan = Plan.of(self._settings)
        if plan is not None:
            spawn(Results(self._run, self.compute, self._results_io, plan, self._on_result).watch())
        done, _ = await asyncio.wait(
            {self.runner.broken, self.runner.learner.fatal}, return_when=asyncio.FIRST_COMPLETED
        )
        for future in done:
            future.result()

    def _say_waiting(self, waited_s: float) -> None:
        if self.runner.broken.done():
            self.runner.broken.result()
        members = self.core.shared.view.members(self._loop.time())
        if members and self.report.state == "waiting":
            self.report.state = "catching up"
            logger.info("catching up from %d peers", len(members))
        if members and abs(waited_s % 10 - 5) < 0.03:
            logger.info("waiting for %s", self.core.waits_for(self._loop.time()))
        elif not members and abs(waited_s % 10 - 3) < 0.03:
            if self._settings.genesis:
                logger.info("listening for members before starting the run")
            else:
                logger.info(
                    "waiting: no member of run %s can be reached yet (to start it from version 0: --genesis)",
                    self._run.name,
                )

    @property
    def ends_in_s(self) -> float:
        """So long the learner may take to listen, and all that is saved to be written."""
        return self._saving_s + self.runner.learner.listens_in_s

    async def leave(self) -> None:
        """Finish what is in flight, say good-bye, save. Bounded by its parts to about 6 s and `ends_in_s`."""
        self.report.state = "leaving"
        if not self.runner.broken.done():
            self.runner.learner.take_part(1)
            self.runner.post(ev.LeaveRequested())
            patience_s = self.core.shared.timing.leave_s + 0.5
            ends = {self.runner.left, self.runner.broken}
            await asyncio.wait(ends, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            await self.runner.outbound.flush(FLUSH_S)
        await self.runner.end_offers()
        left = {fragment.index: fragment.own.unmerged() for fragment in self.core.fragments}
        saved, _ = await asyncio.gather(self.runner.learner.stop(self._saving_s), self.save_fragments())
        if saved:
            write_resume(self._store.folder, left)
        self.report.write("shutdown", "left", dropped=self._events.dropped)

    async def close(self) -> None:
        """Let go of everything; after `leave`, or after we broke."""
        self._door.member, self._door.status = None, None
        await self._transport.end_incoming()  # the threads that they need end below
        if self.runner.learner.pid is not None:
            await self.runner.learner.stop(0.1)
        self.runner.learner.close()
        self.runner.outbound.close()
        await self.runner.close()
        self.compute.close()
        self._io.shutdown(wait=True)
        self._results_io.shutdown(wait=True, cancel_futures=True)
        self._spool.close()
        with contextlib.suppress(StorageError):  # what is left over goes at the next start
            self._kept.clear()
        self._exchange.close()
        self._events.close()

    # --- regular work --------------------------------------------------------------------------------

    async def _evaluate_regularly(self) -> None:
        """When it is our turn (`evaluating.Turns`); alone or with --evaluate each it always is."""
        tag, look_s = 0, min(LOOK_FOR_TURN_S, self._settings.eval_every_s / 4)
        while True:
            await self.runner.learner.ready.wait()
            now = self._loop.time()
            each = self._settings.evaluate == "each"
            learners = () if each else self.core.shared.expected_learners(now)
            if self.turns.mine(now, self.core.fragments[0].chain.head.number, learners):
                self.turns.asked(now)
                self.runner.learner.evaluate(tag)
                tag += 1
            await asyncio.sleep(look_s)

    def _merges(self) -> int:
        return sum(self.compute.vault.version(layout.index) or 0 for layout in self._run.layouts)

    def _on_evaluated(self, loss: float, tokens: int) -> None:
        if math.isfinite(loss):
            self.turns.measured(wire.Result(self._merges(), loss, tokens), self._loop.time())
            self.presence.news.set()

    def _on_result_heard(self, peer: str, result: wire.Result) -> None:
        """What is far ahead of us cannot be true, or not for us: it would silence all results to come."""
        most = self._merges() + len(self._run.layouts) * self._run.manifest.group.log_versions
        if self._settings.evaluate == "turns" and result.merges <= most:
            self.turns.heard(peer, result, self._loop.time())

    async def _watch_guest(self, wait_s: float) -> None:
        """A node whose training program is gone for good leaves as if it had been told to."""
        alone_s = 0.0
        while alone_s < wait_s:
            await asyncio.sleep(GUEST_POLL_S)
            alone_s = 0.0 if self.runner.learner.pid is not None else alone_s + GUEST_POLL_S
        logger.warning("no training program for %g s: leaving", wait_s)
        signal.raise_signal(signal.SIGTERM)

    async def _step_back(self) -> None:
        """Behind the learner and everybody else on this machine: rounds can wait, and now we have caught up.
        The event loop stays first in our session, which answers others."""
        learner = self.runner.learner
        await learner.ready.wait()
        niceness = daemon_niceness(learner.device, self._settings.daemon_nice)
        await self.compute.run(lower_thread, niceness)
        await self._loop.run_in_executor(self._results_io, lower_thread, niceness)
        await self._transport.step_back(niceness)
        if not await patiently(lower_session, os.getpid(), niceness):
            logger.warning("the system does not let this node's session step back for others")

    async def _watch_p2pd(self) -> None:
        restarts = self._transport.restarts
        while True:
            await asyncio.sleep(1)
            if self._transport.restarts != restarts:
                restarts = self._transport.restarts
                self.report.write("p2pd", "died and was started again", restarts=restarts)

    async def _watch_link(self) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            self.judge_link()

    def judge_link(self) -> None:
        """Look whether the link keeps up; what is new is said, and done."""
        watch, learner = self.link_watch, self.runner.learner
        members = len(self.core.shared.view.members(self._loop.time())) + 1
        self._tell_uplink(members)
        status, others_s = learner.status, self.core.shared.median_step_s(self._loop.time())
        step_s = others_s if status is None else status.step_time_s
        if not watch.judge(members, step_s, catching_up=status is None):  # it may never catch up for the link
            return
        learner.take_part(watch.every)
        self.report.link = watch.words
        words = watch.words or "the link keeps up again: contributing to every version"
        logger.log(logging.WARNING if watch.words else logging.INFO, "%s", words)
        up, down = self.meters.link.upload_bits_per_s, self.meters.link.download_bits_per_s
        self.report.write(
            "link",
            words,
            every=watch.every,
            upload_bits_per_s=round(up) if up < math.inf else None,
            download_bits_per_s=round(down) if down < math.inf else None,
        )

    def _tell_uplink(self, members: int) -> None:
        """What our link carries, or is permitted to, decides with others' how often we hold an office."""
        rate = self.link_watch.office_bits_per_s(members)
        if rate != self.core.shared.uplink.bits_per_s:
            self.runner.post(ev.UplinkMeasured(rate))

    def _on_result(self, words: str, saved: bool) -> None:
        logger.log(logging.INFO if saved else logging.ERROR, "%s", words)
        self.report.write("checkpoint", words)

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._settings.checkpoint_every_s)
            self.runner.learner.save()
            await self.save_fragments()

    async def save_fragments(self) -> None:
        """Write every fragment's committed state; a full disk costs this checkpoint only."""
        save_uplink(self._settings.data_dir, self.meters.uplink.measured_bits_per_s)
        for layout in self._run.layouts:
            header, pin = await self.compute.run(self.compute.pin, layout.index)
            try:
                await self._loop.run_in_executor(self._io, self._save_fragment, header, pin.buffers)
            except StorageError as error:
                logger.error("%s", error)
                self.report.write("checkpoint", f"not saved: {error}")
                return
            finally:
                pin.release()
        for problem in self._store.take_problems():
            logger.warning("%s", problem)
            self.report.write("checkpoint", problem)
        self.report.write("checkpoint", "all fragments are saved")

    def _save_fragment(self, header: wire.StateHeader, buffers: list[memoryview]) -> None:
        theta, momentum = buffers
        number = header.version.header.number
        fragment = header.version.header.fragment
        log_versions = self._run.manifest.group.log_versions
        try:
            self._store.save_checkpoint(header.version, header.watermarks, theta, momentum)
        except StorageError:
            # Updates replay from the last checkpoint, but must not fill what is left of the disk meanwhile.
            self._store.prune_updates(fragment, number - 4 * log_versions)
            raise
        self._store.prune_updates(fragment, number - log_versions)


def next_incarnation(restored: Restored, me: str) -> int:
    """Milliseconds since 1970, but never below an earlier life of ours that is in a restored chain: with the
    clock set back, our contributions would be taken for ones that are merged already."""
    marks = (mark for fragment in restored.fragments for mark in fragment.watermarks)
    earlier = max((mark.stamp.incarnation for mark in marks if mark.learner == me), default=0)
    return max(time.time_ns() // 1_000_000, earlier + 1)

"""Member of a run: the parts between an open transport and a training learner.

Its life is `daemon.life`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from functools import partial

from msgspec import Struct

from p2pdiloco.config.settings import NodeSettings, rates
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.config import Amendment, Restored, Timing
from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.node import Core
from p2pdiloco.core.proofs import telling
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.admission.membership import Membership
from p2pdiloco.daemon.background import Background
from p2pdiloco.daemon.bulk.audits.loss_auditing import LossAuditing
from p2pdiloco.daemon.bulk.chain_view import OwnChain
from p2pdiloco.daemon.bulk.transfers import Transfers
from p2pdiloco.daemon.diary import Diary, LearnerDiary
from p2pdiloco.daemon.display.logs import RecentLines
from p2pdiloco.daemon.display.timeline import load_timeline
from p2pdiloco.daemon.finding.peers_file import save_peers
from p2pdiloco.daemon.finding.presence import OurRecord, Presence
from p2pdiloco.daemon.finding.reach import Reachability
from p2pdiloco.daemon.finding.sharing import Sharing
from p2pdiloco.daemon.frontdoor import FrontDoor
from p2pdiloco.daemon.history.fetching import Filling, pull_page
from p2pdiloco.daemon.history.keeping import HistoryKeeper
from p2pdiloco.daemon.history.serving import HistoryDoor
from p2pdiloco.daemon.holdings import RunHoldings
from p2pdiloco.daemon.learner.course import RunCourse
from p2pdiloco.daemon.learner.evaluating import FIRST_EVALUATION_S, Measurements, Turns
from p2pdiloco.daemon.learner.guest import GuestHost
from p2pdiloco.daemon.learner.host import LearnerHost, OnEvent
from p2pdiloco.daemon.learner.learner_link import LearnerLink
from p2pdiloco.daemon.learner.learner_options import learner_options
from p2pdiloco.daemon.links.link import Link
from p2pdiloco.daemon.links.linkplan import control_doubts
from p2pdiloco.daemon.links.linkwatch import LinkWatch
from p2pdiloco.daemon.links.meters import LinkMeters
from p2pdiloco.daemon.links.telling import LinkTeller
from p2pdiloco.daemon.links.uplink_file import load_uplink
from p2pdiloco.daemon.outbound import Outbound
from p2pdiloco.daemon.payloads.committing import Committing
from p2pdiloco.daemon.payloads.kept_payloads import IN_MEMORY_BYTES, KeptPayloads
from p2pdiloco.daemon.payloads.merging import Merging
from p2pdiloco.daemon.post import Post
from p2pdiloco.daemon.report import Report, Traffic
from p2pdiloco.daemon.run_files.checkpoints import Checkpoints
from p2pdiloco.daemon.run_files.listing import peers_of
from p2pdiloco.daemon.run_files.runs import Run
from p2pdiloco.daemon.runner import Hands, Runner
from p2pdiloco.identity import Identity
from p2pdiloco.ports import Transport
from p2pdiloco.tensors.vault import Vault

logger = logging.getLogger(__name__)
MAX_KEEPERS_ASKED = 16
"""Members that are asked at one go for what is missing of the history."""
ASK_JOINED_S = 4.0
"""Longest wait for the peers of the join line, before others are looked for."""


class OwnPeer(Struct, frozen=True):
    """Peer that this node is, before it is a member of anything."""

    identity: Identity
    transport: Transport
    door: FrontDoor
    """Front door that answers peers; the transport is open already."""
    reach: Reachability | None = None
    """Reachability of this node: whether others can dial it, and what to look at again; None: they can."""


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
        peer.door.enter(run.id, self.transfers, self.report, self.membership.gate, given)

    def _make_core(self) -> None:
        held, restored = self.holdings, self.holdings.found.restored
        self._incarnation = next_incarnation(restored, self._me)
        rng, now = random.Random(f"{self._me}/{self._incarnation}"), asyncio.get_running_loop().time()
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
        members = self.core.shared.view.confirmed(asyncio.get_running_loop().time())
        others = [peer for peer in members if peer != self._me]
        random.shuffle(others)
        return Filling(self.run.id, partial(pull_page, self.peer.transport), others[:MAX_KEEPERS_ASKED])

    def _log_of(self, fragment: int) -> tuple[SignedVersion, ...]:
        fragments = self.core.fragments
        return fragments[fragment].chain.logged_all() if 0 <= fragment < len(fragments) else ()

    def _guide(self) -> None:
        notice = self.membership.register.notice
        self.post.put(ev.Guided(self._anchors, notice.vouch if notice is not None else ()))

    def _has_mark(self, peer: str) -> bool:
        return self.core.shared.has_mark(peer)

    def _counts(self, peer: str) -> bool:
        """Tell whether to listen to what a peer says of the world: it is not banned, and was let in or has
        worked."""
        return self.membership.introductions.admits(peer) and self.core.shared.trusts(peer)

    def _on_proof(self, peer: str, proof: Evidence) -> None:
        """Take in the evidence for which a peer excludes us."""
        self.post.put(ev.MessageReceived(peer, telling(proof)))

    def _is_settled(self) -> bool:
        return self.core.confirmed

    def _admit(self) -> None:
        judges = self._has_mark, self._is_settled
        proofs = self.core.shared.excluded.proof_of, self._on_proof
        where = self.peer.transport, self.run, self._data_dir
        self.membership = Membership(*where, *judges, self._guide, *proofs)

    def _look_for_others(self) -> None:
        run, settings, group = self.run, self.settings, self.run.manifest.group
        transport, vault = self.peer.transport, self.holdings.compute.vault
        self.outbound = Outbound(transport, partial(wire.message, run.id), self.post.put)
        turns = Turns(run.id, self._me, settings.eval_every_s, FIRST_EVALUATION_S, group.term_versions)
        alone = settings.evaluate == "each"
        self.measurements = Measurements(turns, vault, group.log_versions, alone, self._counts)
        known = self.core.shared, self.measurements, settings.keep_history
        ours = OurRecord(self._incarnation, settings.name, *known)
        keep = partial(save_peers, self._data_dir)
        guests = self.membership.introductions
        worked = self.core.shared.has_worked
        self.presence = Presence(transport, run.id, ours, self.post.put, keep, group.size, guests, worked)

    def _measure_the_link(self) -> None:
        limits = Link(*(rate or math.inf for rate in rates(self.settings)))
        for doubt in control_doubts(self.run.manifest, limits):
            logger.warning("%s", doubt)
        self.meters = LinkMeters(self.peer.transport, limits, load_uplink(self._data_dir))
        self.link_watch = LinkWatch(self.run.manifest, self.run.layouts, self.meters)

    def _open_streams(self) -> None:
        held, transport, post = self.holdings, self.peer.transport, self.post.put
        in_memory_bytes = 0 if held.memory_is_bounded else IN_MEMORY_BYTES
        own = held.kept, held.tickets, held.compute, held.disk_io, post, in_memory_bytes
        self.kept = KeptPayloads(*own)
        files = held.updates, held.store, held.disk_io
        self.chain = OwnChain(self.core, self.run.layouts, *files, self.kept)
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
        options = learner_options(settings, run, self._me, self.holdings.store.folder / "data.place")
        host = (run.manifest, run.layouts, exchange, options, on_event, self._data_dir / "learner.log")
        at = settings.learner_socket
        return LearnerHost(*host) if at is None else GuestHost(at, *host)

    def _carry_out_effects(self) -> None:
        held, link, bulk = self.holdings, self.learner_link, self.transfers
        compute, tickets, post = held.compute, held.tickets, self.post.put
        parts = compute, tickets, held.updates, held.durable, link, self.keeper
        self.committing = Committing(self._me, *parts)
        self.merging = Merging(compute, tickets, post, bulk.merged.keep, bulk.true_updates.correction)
        hands = Hands(
            tickets=tickets,
            outbound=self.outbound,
            transfers=self.transfers,
            learner=link,
            kept=self.kept,
            merging=self.merging,
            committing=self.committing,
            durable=held.durable,
            loss_auditing=self._loss_auditing(),
            record=self.diary.on_record,
        )
        self.runner = Runner(self.core, self.post, self.background, hands)

    def _loss_auditing(self) -> LossAuditing:
        transfers, questions = self.transfers, self.learner_link.questions
        parts = self.chain, self.holdings.compute, transfers.auditing, questions
        return LossAuditing(*parts, self.holdings.store.folder, self.run.manifest, self.post.put)

    def _keep_and_show(self) -> None:
        held, run, link = self.holdings, self.run, self.learner_link
        log_versions = run.manifest.group.log_versions
        self.checkpoints = Checkpoints(held.compute, held.store, held.disk_io, log_versions, self.diary)
        self.link_teller = LinkTeller(self.link_watch, self.core.shared, link, self.diary, self.post.put)
        self.course = RunCourse(run.manifest, self.core, self._amendments, link, self._on_course)
        traffic = Traffic(self.outbound, self.transfers, self.peer.transport, held.memory, self.sharing)
        self.report: Report = Report(
            run,
            self.core,
            self.diary,
            link,
            self.learner_diary,
            self.course,
            traffic,
            self.link_watch,
        )

    def _amendments(self) -> tuple[Amendment, ...]:
        notice = self.membership.register.notice
        return notice.amendments if notice is not None else ()

    def _on_course(self, words: str, tokens: int) -> None:
        self.diary.say(logging.INFO, "course", words, tokens=tokens)


def next_incarnation(restored: Restored, me: str) -> int:
    """Make the incarnation of this life: milliseconds since 1970, but more than any in a restored chain.

    With the clock set back, our contributions would be taken for ones of an earlier life that are merged
    already.
    """
    marks = (mark for fragment in restored.fragments for mark in fragment.watermarks)
    earlier = max((mark.stamp.incarnation for mark in marks if mark.learner == me), default=0)
    return max(time.time_ns() // 1_000_000, earlier + 1)

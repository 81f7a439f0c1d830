"""The protocol core of one node: `handle(event, now) -> effects`, `next_deadline()`.

Sans-IO: no clock, no randomness but the RNG that is passed in, no files, no sockets, no tensors.
Synchronous and total: every event in every state is accepted, or refused with a reason that is recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from p2pdiloco.core import events as ev
from p2pdiloco.core import messages as msg
from p2pdiloco.core.config import CoreConfig, Restored
from p2pdiloco.core.effects import AnswerTransfer, Effect, Left, RefuseTransfer, Release
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.shared import Shared
from p2pdiloco.core.timing import Ema
from p2pdiloco.core.types import WHOLE_RUN, Crypto
from p2pdiloco.errors import invariant

MAX_TRANSFERS = 4096


class Core:
    """All fragments of one node, its membership, and its life."""

    def __init__(
        self,
        config: CoreConfig,
        me: str,
        incarnation: int,
        crypto: Crypto,
        rng: random.Random,
        restored: Restored,
        genesis: bool,
        now: float,
    ) -> None:
        self._shared = Shared(config, me, incarnation, crypto, rng)
        votes = {vote.fragment: vote for vote in sorted(restored.votes, key=lambda v: v.term)}
        self.fragments = tuple(
            Fragment(self._shared, WHOLE_RUN, index, saved, votes.get(index))
            for index, saved in enumerate(restored.fragments)
        )
        for fragment in self.fragments:
            fragment.follower.on_moved = self._try_confirm
        self._genesis = genesis
        self._saved = restored.saved
        self._started_s = now
        self._presence_seen = False
        self._others_listed = False
        self._unreached = 0
        self._next_heartbeat_s = now
        self._last_poll_s = now
        self._leave_by_s: float | None = None
        self._left = False
        self._transfers: dict[int, Fragment] = {}
        self._step_time = Ema()
        self._learner = ev.LearnerStatus(False, 0, 0, 0.0, 0.0, None)
        self._handlers: dict[type, Callable[..., None]] = {
            ev.Tick: self._on_tick,
            ev.PresenceSeen: self._on_presence,
            ev.MessageReceived: self._on_message,
            ev.SendFailed: self._on_send_failed,
            ev.ContributionReady: self._on_ready,
            ev.NothingToContribute: self._on_nothing,
            ev.ContributionAnswered: self._on_answered,
            ev.ContributionUndelivered: self._on_undelivered,
            ev.LearnerApplied: self._on_applied,
            ev.LearnerStatus: self._on_status,
            ev.LearnerLost: self._on_learner_lost,
            ev.ContributionOffered: self._on_offered,
            ev.ContributionReceived: self._on_received,
            ev.ContributionBroken: self._on_broken,
            ev.Merged: self._on_merged,
            ev.MergeFailed: self._on_merge_failed,
            ev.Persisted: self._on_persisted,
            ev.PersistFailed: self._on_persist_failed,
            ev.UpdateFetched: self._on_update,
            ev.FetchFailed: self._on_fetch_failed,
            ev.UpdateApplied: self._on_update_applied,
            ev.StateFetched: self._on_state,
            ev.LeaveRequested: self._on_leave,
        }
        self._messages: dict[type, Callable[..., None]] = {
            msg.Progress: self._on_progress,
            msg.Leaving: self._on_leaving,
            msg.Closing: lambda s, m, t: self._of(m).on_closing(s, m, t),
            msg.Pass: lambda s, m, t: self._of(m).round.on_pass(s, m, t),
            msg.Announce: self._on_announce,
            msg.VoteRequest: lambda s, m, t: self._of(m).office.on_vote_request(s, m, t),
            msg.VoteGranted: self._on_vote,
            msg.VoteRefused: self._on_vote_refused,
            msg.Elected: self._on_elected,
            msg.OfficeQuery: lambda s, m, t: self._of(m).office.on_query(s, m),
        }

    # --- interface -----------------------------------------------------------------------------------

    @property
    def confirmed(self) -> bool:
        """Votes, stands and gives state to others."""
        return self._shared.confirmed

    @property
    def may_serve(self) -> bool:
        """Whether others may pull updates and states from us."""
        return self._shared.confirmed

    @property
    def left(self) -> bool:
        """Leaving is complete."""
        return self._left

    @property
    def shared(self) -> Shared:
        """Membership and node-wide state, for reports."""
        return self._shared

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take one event in; the effects are to be carried out in order."""
        handler = self._handlers.get(type(event))
        invariant(handler is not None, f"no handler for {type(event).__name__}")
        if handler is not None:
            handler(event, now)
        return self._shared.out.take()

    def next_deadline(self) -> float:
        """When a `Tick` is due, on the clock of `now`. What was due when everything was last looked at, and
        still is, waits for something else than time: it is looked at again at events and heartbeats only."""
        times = [self._next_heartbeat_s]
        for fragment in self.fragments:
            due_s = fragment.deadline()
            if due_s is not None and due_s > self._last_poll_s:
                times.append(due_s)
        if self._leave_by_s is not None and not self._left:
            times.append(self._leave_by_s)
        return min(times)

    # --- time and membership -------------------------------------------------------------------------

    def _on_tick(self, _event: ev.Tick, now: float) -> None:
        if now >= self._next_heartbeat_s:
            self._next_heartbeat_s = now + self._shared.timing.heartbeat_s
            for peer in self._shared.view.forget_stale(now):
                for fragment in self.fragments:
                    fragment.follower.gone(peer)
            for peer in self._shared.view.newly_silent(now):
                self._shared.out.record("silent", None, "not counted on: silent or unreachable", peer=peer)
            if not self._left:
                progress = self._progress()
                for peer in self._shared.view.to_greet(now):
                    self._shared.out.send(peer, progress)
        self._try_confirm(now)
        self._poll_all(now)

    def _poll_all(self, now: float) -> None:
        self._last_poll_s = now
        if self._left:
            return
        for fragment in self.fragments:
            fragment.poll(now)
        self._try_leave(now)

    def _progress(self) -> msg.Progress:
        shared, learner = self._shared, self._learner
        return msg.Progress(
            incarnation=shared.incarnation,
            step_time_s=shared.step_s,
            inner_step=learner.inner_step,
            tokens_total=learner.tokens_total,
            tokens_per_s=learner.tokens_per_s,
            loss=learner.loss,
            learning=shared.learning,
            confirmed=shared.confirmed,
            stands=shared.stands and not shared.leaving,
            heads=tuple(f.chain.head for f in self.fragments),
            offices=tuple((f.index, f.office.term) for f in self.fragments if f.office.holding),
        )

    def _on_presence(self, event: ev.PresenceSeen, now: float) -> None:
        self._presence_seen = True
        self._unreached = event.unreached
        self._others_listed = any(peer != self._shared.me for peer, _ in event.members)
        for peer, incarnation in event.members:
            self._shared.view.listed(peer, incarnation, now)
        self._next_heartbeat_s = min(self._next_heartbeat_s, now)
        self._try_confirm(now)

    def _on_send_failed(self, event: ev.SendFailed, now: float) -> None:
        if self._shared.view.failed(event.peer):
            self._poll_all(now)
        elif self._shared.view.try_soon(event.peer):
            # One failure proves nothing. A second one soon tells a dead peer from a dropped connection.
            self._next_heartbeat_s = min(self._next_heartbeat_s, now + self._shared.timing.probe_s)

    def _on_progress(self, sender: str, message: msg.Progress, now: float) -> None:
        shared = self._shared
        before = shared.view.progress(sender)
        whole = len(message.heads) == len(self.fragments)
        if not whole and (message.heads or message.confirmed):
            self._refuse(sender, None, "wrong-head-count")
            return
        if not shared.view.heard(sender, message, now):
            return
        if before is None:
            shared.out.record("join", None, "heard of for the first time", peer=sender)
            shared.out.send(sender, self._progress())
        elif message.incarnation > before.incarnation:
            for fragment in self.fragments:
                if fragment.office.syncer == sender:
                    fragment.office.suspect("the syncer was restarted")
        moved = []
        for fragment, head in zip(self.fragments, message.heads, strict=False):
            fragment.follower.heard(sender, head, message.confirmed, now)
            if message.confirmed and head.weight > fragment.chain.head.weight:
                moved.append(fragment)
        for index, term in message.offices:
            if index < len(self.fragments):
                self.fragments[index].office.on_claim(sender, term, now)
        self._try_confirm(now)
        for fragment in moved:
            fragment.poll(now)
        self._try_leave(now)

    def _try_confirm(self, now: float) -> None:
        """Become a full member: design 5.1, "a newcomer neither votes nor gives state to others until…"."""
        shared = self._shared
        if shared.confirmed:
            return
        waited_s = now - self._started_s
        alone = self._presence_seen and not shared.view.voters(now)
        if all(f.follower.verified for f in self.fragments):
            reason = "every fragment's version is confirmed by peers"
        elif self._genesis and alone and waited_s >= self._genesis_patience_s(now):
            reason = "starts the run"
        elif self._saved and alone and waited_s >= shared.timing.resume_alone_s:
            reason = "nobody else is here: goes on from the saved state"
        else:
            return
        shared.confirmed = True
        shared.out.record("join", None, f"full member: {reason}")
        progress = self._progress()
        for peer in shared.view.members(now):
            shared.out.send(peer, progress)

    def _genesis_patience_s(self, now: float) -> float:
        """How long a node listens before it starts a run: others may be newcomers like itself, and say so
        soon; or members that hold the run's history and cannot be reached just now."""
        timing = self._shared.timing
        if self._unreached or self._shared.view.unheard(now):
            return timing.resume_alone_s
        return timing.genesis_wait_s if self._others_listed else 0.0

    # --- messages ------------------------------------------------------------------------------------

    def _on_message(self, event: ev.MessageReceived, now: float) -> None:
        message = event.message
        if event.sender == self._shared.me:
            self._refuse(event.sender, None, "our-own-name")
            return
        self._shared.view.touched(event.sender, now)
        index = getattr(message, "fragment", 0)
        group = getattr(message, "group", WHOLE_RUN)
        if index >= len(self.fragments) or group != WHOLE_RUN:
            self._refuse(event.sender, None, "unknown-fragment")
            return
        self._messages[type(message)](event.sender, message, now)

    def _of(self, message: msg.Closing | msg.Pass | msg.VoteRequest | msg.OfficeQuery) -> Fragment:
        return self.fragments[message.fragment]

    def _refuse(self, peer: str, fragment: int | None, reason: str) -> None:
        self._shared.out.record("refusal", fragment, reason, peer=peer)

    def _on_leaving(self, sender: str, message: msg.Leaving, now: float) -> None:
        self._shared.view.left(sender, message.incarnation)
        for fragment in self.fragments:
            fragment.follower.gone(sender)
        self._shared.out.record("leave", None, "said good-bye", peer=sender)
        self._poll_all(now)

    def _on_announce(self, sender: str, message: msg.Announce, now: float) -> None:
        header = message.version.header
        if header.fragment >= len(self.fragments) or header.group != WHOLE_RUN:
            self._refuse(sender, None, "unknown-fragment")
            return
        progress = self._shared.view.progress(sender)
        fragment = self.fragments[header.fragment]
        fragment.on_announce(sender, message, progress is not None and progress.confirmed, now)
        fragment.poll(now)

    def _on_vote(self, sender: str, message: msg.VoteGranted, now: float) -> None:
        body = message.vote.body
        if body.fragment >= len(self.fragments):
            self._refuse(sender, None, "unknown-fragment")
            return
        fragment = self.fragments[body.fragment]
        reason = fragment.office.on_vote(sender, message.vote, now)
        if reason:
            self._refuse(sender, fragment.index, reason)
        fragment.poll(now)

    def _on_vote_refused(self, sender: str, message: msg.VoteRefused, now: float) -> None:
        fragment = self.fragments[message.fragment]
        progress = self._shared.view.progress(sender)
        if message.head is not None and progress is not None:
            fragment.follower.heard(sender, message.head, progress.confirmed, now)
        fragment.office.on_refused(sender, message, now)
        fragment.poll(now)

    def _on_elected(self, sender: str, message: msg.Elected, now: float) -> None:
        certificate = message.certificate
        if certificate.fragment >= len(self.fragments) or certificate.group != WHOLE_RUN:
            self._refuse(sender, None, "unknown-fragment")
            return
        fragment = self.fragments[certificate.fragment]
        reason = fragment.office.on_elected(sender, certificate, now)
        if reason:
            self._refuse(sender, fragment.index, reason)
        fragment.poll(now)

    # --- learner and contributions -------------------------------------------------------------------

    def _on_ready(self, event: ev.ContributionReady, now: float) -> None:
        fragment = self.fragments[event.fragment]
        fragment.contribution_ready(event, now)
        fragment.poll(now)

    def _on_nothing(self, event: ev.NothingToContribute, now: float) -> None:
        fragment = self.fragments[event.fragment]
        fragment.nothing_to_contribute(now)
        self._try_leave(now)

    def _on_answered(self, event: ev.ContributionAnswered, now: float) -> None:
        fragment = self.fragments[event.fragment]
        fragment.own.answered(event, now)
        if event.head is not None:
            fragment.follower.heard(event.peer, event.head, True, now)
        fragment.poll(now)

    def _on_undelivered(self, event: ev.ContributionUndelivered, now: float) -> None:
        fragment = self.fragments[event.fragment]
        fragment.own.undelivered(event, now)
        if self._shared.view.failed(event.peer):
            self._poll_all(now)
        fragment.poll(now)

    def _on_applied(self, event: ev.LearnerApplied, now: float) -> None:
        self.fragments[event.fragment].learner_applied(event)

    def _on_status(self, event: ev.LearnerStatus, now: float) -> None:
        self._learner = event
        self._shared.learning = event.running
        if event.running and event.step_time_s > 0:
            self._step_time.add(event.step_time_s)
            self._shared.step_s = self._step_time.value

    def _on_learner_lost(self, _event: ev.LearnerLost, now: float) -> None:
        self._shared.learning = False
        for fragment in self.fragments:
            fragment.learner_lost(now)
        self._shared.out.record("learner", None, "lost: contributions already copied out are kept")

    # --- syncer --------------------------------------------------------------------------------------

    def _on_offered(self, event: ev.ContributionOffered, now: float) -> None:
        header = event.signed.header
        out = self._shared.out
        if header.fragment >= len(self.fragments) or header.group != WHOLE_RUN:
            out.put(RefuseTransfer(event.transfer, 0, "unknown-fragment", True))
            self._refuse(event.sender, None, "unknown-fragment")
        elif header.run != self._shared.config.run:
            out.put(RefuseTransfer(event.transfer, header.fragment, "other-run", True))
            self._refuse(event.sender, None, "other-run")
        elif len(self._transfers) >= MAX_TRANSFERS:
            out.put(RefuseTransfer(event.transfer, header.fragment, "full", False))
        else:
            fragment = self.fragments[header.fragment]
            if not fragment.round.offered(event.transfer, event.sender, event.signed, now):
                self._transfers[event.transfer] = fragment

    def _on_received(self, event: ev.ContributionReceived, now: float) -> None:
        fragment = self._transfers.pop(event.transfer, None)
        if fragment is None:
            self._shared.out.put(AnswerTransfer(event.transfer, 0, False, "unknown-transfer"))
            self._shared.out.put(Release(event.ticket))
            return
        fragment.round.received(event.transfer, event.ticket, now)
        fragment.poll(now)

    def _on_broken(self, event: ev.ContributionBroken, now: float) -> None:
        fragment = self._transfers.pop(event.transfer, None)
        if fragment is not None:
            fragment.round.broken(event.transfer, event.reason)

    def _on_merged(self, event: ev.Merged, now: float) -> None:
        fragment = self.fragments[event.fragment]
        fragment.round.merged(event, now)
        fragment.poll(now)

    def _on_merge_failed(self, event: ev.MergeFailed, now: float) -> None:
        fragment = self.fragments[event.fragment]
        fragment.round.failed(event, now)
        fragment.poll(now)

    def _on_persisted(self, event: ev.Persisted, now: float) -> None:
        self._shared.on_persist_failed.pop(event.token, None)
        done = self._shared.on_persisted.pop(event.token, None)
        if done is not None:
            done(now)
            self._poll_all(now)

    def _on_persist_failed(self, event: ev.PersistFailed, now: float) -> None:
        self._shared.on_persisted.pop(event.token, None)
        failed = self._shared.on_persist_failed.pop(event.token, None)
        if failed is not None:
            failed(now, event.reason)
            self._poll_all(now)

    # --- versions ------------------------------------------------------------------------------------

    def _on_update(self, event: ev.UpdateFetched, now: float) -> None:
        fragment = self.fragments[event.fragment]
        fragment.follower.update_fetched(event, now)
        fragment.poll(now)

    def _on_fetch_failed(self, event: ev.FetchFailed, now: float) -> None:
        fragment = self.fragments[event.fragment]
        fragment.follower.fetch_failed(event, now)
        fragment.poll(now)

    def _on_update_applied(self, event: ev.UpdateApplied, now: float) -> None:
        fragment = self.fragments[event.fragment]
        fragment.follower.update_applied(event, now)
        fragment.poll(now)

    def _on_state(self, event: ev.StateFetched, now: float) -> None:
        fragment = self.fragments[event.fragment]
        fragment.follower.state_fetched(event, now)
        fragment.poll(now)

    # --- leaving -------------------------------------------------------------------------------------

    def _on_leave(self, _event: ev.LeaveRequested, now: float) -> None:
        if self._leave_by_s is not None:
            return
        self._shared.leaving = True
        self._leave_by_s = now + self._shared.timing.leave_s
        alone = not self._shared.view.live(now)
        for fragment in self.fragments:
            if self._shared.confirmed and (fragment.office.holding or not alone):
                fragment.flush()
        self._poll_all(now)

    def _handed_over(self, now: float) -> bool:
        """Whether somebody else holds the newest versions that we made: they would go away with us."""
        shared = self._shared
        others = [p for peer in shared.view.live(now) if (p := shared.view.progress(peer)) and p.confirmed]
        made = [f for f in self.fragments if f.chain.signed.header.syncer == shared.me]
        return not others or all(
            any(len(p.heads) > f.index and p.heads[f.index].number >= f.chain.head.number for p in others)
            for f in made
        )

    def _try_leave(self, now: float) -> None:
        if self._leave_by_s is None or self._left:
            return
        unsettled = [f for f in self.fragments if not f.settle()]
        helped = bool(self._shared.view.live(now))
        waits = any(helped or f.office.holding for f in unsettled) or not self._handed_over(now)
        if now < self._leave_by_s and waits:
            return
        for fragment in self.fragments:
            fragment.office.lay_down("leaving")
            fragment.round.abandon("leaving")
        for peer in self._shared.view.members(now):
            self._shared.out.send(peer, msg.Leaving(self._shared.incarnation))
        reason = (
            f"{len(unsettled)} contributions were not merged in time" if unsettled else "nothing was pending"
        )
        self._shared.out.record("leave", None, reason)
        self._shared.out.put(Left())
        self._left = True

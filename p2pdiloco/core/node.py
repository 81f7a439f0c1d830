"""Core of one node, sans-IO: `handle(event, now) -> effects`, `next_deadline()`.

No clock, no randomness but the RNG that is passed in, no files, no sockets, no tensors. Synchronous and
total: every event in every state is accepted, or refused with a reason that is recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import CoreConfig, Restored
from p2pdiloco.core.api.events import AnswerTransfer, Effect, Release, VoteRecord
from p2pdiloco.core.api.reasons import MessageFault, Reason, Verdict
from p2pdiloco.core.api.types import MAX_PEERS, WHOLE_RUN, Crypto
from p2pdiloco.core.api.versions import is_group
from p2pdiloco.core.base import Notices, Shared
from p2pdiloco.core.fork_choice import Grounds
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.membership import Departure, Heartbeats, Joining, Trial
from p2pdiloco.core.proofs import Gossip, Hearing
from p2pdiloco.core.round import Round
from p2pdiloco.errors import invariant


class Core:
    """Fragments of one node, its membership, and its life."""

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
        notices = Notices(
            greet=lambda peer: self._heartbeats.greet(peer),
            confirmed=lambda t: self._heartbeats.tell_all(t),
            moved=lambda t: self._joining.poll(t),
            regrouped=lambda t: self._heartbeats.regrouped(t),
            vote_disk=lambda why, t: self._heartbeats.vote_disk_changed(why, t),
        )
        self._shared = Shared(config, me, incarnation, crypto, rng, notices)
        if not restored.saved:
            self._shared.guidance.begin_with_nothing()
        votes: dict[int, list[VoteRecord]] = {}
        for vote in restored.votes:
            votes.setdefault(vote.fragment, []).append(vote)
        self.fragments = tuple(
            Fragment(self._shared, index, saved, votes.get(index, []), now)
            for index, saved in enumerate(restored.fragments)
        )
        self._joining = Joining(self._shared, self.fragments, genesis, restored, now)
        self._heartbeats = Heartbeats(self._shared, self.fragments, self._joining, genesis, now)
        self._departure = Departure(self._shared, self.fragments)
        self._trial = Trial(self._shared, self.fragments)
        self._gossip = Gossip(self._shared, self.fragments, restored.proofs)
        self._hearing = Hearing(self._shared, self.fragments)
        self._last_poll_s = now
        self._transfers: dict[int, tuple[Fragment, Round]] = {}
        self._handlers: dict[type, Callable[..., None]] = {
            ev.Tick: self._on_tick,
            ev.PresenceSeen: self._heartbeats.presence,
            ev.Guided: self._on_guided,
            ev.SayWord: self._on_say,
            ev.ReachChanged: self._heartbeats.reach,
            ev.UplinkMeasured: self._heartbeats.uplink,
            ev.Miscalculates: self._heartbeats.miscalculates,
            ev.MessageReceived: self._on_message,
            ev.SendFailed: self._on_send_failed,
            ev.NothingToContribute: self._on_nothing,
            ev.ContributionSent: lambda e, t: self._at(e.fragment).own.sent(e.stamp),
            ev.LearnerApplied: lambda e, t: self._at(e.fragment).learner_applied(e),
            ev.LearnerStatus: self._heartbeats.learner_status,
            ev.LearnerLost: self._on_learner_lost,
            ev.Offered: self._on_offered,
            ev.PayloadReceived: self._on_received,
            ev.PayloadBroken: self._on_broken,
            ev.Answered: self._on_answered,
            ev.LeaveRequested: self._on_leave,
            ev.ContributionReady: self._on_ready,
        }
        self._messages = self._message_handlers()

    def _message_handlers(self) -> dict[type, Callable[..., None]]:
        return {
            msg.Progress: self._on_progress,
            msg.Leaving: self._on_leaving,
            msg.Closing: lambda s, m, t: self._at(m.fragment).on_closing(s, m, t),
            msg.Pass: lambda s, m, t: self._at(m.fragment).posts.on_pass(s, m, t),
            msg.Announce: self._on_announce,
            msg.VoteRequest: lambda s, m, t: self._at(m.fragment).posts.on_vote_request(s, m, t),
            msg.VoteGranted: self._on_vote,
            msg.VoteRefused: self._on_vote_refused,
            msg.Elected: self._on_elected,
            msg.OfficeQuery: lambda s, m, t: self._at(m.fragment).posts.on_query(s, m),
            msg.Proven: self._gossip.on_proven,
            msg.Said: self._on_said,
            msg.Stated: self._hearing.on_stated,
        }

    # --- interface -----------------------------------------------------------------------------------

    @property
    def confirmed(self) -> bool:
        """True: holds versions that peers confirm; gives state, and votes and stands if it can save a
        vote."""
        return self._shared.confirmed

    @property
    def may_serve(self) -> bool:
        """True: others may pull updates and states from us."""
        return self._shared.confirmed or self._joining.serves_saved

    def is_member(self, peer: str) -> bool:
        """Tell whether the peer takes part: it has a seat, or something of it was merged."""
        return self._shared.takes_part(peer)

    @property
    def came_with_run(self) -> bool:
        """True: we started with a saved state."""
        return self._joining.saved

    @property
    def grounds(self) -> Grounds | None:
        """Grounds on which we took what we began with; None: we came with it, or started the run."""
        return self._joining.grounds

    @property
    def untried(self) -> str:
        """Reason why the last state that came was taken without a trial; empty: none was."""
        return self._trial.untried

    def waits_for(self, now: float) -> str:
        """Say for people what must happen before we are a full member; empty if we are."""
        return self._joining.waits_for(now)

    @property
    def departed(self) -> bool:
        """True: leaving is complete."""
        return self._shared.departed

    @property
    def shared(self) -> Shared:
        """Membership and node-wide state, for reports."""
        return self._shared

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take one event in; the effects are to be carried out in order."""
        handler = self._handlers.get(type(event))
        invariant(handler is not None, f"no handler for {type(event).__name__}")
        lag_s = self._shared.health.lag_s(now)
        if lag_s:
            self._heartbeats.awake(lag_s, now)
        if handler is not None:
            handler(event, now)
        if self._shared.excluded.news and self._gossip.settle(now):
            self._poll_all(now)
        return self._shared.out.take()

    def next_deadline(self) -> float:
        """Compute when a `Tick` is due, on the clock of `now`.

        What was due when everything was last looked at, and still is, waits for something else than time: it
        is looked at again at events and heartbeats only.
        """
        first_s = self._heartbeats.next_s
        for fragment in self.fragments:
            due_s = fragment.deadline()
            if due_s is not None and self._last_poll_s < due_s < first_s:
                first_s = due_s
        leave_by_s = self._departure.deadline()
        if leave_by_s is not None:
            first_s = min(first_s, leave_by_s)
        self._shared.health.promise(first_s)
        return first_s

    # --- time and membership -------------------------------------------------------------------------

    def _at(self, index: int) -> Fragment:
        """Find a fragment that something happens to: its deadline is to be asked anew."""
        fragment = self.fragments[index]
        fragment.touch()
        return fragment

    def _on_tick(self, _event: ev.Tick, now: float) -> None:
        # First, or a heartbeat that says "not confirmed" may come after one that does.
        self._joining.poll(now)
        self._heartbeats.poll(now)
        self._poll_all(now)

    def _poll_all(self, now: float) -> None:
        self._last_poll_s = now
        if self._shared.departed:
            return
        if self._shared.papers.said:
            self._shared.papers.forget(lambda word: not self._shared.awaits(word))
        for fragment in self.fragments:
            fragment.poll(now)
        self._trial.poll(now)
        self._departure.poll(now)

    def _on_send_failed(self, event: ev.SendFailed, now: float) -> None:
        if self._heartbeats.send_failed(event.peer, now):
            self._poll_all(now)

    def _on_progress(self, sender: str, message: msg.Progress, now: float) -> None:
        self._heartbeats.heard(sender, message, now)
        self._gossip.heard(sender, message, now)
        self._departure.poll(now)

    def _on_guided(self, event: ev.Guided, now: float) -> None:
        shared = self._shared
        new = set(event.anchors) - shared.guidance.anchors
        shared.guidance.told(event.anchors, event.vouches)
        shared.papers.take(event.papers)
        for peer in sorted(new - {shared.me}):
            if shared.guidance.fresh and shared.view.progress(peer) is None:
                self._heartbeats.greet(peer)
        self._poll_all(now)

    def _on_say(self, event: ev.SayWord, now: float) -> None:
        if self._gossip.say(event, now):
            self._poll_all(now)

    def _on_said(self, sender: str, message: msg.Said, now: float) -> None:
        if self._gossip.on_said(sender, message, now):
            self._poll_all(now)

    # --- messages ------------------------------------------------------------------------------------

    def _on_message(self, event: ev.MessageReceived, now: float) -> None:
        message = event.message
        if event.sender == self._shared.me:
            self._refuse(event.sender, None, MessageFault.OUR_OWN_NAME)
            return
        if self._gossip.refuses(event.sender, now):
            return
        self._shared.view.heard_message(event.sender, now)
        index = getattr(message, "fragment", 0)
        group = getattr(message, "group", WHOLE_RUN)
        if index >= len(self.fragments) or not is_group(group):
            self._refuse(event.sender, None, MessageFault.UNKNOWN_FRAGMENT)
            return
        self._messages[type(message)](event.sender, message, now)

    def _refuse(self, peer: str, fragment: int | None, reason: Reason) -> None:
        self._shared.out.record("refusal", fragment, str(reason), peer=peer)

    def _on_leaving(self, sender: str, message: msg.Leaving, now: float) -> None:
        self._shared.view.said_goodbye(sender, message.incarnation, now)
        for fragment in self.fragments:
            fragment.follower.heads.gone(sender)
        for fragment, head in zip(self.fragments, message.heads, strict=False):
            fragment.witnesses.said_goodbye(sender, head)
        self._shared.out.record("leave", None, "said good-bye", peer=sender)
        self._poll_all(now)

    def _on_announce(self, sender: str, message: msg.Announce, now: float) -> None:
        progress = self._shared.view.progress(sender)
        fragment = self._at(message.fragment)
        fragment.on_announce(sender, message, progress is not None and progress.confirmed, now)
        fragment.poll(now)

    def _on_vote(self, sender: str, message: msg.VoteGranted, now: float) -> None:
        body = message.vote.body
        if body.fragment >= len(self.fragments) or not is_group(body.group):
            self._refuse(sender, None, MessageFault.UNKNOWN_FRAGMENT)
            return
        fragment = self._at(body.fragment)
        fault = fragment.posts.on_vote(sender, message, now)
        if fault is not None:
            self._refuse(sender, fragment.index, fault)
        fragment.poll(now)

    def _on_vote_refused(self, sender: str, message: msg.VoteRefused, now: float) -> None:
        fragment = self._at(message.fragment)
        progress = self._shared.view.progress(sender)
        if message.head is not None and progress is not None:
            fragment.follower.heads.heard(sender, message.head, progress.confirmed, False, now)
        fragment.posts.on_refused(sender, message, now)
        fragment.poll(now)

    def _on_elected(self, sender: str, message: msg.Elected, now: float) -> None:
        certificate = message.certificate
        if certificate.fragment >= len(self.fragments) or not is_group(certificate.group):
            self._refuse(sender, None, MessageFault.UNKNOWN_FRAGMENT)
            return
        fragment = self._at(certificate.fragment)
        fault = fragment.posts.on_elected(sender, message, now)
        if fault is not None:
            self._refuse(sender, fragment.index, fault)
        fragment.poll(now)

    def _on_answered(self, event: ev.Answered, now: float) -> None:
        asked, answer = self._shared.out.answered(event.token), event.answer
        effect = asked.effect
        if isinstance(effect, ev.Offer) and isinstance(answer, ev.OfferAnswered) and answer.head is not None:
            self._at(effect.signed.header.fragment).heard(effect.peer, answer.head, True, now)
        asked.heard(answer, now)
        if isinstance(effect, ev.Offer) and isinstance(answer, ev.Undone):
            self._on_send_failed(ev.SendFailed(effect.peer), now)
        if asked.fragment is None:
            self._poll_all(now)
        else:
            self.fragments[asked.fragment].poll(now)

    # --- learner and contributions -------------------------------------------------------------------

    def _on_nothing(self, event: ev.NothingToContribute, now: float) -> None:
        self._at(event.fragment).nothing_to_contribute(now)
        self._departure.poll(now)

    def _on_ready(self, event: ev.ContributionReady, now: float) -> None:
        fragment = self._at(event.fragment)
        fragment.contribution_ready(event, now)
        fragment.poll(now)

    def _on_learner_lost(self, _event: ev.LearnerLost, now: float) -> None:
        self._shared.learner.lost()
        for fragment in self.fragments:
            fragment.touch()
            fragment.learner_lost(now)
        self._shared.out.record("learner", None, "lost: contributions already copied out are kept")

    # --- syncer --------------------------------------------------------------------------------------

    def _on_offered(self, event: ev.Offered, now: float) -> None:
        header = event.signed.header
        if header.fragment >= len(self.fragments) or not is_group(header.group):
            self._refuse_offer(event, 0, Verdict.UNKNOWN_FRAGMENT)
        elif header.run != self._shared.config.run:
            self._refuse_offer(event, header.fragment, Verdict.OTHER_RUN)
        elif event.sender in self._shared.excluded:
            self._refuse_offer(event, header.fragment, Verdict.EXCLUDED)
        elif len(self._transfers) >= MAX_PEERS:
            self._refuse_offer(event, header.fragment, Verdict.FULL)
        else:
            fragment = self._at(header.fragment)
            whose = fragment.round_for(header)
            if whose is None:
                self._refuse_offer(event, header.fragment, fragment.posts.without_post(header.group))
            elif whose.offered(event.transfer, event.sender, event.signed, now):
                self._transfers[event.transfer] = (fragment, whose)

    def _refuse_offer(self, event: ev.Offered, fragment: int, verdict: Verdict) -> None:
        self._shared.out.put(AnswerTransfer(event.transfer, fragment, verdict))
        if verdict.counted:
            self._refuse(event.sender, None, verdict)

    def _on_received(self, event: ev.PayloadReceived, now: float) -> None:
        found = self._transfers.pop(event.transfer, None)
        if found is None:
            self._shared.out.put(AnswerTransfer(event.transfer, 0, Verdict.UNKNOWN_TRANSFER))
            self._shared.out.put(Release(event.ticket))
            return
        fragment, whose = found
        whose.received(event.transfer, event.ticket, now)
        fragment.poll(now)

    def _on_broken(self, event: ev.PayloadBroken, now: float) -> None:
        found = self._transfers.pop(event.transfer, None)
        if found is not None:
            fragment, whose = found
            fragment.touch()
            whose.broken(event.transfer, event.verdict)

    # --- leaving -------------------------------------------------------------------------------------

    def _on_leave(self, _event: ev.LeaveRequested, now: float) -> None:
        if self._departure.begin(now):
            self._heartbeats.tell_neighbours(now)  # that we do not stand any more
            self._poll_all(now)

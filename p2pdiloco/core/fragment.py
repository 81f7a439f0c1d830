"""Fragment on one node: wires chain, seats, own contributions and follower together."""

from __future__ import annotations

from p2pdiloco.core.api.config import RestoredFragment
from p2pdiloco.core.api.events import (
    ContributionReady,
    DiscardContribution,
    LearnerApplied,
    RequestFragment,
    VoteRecord,
)
from p2pdiloco.core.api.messages import Announce, Closing, Pass
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import ContributionHeader, Head
from p2pdiloco.core.api.versions import PartialHeader
from p2pdiloco.core.attesting import Attester
from p2pdiloco.core.audits import Auditor
from p2pdiloco.core.base import Shared, earliest
from p2pdiloco.core.chain import Chain, Witnesses, strange_after
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.contributions import ContributionQueue
from p2pdiloco.core.election import Office
from p2pdiloco.core.follower import Follower
from p2pdiloco.core.pending import Pending
from p2pdiloco.core.posts import GroupPost, Posts
from p2pdiloco.core.round import Round, RoundState


class Fragment:
    """Router of what happens to the part that it concerns; lets the parts look again afterwards."""

    def __init__(
        self, shared: Shared, index: int, restored: RestoredFragment, votes: list[VoteRecord], now: float
    ) -> None:
        config = shared.config
        keep = max(config.log_versions, config.max_base_age_versions)
        self._shared = shared
        self.index = index
        self.chain = Chain(restored.log, restored.watermarks, keep, config.seats)
        posts: list[GroupPost] = []
        self.context = FragmentContext(shared, index, self.chain, votes, posts, self._needs_syncer)
        self.witnesses = Witnesses(self.chain, shared.me, shared.timing, now)
        self.own = ContributionQueue(self.context, lambda: self.attester.attestation())
        self.posts = Posts(self.context, self.own, posts, self._request, now)
        self.publisher = self.posts.publisher
        self.auditor = Auditor(self.context, self.own)
        self.follower = Follower(self.context, self.own, self.auditor, self._moved)
        self.attester = Attester(self.context, self.follower.heads, votes)
        self._too_long = 0
        """Number of contributions of ours in a row that are too long to count in full."""
        self._open_call: Closing | None = None
        """Closing call that the learner was asked for and that is not answered yet; `_caller` sent it."""
        self._caller = ""
        self.requested = False
        """True: the learner was asked for this fragment and has not answered yet."""
        self._flushes = False
        """True: we leave, and the learner is to be asked for the last time."""
        self._over = False
        """True: we leave, and our part here is over."""
        self._touched = True
        """True: something happened here since `deadline` was last worked out."""
        self._due_s: float | None = None

    @property
    def office(self) -> Office:
        """Office of the group in which our learner takes part."""
        return self.posts.leaf.office

    @property
    def round(self) -> Round:
        """Round of the group in which our learner takes part."""
        return self.posts.leaf.round

    def touch(self) -> None:
        """Note that something happened here: the deadline is to be worked out anew."""
        self._touched = True

    def poll(self, now: float) -> None:
        """Let every part look at the clock and at each other."""
        self.touch()
        self.posts.poll_offices(now)
        self.follower.poll(now)
        self.auditor.poll(now)
        if self._flushes and self.own.idle:
            self._flushes = False
            self._request()
        pending = self.own.next_offer(now)
        syncer = self.office.syncer
        if pending is not None and syncer is not None:
            if syncer == self._shared.me:
                self._offer_own(pending, now)
            else:
                self.own.send(pending, syncer, now)
        self.posts.poll_rounds(now)
        self.attester.poll()
        if self.posts.changed:
            self.poll(now)

    def _offer_own(self, pending: Pending, now: float) -> None:
        """Offer our own contribution to ourselves: a syncer's needs no stream."""
        me = self._shared.me
        signed = self.own.offer(pending, me, now)
        verdict = self.round.admit_own(signed, pending.ready.ticket, now)
        if not verdict.taken:
            self.own.refused(pending, verdict, now)
            return
        self.own.accepted(pending, verdict, now)
        if verdict is not Verdict.ALREADY_HELD:
            self.round.arrived(me, now)

    def _moved(self, now: float) -> None:
        self.context.moved(now)
        merged = self.own.idle or self.chain.marks.number(self._shared.me) == self.chain.head.number
        self.posts.chain_moved(now, merged)
        self._shared.notices.moved(now)

    def deadline(self) -> float | None:
        """Find when to look again without being told of anything. Kept until something happens here: most
        events concern one fragment of many."""
        if self._touched:
            self._touched = False
            self._due_s = earliest((self.posts.deadline(), self.own.deadline(), self.follower.deadline()))
        return self._due_s

    def words(self, now: float) -> str:
        """Say for people, in one short phrase, what this fragment is doing or waiting for."""
        for post in reversed(self.posts.taken):
            if post.round.state is not RoundState.IDLE:
                return post.round.words(now)
        if self._shared.confirmed and not self.posts.leaf.electorate.voters(now):
            return "no node with a seat is here: learners go on alone, and keep their work"
        return self.follower.words() or self.own.words() or self.office.why_open(now)

    # --- closing calls -------------------------------------------------------------------------------

    def on_closing(self, sender: str, call: Closing, now: float) -> None:
        """Answer the syncer, which closes a round: send what we have, or pass at once so that nobody waits
        for us."""
        shared = self._shared
        if self.posts.on_closing(sender, call, now):
            return
        right = (call.group, sender, call.term)
        if right != (self.posts.leaf.name, self.office.syncer, self.office.term):
            shared.out.send(sender, _pass(call))
        elif call.number <= self.chain.head.number:
            return  # it comes late: that round is over
        elif self._over or not shared.learning:
            shared.out.send(sender, _pass(call))
        elif self.own.idle:  # else what is on its way or held answers the call by itself
            self._open_call, self._caller = call, sender
            self._request()

    def _request(self) -> None:
        if not self.requested:
            self.requested = True
            self._shared.out.put(RequestFragment(self.index))

    def nothing_to_contribute(self, now: float) -> None:
        """Pass: the learner has made no step since its last contribution."""
        self.requested = False
        if self._open_call is not None:
            self._shared.out.send(self._caller, _pass(self._open_call))
            self._open_call = None
        self.round.own_pass(now)

    def contribution_ready(self, event: ContributionReady, now: float) -> None:
        """Take in the fragment that the learner copied out."""
        self.requested = False
        self._open_call = None
        if self._over and not self.office.holding:
            # Nobody will merge it any more: it stays in the learner's displacement, which is saved.
            self._shared.out.put(DiscardContribution(self.index, event.ticket))
            return
        self._say_if_too_long(event.length)
        self.own.ready(event, now)

    def _say_if_too_long(self, length: float) -> None:
        """Say that our own contribution will be cut, or refused: first at once, then ever more rarely."""
        longest = strange_after(self.chain.header)
        self._too_long = self._too_long + 1 if length > longest else 0
        if self._too_long.bit_count() == 1:
            words = f"our own work is {length / longest:.2g} times as long as any that counts in full: "
            words += "others cut or refuse it: this learner may have diverged"
            figures = {"length": length, "longest": longest, "times": self._too_long}
            self._shared.out.record("cut", self.index, words, **figures)

    def learner_lost(self, now: float) -> None:
        """Take in that the learner crashed: what it had not copied out is gone."""
        self.own.learner_lost()
        self._flushes = False
        if self.requested:
            self.nothing_to_contribute(now)

    def learner_applied(self, event: LearnerApplied) -> None:
        """Take in against which version the learner's parameters are measured now."""
        digest = self.chain.digest_of(event.number)
        if digest is not None:
            self.own.learner_applied(event.number, digest)

    def round_for(self, header: ContributionHeader | PartialHeader) -> Round | None:
        """Find which of our rounds an offer is for; None: of no group in which we have a seat now."""
        if isinstance(header, PartialHeader):
            return self.posts.round_for(header.group)
        return self.round if header.group == self.posts.leaf.name else None

    def heard(self, peer: str, head: Head, confirmed: bool, now: float, saved: bool = False) -> None:
        """Take in which head a member holds."""
        self.witnesses.heard(peer, head, now)
        if self.follower.heads.heard(peer, head, confirmed, saved, now):
            self.touch()

    def review(self, now: float) -> None:
        """Let go of merged contributions of ours that no chain which takes the place of ours can lack."""
        if not self.own.keeps:
            return
        if self.chain.header.groups > 1:
            self.witnesses.count_merged(self._shared.config.max_base_age_versions, now)
        beyond, versions = self.witnesses.review(now)
        self.own.review(max(beyond, self.chain.final), versions)

    def flush(self) -> None:
        """Ask a leaving node's learner, once, for what it has when nothing of it is under way any more."""
        self._flushes = self._shared.learning

    def leave(self, now: float) -> bool:
        """Tell whether a leaving node's part here is over, once and for all; do the last things for it.

        A learner that goes on training must not keep us with ever new contributions, nor the members' next
        round with ever new duties.
        """
        if self._over and not self.office.holding:  # a candidacy of ours may be won late
            return True
        at_work = any(post.at_work for post in self.posts.taken)
        if at_work or not self._all_merged() or self.round.last_call(now):
            return False
        self._over = True
        self.office.lay_down("leaving")
        return True

    def _needs_syncer(self) -> bool:
        """Tell whether we leave, and something of ours is not merged yet."""
        return self._shared.leaving and not (self._over or self._all_merged())

    def _all_merged(self) -> bool:
        """Tell whether our learner had its last say and nothing of it is under way."""
        return not self._flushes and not self.requested and self.own.idle

    # --- versions ------------------------------------------------------------------------------------

    def on_announce(self, sender: str, message: Announce, confirmed: bool, now: float) -> None:
        """Take in that a new version exists."""
        if not self.context.grouped and message.head.term > self.office.term:
            self.office.on_claim(sender, message.head.term, now)
        self.follower.heads.heard(sender, message.head, confirmed, False, now)


def _pass(call: Closing) -> Pass:
    return Pass(call.group, call.fragment, call.term, call.number)

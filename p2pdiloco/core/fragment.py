"""One fragment on one node: wires chain, office, contributor, round and follower together."""

from __future__ import annotations

from p2pdiloco.core.chain import Chain
from p2pdiloco.core.common import Common
from p2pdiloco.core.config import RestoredFragment
from p2pdiloco.core.contributor import Contributor
from p2pdiloco.core.effects import DiscardContribution, RequestFragment, VoteRecord
from p2pdiloco.core.events import ContributionAnswered, ContributionReady, LearnerApplied
from p2pdiloco.core.follower import Follower
from p2pdiloco.core.inbox import Spare
from p2pdiloco.core.messages import Announce, Closing, Pass
from p2pdiloco.core.office import Office
from p2pdiloco.core.round import Round, RoundState
from p2pdiloco.core.shared import Shared
from p2pdiloco.core.types import Head


class Fragment:
    """Routes what happens to the part that it concerns, and lets the parts look again afterwards."""

    def __init__(
        self, shared: Shared, group: str, index: int, restored: RestoredFragment, vote: VoteRecord | None
    ) -> None:
        config = shared.config
        keep = max(config.log_versions, config.max_base_age_versions)
        self._shared = shared
        self.group = group
        self.index = index
        self.chain = Chain(restored.log, restored.watermarks, keep)
        self.office = Office(shared, group, index, self.chain, vote)
        self.common = Common(self.chain, shared.timing.durable_s)
        self.own = Contributor(shared, group, index, self.chain, self.office)
        spare = Spare()
        self.round = Round(shared, group, index, self.chain, self.office, self.own, spare)
        self.follower = Follower(shared, group, index, self.chain, self.office, self.own, spare, self.round)
        self.office.busy = lambda: self.round.closing
        self._asked_by: Closing | None = None
        self._asker = ""
        self.requested = False
        """The learner was asked for this fragment and has not answered yet."""
        self._settled = False
        self._remembered = -1
        self.touched = True
        """Something happened here since `deadline` was last worked out."""
        self._due_s: float | None = None

    def poll(self, now: float) -> None:
        """Let every part look at the clock and at each other."""
        self.touched = True
        self.office.poll(now)
        if self.office.changed:
            self.office.changed = False
            if not self.office.holding:
                self.round.abandon("no longer the syncer")
            self.own.office_changed(now)
        self.follower.poll(now)
        pending = self.own.next_offer(now)
        syncer = self.office.syncer
        if pending is not None and syncer is not None:
            if syncer == self._shared.me:
                self.round.offer_own(pending, now)
            else:
                self.own.send(pending, syncer, now)
        self.round.poll(now)
        if self.office.changed:
            self.poll(now)

    def deadline(self) -> float | None:
        """When to look again without being told of anything. Kept until something happens here: most events
        concern one fragment of many."""
        if self.touched:
            self.touched = False
            times = [
                self.office.deadline(),
                self.own.deadline(),
                self.round.deadline(),
                self.follower.deadline(),
            ]
            self._due_s = min((t for t in times if t is not None), default=None)
        return self._due_s

    def words(self, now: float) -> str:
        """One short phrase for people: what this fragment is doing or waiting for."""
        if self.round.state is not RoundState.IDLE:
            return self.round.words(now)
        return self.follower.words() or self.own.words() or self.office.why_open(now)

    # --- closing calls -------------------------------------------------------------------------------

    def on_closing(self, sender: str, call: Closing, now: float) -> None:
        """The syncer closes a round: send what we have, or pass at once so that nobody waits for us."""
        shared = self._shared
        if sender != self.office.syncer or call.term != self.office.term:
            shared.out.send(sender, _pass(call, "another syncer is in office"))
        elif call.number <= self.chain.head.number:
            return  # it comes late: that round is over
        elif not shared.learning:
            shared.out.send(sender, _pass(call, "no learner is running"))
        elif not self.own.idle:
            return  # what we have is on its way or held; it answers the call by itself
        else:
            self._asked_by, self._asker = call, sender
            self._request()

    def _request(self) -> None:
        if not self.requested:
            self.requested = True
            self._shared.out.put(RequestFragment(self.index))

    def nothing_to_contribute(self, now: float) -> None:
        """The learner has made no step since its last contribution."""
        self.requested = False
        if self._asked_by is not None:
            self._shared.out.send(self._asker, _pass(self._asked_by, "no inner step since the last one"))
            self._asked_by = None
        self.round.own_pass(now)

    def contribution_ready(self, event: ContributionReady, now: float) -> None:
        """The learner copied the fragment out."""
        self.requested = False
        self._asked_by = None
        if self._settled:
            # Nobody will merge it any more: it stays in the learner's displacement, which is saved.
            self._shared.out.put(DiscardContribution(self.index, event.ticket))
            return
        self.own.ready(event, now)

    def learner_lost(self, now: float) -> None:
        """The learner crashed: what it had not copied out is gone."""
        self.own.learner_lost()
        if self.requested:
            self.nothing_to_contribute(now)

    def learner_applied(self, event: LearnerApplied) -> None:
        """The learner's parameters are measured against this version now."""
        version = self.chain.logged(event.number)
        if version is not None:
            self.own.learner_applied(event.number, version.header.digest())

    def answered(self, event: ContributionAnswered, now: float) -> None:
        """A syncer's word on our contribution."""
        self.own.answered(event, now)
        if event.head is not None:
            self.heard(event.peer, event.head, True, now)

    def heard(self, peer: str, head: Head, confirmed: bool, now: float) -> None:
        """A member says which head it holds."""
        self.common.heard(peer, head, now)
        if self.follower.heard(peer, head, confirmed, now):
            self.touched = True

    def review(self, peers: list[str], now: float) -> None:
        """Let go of merged contributions that all of these peers have, and note who took part elsewhere."""
        if self.chain.replaced != self._remembered:
            self._remembered = self.chain.replaced
            self._shared.view.remember((mark.learner for mark in self.chain.table()), now)
        if self.own.keeps:
            self.own.review(self.common.review(peers, now))

    def flush(self) -> None:
        """Leaving: ask the learner for what it has, so that none of it is lost."""
        if self._shared.learning and self.own.idle:
            self._request()

    def settle(self) -> bool:
        """Leaving: whether our part here is over, once and for all. A learner that goes on training must
        not keep us with ever new contributions, nor the members' next round with ever new duties."""
        if not self._settled and not (self.requested or self.round.closing or not self.own.idle):
            self._settled = True
            self.office.lay_down("leaving")
        return self._settled

    # --- versions ------------------------------------------------------------------------------------

    def on_announce(self, sender: str, message: Announce, confirmed: bool, now: float) -> None:
        """A new version exists."""
        header = message.version.header
        if header.syncer == sender == self.office.syncer:
            self.office.trust()
        if header.term > self.office.term:
            self.office.on_claim(sender, header.term, now)
        self.follower.heard(sender, header.head(), confirmed, now)


def _pass(call: Closing, reason: str) -> Pass:
    return Pass(call.group, call.fragment, call.term, call.number, reason)

"""Posts of one fragment: taken and given up as offices and groups change.

Rules: docs/protocol/groups.md, section 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from p2pdiloco.core.api.messages import (
    Announce,
    Closing,
    Elected,
    OfficeQuery,
    Pass,
    VoteGranted,
    VoteRefused,
    VoteRequest,
)
from p2pdiloco.core.api.reasons import MessageFault, Verdict, VoteRefusal
from p2pdiloco.core.api.types import Ticket
from p2pdiloco.core.api.versions import (
    Plan,
    SignedPartial,
    parse_group,
)
from p2pdiloco.core.base import earliest
from p2pdiloco.core.chain import plan_of
from p2pdiloco.core.context import Electorate, FragmentContext
from p2pdiloco.core.contributions import ContributionQueue
from p2pdiloco.core.delegate import Delegate, LeafElectorate, Seeking, UpperElectorate
from p2pdiloco.core.election import Office
from p2pdiloco.core.inbox import GroupInbox, Inbox, LearnerInbox
from p2pdiloco.core.publisher import Hierarchy, Publisher
from p2pdiloco.core.round import Round, RoundState
from p2pdiloco.core.voting import SeenVotes


class Posts:
    """Posts from the leaf group upwards: the holder of a group's office has a post in the group above.

    Args:
        taken: the context's list of posts, empty, which is kept up to date here.
        call_learner: asks our own learner for what it has.
    """

    def __init__(
        self,
        context: FragmentContext,
        own: ContributionQueue,
        taken: list[GroupPost],
        call_learner: Callable[[], None],
        now: float,
    ) -> None:
        self._context = context
        self._shared = context.shared
        self._own = own
        self.taken = taken
        """Post of our leaf group first, then one more per level while we hold the office below it."""
        self.publisher = Publisher(context, own, self.published)
        self._call_learner = call_learner
        self._plan = self._newest_plan()
        self._sit_down(now)

    @property
    def leaf(self) -> GroupPost:
        """Post in the group in which our learner takes part."""
        return self.taken[0]

    def _newest_plan(self) -> Plan:
        return plan_of(self._context.chain.header, self._shared.config)

    def _sit_down(self, now: float) -> None:
        leaf = self._plan.leaf_of(self._shared.me)
        self.taken[:] = [GroupPost(self._context, self.publisher, self, self._plan, leaf, "", now)]

    def _is_above(self, level: int) -> bool:
        return level + 1 < len(self.taken)

    def named(self, group: str) -> GroupPost | None:
        """Find our post in that group, if we have one."""
        return next((post for post in self.taken if post.name == group), None)

    def above(self, group: str) -> GroupPost | None:
        """Find our post in the group to which the syncer of `group` belongs."""
        place = self._plan.place(group)
        if place is None or place[0] + 1 == len(self._plan.sizes):
            return None
        above = self._plan.above(place, place[0] + 1)
        return next((s for s in self.taken if (s.level, s.index) == above), None)

    # --- time ----------------------------------------------------------------------------------------

    def poll_offices(self, now: float) -> None:
        """Let every office look at the clock, and take or give up the posts that follow from it."""
        posts, level = self.taken, 0
        while level < len(posts):
            post = posts[level]
            post.office.poll(now)
            if post.office.take_change():
                self._office_changed(post, now)
            if post.seeking is not None:
                post.seeking.poll(now)
            level += 1

    def _office_changed(self, post: GroupPost, now: float) -> None:
        posts, level = self.taken, post.level
        if not post.office.holding:
            fellows = {peer for upper in posts[level + 1 :] for peer in upper.electorate.others(now)}
            for upper in reversed(posts[level + 1 :]):
                upper.give_up("no longer the syncer below", now)
            del posts[level + 1 :]
            post.round.abandon("no longer the syncer", now)
            for peer in sorted(fellows):  # they count on our claim
                self._shared.notices.greet(peer)
        elif not post.top and not self._is_above(level):
            place = self._plan.above((level, post.index), level + 1)
            above = GroupPost(self._context, self.publisher, self, self._plan, place, post.name, now)
            posts.append(above)
            if above.seeking is not None:
                above.seeking.meet(now)
        if level == 0:
            self._own.office_changed(now)
        else:
            delegate = posts[level - 1].delegate
            if delegate is not None:
                delegate.above_changed(now)

    def poll_rounds(self, now: float) -> None:
        """Let every round look at the clock, from below upwards."""
        for post in tuple(self.taken):
            if post.delegate is not None:
                post.delegate.poll(now)
            post.round.poll(now)

    @property
    def changed(self) -> bool:
        """True: an office changed since `poll_offices`."""
        return any([post.office.changed for post in self.taken])  # asked after every poll

    def deadline(self) -> float | None:
        """Find when to look again; None: nothing waits for a time."""
        return earliest([post.deadline() for post in self.taken])

    def neighbours(self, now: float) -> frozenset[str] | None:
        """List the peers to exchange heartbeats with because of this fragment; None: everybody."""
        if self._plan.groups == 1:
            return None
        leaf, *above = self.taken
        found = leaf.electorate.neighbours(now)
        return found.union(*(post.electorate.neighbours(now) for post in above)) if above else found

    def contacts(self, now: float) -> set[str]:
        """List the peers that get our heartbeats besides."""
        return set().union(*(post.contacts(now) for post in self.taken))

    def leave(self, now: float, reason: str) -> None:
        """Give up every office."""
        for post in reversed(self.taken):
            post.office.lay_down(reason)
            post.round.abandon(reason, now)

    # --- the chain -----------------------------------------------------------------------------------

    def published(self, now: float) -> None:
        """Take in a version that we made, as syncer of the topmost group."""
        for post in self.taken:
            if not post.top:
                post.round.chain_moved(now)
        self.taken[-1].office.poll(now)
        self._regroup(now)
        for post in self.taken:
            if post.top:
                post.round.poll_rest(now)

    def chain_moved(self, now: float, merged: bool) -> None:
        """Take in a version that another peer made. `merged`: with our work, or we had none."""
        if self._plan.groups > 1:
            self._relay(now)
        for post in tuple(self.taken):
            post.round.chain_moved(now)
        self._trust(merged)
        self._regroup(now)

    def _trust(self, merged: bool) -> None:
        posts = self.taken
        if merged or self._plan.groups == 1:
            posts[0].office.trust()
        for below, post in itertools.pairwise(posts):
            if below.delegate is not None and below.delegate.partial is None:
                post.office.trust()

    def _relay(self, now: float) -> None:
        """Tell those around us of the new version; they pull it from us."""
        context = self._context
        told: dict[str, None] = {}
        for post in self.taken:
            if post.office.holding:
                told.update(dict.fromkeys(post.electorate.others(now)))
        syncer = context.chain.header.syncer
        for peer in told:
            if peer != syncer:
                self._shared.out.send(peer, Announce(context.index, context.chain.head, syncer))

    def _regroup(self, now: float) -> None:
        plan = self._newest_plan()
        if plan == self._plan:
            return
        for post in reversed(self.taken):
            post.give_up("the groups rotate", now)
        self._plan = plan
        self._sit_down(now)
        leaf = self.leaf
        self._shared.out.record(
            "groups",
            self._context.index,
            "the groups rotate",
            epoch=plan.epoch,
            groups=plan.groups,
            group=leaf.name,
        )
        self._own.office_changed(now)
        self._shared.notices.regrouped(now)

    # --- from one level to another -------------------------------------------------------------------

    def call_own(self, level: int, call: Closing, now: float) -> None:
        """Call this node as a child of its own group on that level: its learner, or the group below."""
        if level == 0:
            self._call_learner()
        else:
            self.taken[level - 1].round.on_called(self._shared.me, call, now)

    def pass_up(self, peer: str, message: Pass, now: float) -> None:
        """Tell the syncer above, perhaps ourselves, that a group has nothing."""
        if peer != self._shared.me:
            self._shared.out.send(peer, message)
        else:
            self.on_pass(peer, message, now)

    def office_above(self, level: int) -> Office | None:
        """Find the office of the group above that level, if we have a post there."""
        return self.taken[level + 1].office if self._is_above(level) else None

    def hand_up(self, level: int, signed: SignedPartial, ticket: Ticket, now: float) -> Verdict:
        """Put that level's partial into our own inbox of the group above."""
        if not self._is_above(level):
            return Verdict.NOT_SYNCER
        round_ = self.taken[level + 1].round
        verdict = round_.admit_own(signed, ticket, now)
        if verdict.taken and verdict is not Verdict.ALREADY_HELD:
            round_.arrived(signed.header.group, now)
        return verdict

    def take_back(self, level: int, group: str) -> None:
        """Take that group's partial out of our own inbox of the group above, if it is there. It is not to be
        merged, unless that has begun."""
        if self._is_above(level):
            self.taken[level + 1].round.inbox.drop_own(group)

    # --- messages ------------------------------------------------------------------------------------

    def on_closing(self, sender: str, call: Closing, now: float) -> bool:
        """Take a call from above to a group of ours. False: it is for our learner, or for no one here."""
        post = self.named(call.group)
        if post is None or post.level == 0:
            return False
        if sender == post.office.syncer and call.term == post.office.term:
            self.taken[post.level - 1].round.on_called(sender, call, now)
        else:
            self._shared.out.send(sender, Pass(call.group, call.fragment, call.term, call.number))
        return True

    def on_pass(self, sender: str, message: Pass, now: float) -> None:
        """Take in that a child has nothing."""
        post = self.named(message.group)
        if post is not None:
            post.round.on_pass(sender, message, now)

    def on_vote_request(self, sender: str, request: VoteRequest, now: float) -> None:
        """Answer a candidate that wants our vote."""
        post = self.named(request.group)
        if post is not None:
            post.office.on_vote_request(sender, request, now)
            return
        head = self._context.chain.head if self._shared.confirmed else None
        reason = VoteRefusal.OTHER_EPOCH
        refusal = VoteRefused(request.group, self._context.index, request.term, 0, head, reason)
        self._shared.out.send(sender, refusal)
        self._shared.notices.greet(sender)  # it may count on a claim that we do not make any more

    def on_vote(self, sender: str, message: VoteGranted, now: float) -> MessageFault | None:
        """Count a vote for us. Returns what is wrong with it."""
        post = self.named(message.vote.body.group)
        if post is None:
            return None
        fault = post.office.on_vote(sender, message.vote, now)
        if fault is None:
            post.seen.given(message.vote, post.office.certificate)
        return fault

    def on_refused(self, sender: str, message: VoteRefused, now: float) -> None:
        """Take in that a voter refused us its vote."""
        post = self.named(message.group)
        if post is not None:
            post.office.on_refused(sender, message, now)

    def on_elected(self, sender: str, message: Elected, now: float) -> MessageFault | None:
        """Take in who is in office, in a group of ours or beside it. Returns what is wrong with the
        message."""
        certificate = message.certificate
        post = self.named(certificate.group)
        if post is not None:
            post.seen.certified(sender, certificate, post.office.certificate)
            return post.office.on_elected(sender, certificate, now)
        if self._plan.place(certificate.group) is None:
            return None
        for upper in self.taken[1:]:
            if upper.seeking is not None:
                upper.seeking.learned(certificate, now)
        return None

    def on_query(self, sender: str, query: OfficeQuery) -> None:
        """Give the certificate of that group, or of the largest group inside it that we know."""
        post = self.named(query.group)
        if post is not None:
            post.office.on_query(sender, query)
            return
        place = self._plan.place(query.group) or (0, 0)
        for post in reversed(self.taken):
            own = post.level, post.index
            inside = post.level < place[0] and self._plan.above(own, place[0]) == place
            if inside and post.office.certificate is not None:
                self._shared.out.send(sender, Elected(post.office.certificate))
                return

    def on_claim(self, peer: str, group: str, term: int, now: float) -> None:
        """Take in the claim of a heartbeat that its sender holds that office."""
        post, upper = self.named(group), self.above(group)
        if post is not None:
            post.office.on_claim(peer, term, now)
        elif upper is not None and upper.seeking is not None:
            upper.seeking.claimed(peer, group, term, now)

    def without_post(self, group: str) -> Verdict:
        """Say why there is no round of ours for what that group sends. In our epoch it is an office that we
        gave up: whoever is told so looks for another syncer."""
        ours, theirs = parse_group(self.leaf.name), parse_group(group)
        now = ours is not None and theirs is not None and ours[0] == theirs[0]
        return Verdict.NOT_SYNCER if now else Verdict.OTHER_EPOCH

    def round_for(self, group: str) -> Round | None:
        """Find the round in which a partial of that group is to be merged."""
        post = self.above(group)
        return post.round if post is not None else None


class GroupPost:
    """Post of this node in one group of a fragment: its members, its office, its rounds.

    There is one in our leaf group always, one in the group above while we hold the office below, and so on.

    Args:
        hierarchy: our other posts of that fragment.
        plan: that of the head's header.
        place: (level, index) of the group.
        below: name of the group of which we are the syncer; empty for a leaf group.
    """

    def __init__(
        self,
        context: FragmentContext,
        publisher: Publisher,
        hierarchy: Hierarchy,
        plan: Plan,
        place: tuple[int, int],
        below: str,
        now: float,
    ) -> None:
        shared, roster = context.shared, context.roster
        self.level, self.index = place
        self.name = plan.name(*place)
        self.top = self.level == len(plan.sizes) - 1
        self.seeking: Seeking | None = None
        self.electorate: Electorate
        inbox: Inbox
        if below:
            upper = UpperElectorate(shared, roster, plan, place, below, now)
            self.electorate, inbox = upper, GroupInbox(context, upper)
            self.seeking = Seeking(context, plan, upper)
        elif self.top:
            self.electorate, inbox = Electorate(shared, context.index, roster), LearnerInbox(context)
        else:
            self.electorate = LeafElectorate(shared, roster, plan, self.index, now)
            inbox = LearnerInbox(context)
        self.office = Office(context, self.name, self.electorate)
        self.seen = SeenVotes(context, self.name)
        """Votes of others, in which a second one of the same term is found."""
        self.delegate = None if self.top else Delegate(context, self.name, self.level, hierarchy)
        merger = self.delegate or publisher
        self.round = Round(
            context, self.name, self.level, self.office, self.electorate, inbox, merger, hierarchy
        )

    def deadline(self) -> float | None:
        """Find when to look again; None: nothing waits for a time."""
        times = [self.office.deadline(), self.round.deadline()]
        if self.delegate is not None:
            times.append(self.delegate.deadline())
        if self.seeking is not None:
            times.append(self.seeking.due_s)
        return earliest(times)

    def contacts(self, now: float) -> list[str]:
        """List the peers that get our heartbeats because we look for others there; they need not send us
        any."""
        return self.seeking.neighbours(now) if self.seeking is not None else []

    def give_up(self, reason: str, now: float) -> None:
        """Leave the office and drop the round: we do not belong here any more."""
        self.office.retire(reason)
        self.round.abandon(reason, now)

    @property
    def at_work(self) -> bool:
        """True: a round of ours is not at its end yet."""
        return self.round.state not in (RoundState.IDLE, RoundState.COLLECTING)

"""Membership of this node: heartbeats, becoming a full member, and leaving.

Rules: docs/protocol/belief.md, sections 4 and 5; docs/protocol/links.md, section 8; docs/protocol/rounds.md,
section 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from p2pdiloco.core.api.config import Restored
from p2pdiloco.core.api.events import (
    Confirmed,
    LearnerStatus,
    Left,
    Miscalculates,
    PresenceSeen,
    ReachChanged,
    Tried,
    TryStates,
    Undone,
    UplinkMeasured,
)
from p2pdiloco.core.api.messages import Leaving, Progress
from p2pdiloco.core.api.reasons import MessageFault, Suspicion
from p2pdiloco.core.api.types import REACH_WORDS, WHOLE_RUN, Head
from p2pdiloco.core.api.versions import MemberList, is_group, leaf_index
from p2pdiloco.core.base import WAITED_SHARE, Shared
from p2pdiloco.core.candidates import ranking
from p2pdiloco.core.capacity import asked_bits_per_s
from p2pdiloco.core.chain import LATELY_VERSIONS, LOOK_EVERY_S, Chain
from p2pdiloco.core.follower import FollowState
from p2pdiloco.core.fork_choice import Grounds
from p2pdiloco.core.fragment import Fragment


class Heartbeats:
    """Sender and receiver of `Progress`, which also notices who has fallen silent."""

    def __init__(
        self, shared: Shared, fragments: tuple[Fragment, ...], joining: Joining, genesis: bool, now: float
    ) -> None:
        self._shared = shared
        self._genesis = genesis
        self._sampled: MemberList | None = None
        self._sample: set[str] = set()
        self._fragments = fragments
        self._joining = joining
        self._news = News(tuple(f.chain for f in fragments))
        self.next_s = now
        """Time at which the next one is due."""
        self._review_at_s = now

    def poll(self, now: float) -> None:
        """Greet everybody whose turn it is; drop and record members that fell silent."""
        if now < self.next_s:
            return
        shared = self._shared
        self.next_s = now + shared.timing.heartbeat_s
        for peer in shared.view.forget_stale(now):
            for fragment in self._fragments:
                fragment.follower.heads.gone(peer)
        shared.claims.expire(now - shared.timing.member_ttl_s)
        shared.vote_disk.poll(now)
        neighbours = self._neighbours(now)
        if now >= self._review_at_s:
            self._review_at_s = now + LOOK_EVERY_S
            self._look_at_uplink(now)
            for fragment in self._fragments:
                fragment.review(now)
        for peer in shared.view.newly_silent(now, neighbours):
            shared.out.record("silent", None, "not counted on: silent or unreachable", peer=peer)
        if not shared.departed:
            whole = self.progress()
            brief = replace(whole, heads=self._news.beat()) if shared.confirmed else whole
            greeted = neighbours
            if neighbours is not None:
                greeted = neighbours.union(*(fragment.posts.contacts(now) for fragment in self._fragments))
            for peer in shared.view.to_greet(now, greeted):
                shared.out.send(peer, brief if shared.view.alive(peer, now) else whole)

    def _neighbours(self, now: float) -> set[str] | None:
        """Find the peers to exchange heartbeats with: None for everybody, while a fragment has only one
        group."""
        found: set[str] = set()
        for fragment in self._fragments:
            some = fragment.posts.neighbours(now)
            if some is None:
                return self._first_contacts()
            found |= some
        return found

    def _first_contacts(self) -> set[str] | None:
        """Choose a few members to ask for heads, if we are new in a large run; None: everybody.

        A newcomer does not know yet which groups such a run has had.
        """
        shared = self._shared
        room = 2 * shared.config.group_size
        if shared.confirmed or self._genesis or len(shared.listing) <= 2 * room:
            return None
        if self._sampled is not shared.listing:
            self._sampled = shared.listing
            others = [peer for peer, _ in shared.listing.members if peer != shared.me]
            order = ranking(shared.config.run, WHOLE_RUN, 0, 0, others)
            start = leaf_index(shared.config.run, 0, 0, max(1, len(order)), shared.me)
            self._sample = {order[(start + i) % len(order)] for i in range(room)}
        return self._sample

    def greet(self, peer: str) -> None:
        """Tell one peer at once how we stand."""
        self._shared.out.send(peer, self.progress())

    def regrouped(self, now: float) -> None:
        """Greet the members of new groups of a fragment at once."""
        self._list(now)
        self._news.all_anew()
        self.next_s = min(self.next_s, now)

    def _list(self, now: float) -> None:
        """Let the view know of the listed members that we have to do with."""
        shared, neighbours = self._shared, self._neighbours(now)
        if neighbours is None:
            for peer, incarnation in shared.listing.members:
                shared.view.listed(peer, incarnation, now)
            return
        for peer in sorted(neighbours):
            known = shared.listing.incarnation(peer)
            if known is not None:
                shared.view.listed(peer, known, now)

    def progress(self) -> Progress:
        """Make our heartbeat, with the heads of all fragments."""
        shared, learner = self._shared, self._shared.learner.status
        return Progress(
            incarnation=shared.incarnation,
            step_time_s=shared.learner.step_s,
            inner_step=learner.inner_step,
            tokens_total=learner.tokens_total,
            tokens_per_s=learner.tokens_per_s,
            loss=learner.loss,
            learning=shared.learning,
            confirmed=shared.confirmed,
            stands=shared.vote_disk.works and shared.willing,
            heads=tuple([(f.index, f.chain.head) for f in self._fragments]),
            saved=self._joining.saved and not shared.confirmed,
            reach=shared.reach,
            thin=shared.uplink.thin,
            votes=shared.vote_disk.works,
            proofs=shared.told_mark,
            offices=tuple(
                [
                    (post.name, f.index, post.office.term)
                    for f in self._fragments
                    for post in f.posts.taken
                    if post.office.holding
                ]
            ),
        )

    def tell_neighbours(self, now: float) -> None:
        """Send our heartbeat at once: there is news of us that others wait for."""
        neighbours = self._neighbours(now)
        progress = self.progress()
        for peer in self._shared.view.members(now):
            if neighbours is None or peer in neighbours:
                self._shared.out.send(peer, progress)

    def vote_disk_changed(self, reason: str, now: float) -> None:
        """Say that our disk takes votes again, or no more: elections wait for this."""
        self._shared.out.record("disk", None, reason)
        for fragment in self._fragments:
            fragment.touch()
        # Another whose disk has room again in the same moment is heard of first.
        self._shared.health.listen(now)
        self.tell_neighbours(now)

    def miscalculates(self, _event: Miscalculates, now: float) -> None:
        """Stand for no office any more: who has one signs states, and ours would be false for all others."""
        self._shared.miscalculates()
        reason = "we stand for none: this machine calculates otherwise than all others"
        self._shared.out.record("office", None, reason)
        for fragment in self._fragments:
            fragment.touch()
            for post in fragment.posts.taken:
                post.office.lay_down("this machine calculates otherwise than all others")
        self.tell_neighbours(now)

    def tell_all(self, now: float) -> None:
        """Send our heartbeat to every member at once."""
        progress = self.progress()
        for peer in self._shared.view.members(now):
            self._shared.out.send(peer, progress)

    def learner_status(self, event: LearnerStatus, now: float) -> None:
        """Take in where our own learner is. Two things are told to others at once.

        With its beginning the others' learners reckon where the schedule is; with its step time their rounds
        reckon how long to wait.
        """
        if self._shared.learner.said(event):
            self.tell_neighbours(now)

    def presence(self, event: PresenceSeen, now: float) -> None:
        """Greet the members that the DHT lists, at once."""
        self._joining.listed(event)
        self._shared.listed(event.members)
        self._list(now)
        self.next_s = min(self.next_s, now)
        self._joining.poll(now)

    def reach(self, event: ReachChanged, now: float) -> None:
        """Take in how others can reach us, and tell them soon."""
        shared = self._shared
        if shared.reached(event.reach):
            self.next_s = min(self.next_s, now)
            shared.out.record("reach", None, REACH_WORDS[event.reach] or "not known")
            for fragment in self._fragments:
                fragment.touch()

    def uplink(self, event: UplinkMeasured, now: float) -> None:
        """Take in what our uplink carries. Members are told if offices ask for more, or no longer do."""
        self._shared.uplink.measured(event.bits_per_s)
        if self._look_at_uplink(now):
            self.next_s = min(self.next_s, now)

    def _look_at_uplink(self, now: float) -> bool:
        """Tell whether what we say of our uplink is something new: learners' pace changes too."""
        shared = self._shared
        asked = asked_bits_per_s(shared.config, shared.median_step_s(now))
        if not shared.uplink.look(asked):
            return False
        thin, known = shared.uplink.thin, shared.uplink.bits_per_s
        carried = round(known) if known < math.inf else None
        reason = f"offices ask for {'more than' if thin else 'no more than'} it carries"
        shared.out.record("uplink", None, reason, bits_per_s=carried, asked_bits_per_s=round(asked))
        for fragment in self._fragments:
            fragment.touch()
        return True

    def awake(self, lag_s: float, now: float) -> None:
        """Forgive the silence of others for the time in which we did not run."""
        shared = self._shared
        shared.view.forgive(lag_s)
        for fragment in self._fragments:
            fragment.own.forgive(lag_s)
            fragment.touch()
        shared.out.record(
            "health",
            None,
            f"this node did not run for {lag_s:.1f} s: others' silence is not counted",
            lag_s=round(lag_s, 3),
        )

    def send_failed(self, peer: str, now: float) -> bool:
        """Count a failed send. Tell whether it was the failure that made the peer count as gone."""
        if now < self._shared.health.listens_until_s:
            return False  # a call that ran out while we did not run
        if self._shared.view.failed(peer):
            return True
        if self._shared.view.try_soon(peer):
            # One failure proves nothing. A second one soon tells a dead peer from a dropped connection.
            self.next_s = min(self.next_s, now + self._shared.timing.probe_s)
        return False

    def heard(self, sender: str, message: Progress, now: float) -> None:
        """Take in a heartbeat, and poll the fragments that may go ahead because of it."""
        shared = self._shared
        before = shared.view.progress(sender)
        named = [index for index, _ in message.heads]
        if named and (max(named) >= len(self._fragments) or named != sorted(set(named))):
            shared.out.record("refusal", None, str(MessageFault.WRONG_HEADS), peer=sender)
            return
        message = self._without_false_offices(sender, message)
        if not shared.view.heard(sender, message, now):
            return
        if before is None:
            shared.out.record("join", None, "heard of for the first time", peer=sender)
            self.greet(sender)
        elif message.incarnation > before.incarnation:
            self.greet(sender)
            for fragment in self._fragments:
                fragment.witnesses.restarted(sender)
                for post in fragment.posts.taken:
                    if post.office.syncer == sender:
                        post.office.suspect(Suspicion.RESTARTED)
        claimed = shared.claims.heard(sender, message.offices, now)
        moved = []
        returns = message.saved and self._joining.returning(now)
        for index, head in shared.view.heads(sender):
            fragment = self._fragments[index]
            fragment.heard(sender, head, message.confirmed, now, returns)
            ours = fragment.chain.head
            if (message.confirmed or returns) and head != ours and head.weight > ours.weight:
                moved.append(fragment)
        for group, index, term in message.offices:
            if index < len(self._fragments):
                self._fragments[index].posts.on_claim(sender, group, term, now)
        if claimed or (before is not None and before.votes != message.votes):
            moved = list(self._fragments)
        self._joining.poll(now)
        for fragment in moved:
            fragment.poll(now)

    def _without_false_offices(self, sender: str, message: Progress) -> Progress:
        """Leave out of a heartbeat the offices that there cannot be, and all of whoever can have none."""
        said = message.offices if self._shared.has_seat(sender) else ()
        real = [o for o in said if is_group(o[0]) and o[1] < len(self._fragments)]
        return message if len(real) == len(message.offices) else replace(message, offices=tuple(real))


SAID_BEATS = 4
"""Heartbeats that say a change: so many in a row are rarely lost on a link that carries any."""
ROUND_BEATS = 17
"""Heartbeats within which every head is said at least once.

A prime: where every second or fourth beat finds nobody whose turn it is, as looks at the DHT make it, a head
would else be said in just those, and never.
"""


class News:
    """Memory of what the members have been told of our heads. It chooses the heads that a heartbeat carries:
    those that changed lately, and a few others in turn.

    A head is some sixty bytes, and a run has up to hundreds of fragments. All heads twice a second to every
    member would cost a small swarm more than its elections do, and a slow link its rounds. Heartbeats get
    lost, so what changed is said several times, and what did not change is said again every few seconds.

    Rules: docs/protocol/links.md, section 8.
    """

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._chains = chains
        self._said: list[Head | None] = [None] * len(chains)
        self._until_beat = [0] * len(chains)
        self._beat = 0

    def all_anew(self) -> None:
        """Count every head as changed: there are others to tell."""
        self._said = [None] * len(self._chains)

    def beat(self) -> tuple[tuple[int, Head], ...]:
        """Choose the heads that this heartbeat carries, with their fragments; to be called once for each."""
        self._beat += 1
        carried = []
        for index, chain in enumerate(self._chains):
            if chain.head != self._said[index]:
                self._said[index] = chain.head
                self._until_beat[index] = self._beat + SAID_BEATS
            if self._beat < self._until_beat[index] or (self._beat - index) % ROUND_BEATS == 0:
                carried.append((index, chain.head))
        return tuple(carried)


class Joining:
    """Decision when this node is *confirmed*: votes, stands, and gives state to others.

    Where a confirmed member is heard, a node is confirmed once every fragment of its own is at a version that
    such a member has, or at a heavier one. Where none is heard, the whole swarm may be returning
    (docs/protocol/belief.md, section 5). Then nodes with saved state compare their heads, and take the
    heaviest of every fragment from each other. They go on when nothing heavier is left, and everybody who
    took part lately is here or has been waited for. A node with nothing saved waits for them; only with
    `--genesis` it starts a run, where nobody returns with one.
    """

    def __init__(
        self, shared: Shared, fragments: tuple[Fragment, ...], genesis: bool, restored: Restored, now: float
    ) -> None:
        self._shared = shared
        self._fragments = fragments
        self._genesis = genesis
        self.saved = restored.saved
        """True: we came with saved state."""
        self._before = {
            mark.learner
            for found in restored.fragments
            for mark in found.watermarks
            if mark.learner != shared.me
            and mark.merges
            and mark.number > found.log[-1].header.number - LATELY_VERSIONS
        }
        self._started_s = now
        self._presence_seen = False
        self._others_listed = False
        self._unreached = 0
        self.serves_saved = False
        """True: others that return with saved state may take ours, though nobody is confirmed."""

    def listed(self, event: PresenceSeen) -> None:
        """Take in what the DHT says about who is here."""
        self._presence_seen = True
        self._unreached = event.unreached
        self._others_listed = any(peer != self._shared.me for peer, _ in event.members.members)

    def returning(self, now: float) -> bool:
        """Tell whether we and others may be all that is left of the run: what they saved counts."""
        shared = self._shared
        return self.saved and not shared.confirmed and not self._believed(now)

    def _believed(self, now: float) -> list[str]:
        """List the confirmed members whose word about heads counts in a fragment that still waits for it:
        seats of another one will not tell of this."""
        open_ = [f for f in self._fragments if not f.follower.heads.verified] or self._fragments
        rosters = [fragment.context.roster.known for fragment in open_]
        confirmed = self._shared.view.confirmed(now)
        return [peer for peer in confirmed if any(peer in known for known in rosters)]

    def poll(self, now: float) -> None:
        """Look whether we may count as a full member now."""
        shared = self._shared
        if shared.confirmed:
            return
        self.serves_saved = self.returning(now)
        if all(f.follower.heads.verified for f in self._fragments):
            self._confirm("every fragment's version is confirmed by peers", now)
        elif self._presence_seen and not self._believed(now):
            self._poll_alone(now)

    def _poll_alone(self, now: float) -> None:
        shared = self._shared
        waited_s = now - self._started_s
        if self.saved:
            heaviest = not any(f.follower.behind(now) for f in self._fragments)
            if heaviest and waited_s >= self._return_patience_s(now):
                here = len(self._returned(now))
                self._confirm(f"goes on from the saved state, the heaviest of {here + 1} that return", now)
        elif (
            self._genesis
            and not shared.guidance.vouches
            and not self._returned(now)
            and waited_s >= self._genesis_patience_s(now)
        ):
            self._confirm("starts the run", now)

    def _confirm(self, reason: str, now: float) -> None:
        self._shared.confirm()
        self.serves_saved = False
        self._shared.out.record("join", None, f"full member: {reason}")
        if (grounds := self.grounds) is not None:
            basis = grounds.basis.value
            self._shared.out.record("join", None, grounds.words(), basis=basis, peer=grounds.peer)
        self._shared.out.put(Confirmed())
        self._shared.notices.confirmed(now)

    def _returned(self, now: float) -> list[str]:
        """List the members that are here with saved state, not confirmed either."""
        view = self._shared.view
        return [peer for peer in view.members(now) if (p := view.progress(peer)) is not None and p.saved]

    def _absent(self, now: float) -> set[str]:
        return self._before.difference(self._shared.view.members(now))

    def _return_patience_s(self, now: float) -> float:
        return self._shared.timing.resume_alone_s if self._absent(now) else self._genesis_patience_s(now)

    def _genesis_patience_s(self, now: float) -> float:
        """Compute how long a node listens before it starts a run.

        Others may be newcomers like itself, and say so soon. Or they hold the run's history and cannot be
        reached just now.
        """
        timing = self._shared.timing
        if self._unreached or self._shared.view.unheard(now):
            return timing.resume_alone_s
        return timing.genesis_wait_s if self._others_listed else 0.0

    @property
    def grounds(self) -> Grounds | None:
        """Weakest grounds on which any fragment was taken; None: none was taken from others at the start."""
        found = [fragment.follower.heads.grounds for fragment in self._fragments]
        known = [grounds for grounds in found if grounds is not None]
        return max(known, key=lambda grounds: grounds.basis.rank, default=None)

    def waits_for(self, now: float) -> str:
        """Say for people why we are not a full member yet; empty if we are."""
        view = self._shared.view
        if self._shared.confirmed:
            return ""
        if any(f.follower.heads.waits for f in self._fragments):
            here, of = len(view.confirmed(now)), len(self._shared.guidance.witnesses)
            return f"one of the {of} members that the run's owner vouched for; {here} others are here"
        if any(f.follower.held for f in self._fragments):
            return "the members' states to be tried on this node's data"
        if self._believed(now):
            return "the state of the members"
        if self.saved:
            if any(f.follower.behind(now) for f in self._fragments):
                return "a heavier saved state of others that return"
            return f"{len(self._absent(now))} that took part before"
        returned = self._returned(now)
        if returned:
            return f"{len(returned)} members that return with saved state"
        here = len(view.members(now))
        return f"somebody with the run's state; {here} are here without" if here else "a member"


class Trial:
    """Trial of states that others gave, on this node's own data, before they are taken.

    All that are on their way are tried together, and taken or not together: parts of one model, they are of
    one time, and beside older ones they are worse. If they are worse than ours, we go on from ours, and try
    others' again later. Where nothing can be measured, they are taken.

    Rules: docs/protocol/belief.md, section 4.
    """

    def __init__(self, shared: Shared, fragments: tuple[Fragment, ...]) -> None:
        self._shared = shared
        self._fragments = fragments
        self._since_s = math.inf
        """Time at which the first one came."""
        self._under_way = False
        self.untried = ""
        """Reason why the last state that came was taken without a trial; empty: it was tried."""

    def poll(self, now: float) -> None:
        """Begin, once all that are on their way are here."""
        held = tuple(f.index for f in self._fragments if f.follower.held)
        if self._under_way or not held:
            return
        self._since_s = min(self._since_s, now)
        others = [fragment.follower for fragment in self._fragments if not fragment.follower.held]
        comes = any(follower.state is FollowState.COPYING for follower in others)
        due_s = self._since_s + self._shared.timing.resume_alone_s
        soon = now < due_s and any(follower.behind(now) for follower in others)
        if not (comes or soon):
            self._under_way, self._since_s = True, math.inf
            self._shared.out.ask(TryStates(held), partial(self._over, held))

    def _over(self, held: tuple[int, ...], answer: Tried | Undone, now: float) -> None:
        self._under_way = False
        passed = isinstance(answer, Undone) or answer.passed
        self.untried = answer.reason if isinstance(answer, Undone) else ""
        words = f"taken untried: {answer.reason}" if isinstance(answer, Undone) else answer.words
        self._shared.out.record("catchup", None, words, passed=passed, tried=len(held))
        for index in held:
            self._fragments[index].follower.tried(passed, now)


class Departure:
    """Way from the operator's wish to `Left`, in bounded time.

    What is in flight is finished, and offices are handed over; then comes the good-bye.

    Rules: docs/protocol/rounds.md, section 7.
    """

    def __init__(self, shared: Shared, fragments: tuple[Fragment, ...]) -> None:
        self._shared = shared
        self._fragments = fragments
        self._leave_by_s: float | None = None

    def deadline(self) -> float | None:
        """Time at which our patience ends; None: we are not leaving, or have left."""
        return None if self._shared.departed else self._leave_by_s

    def begin(self, now: float) -> bool:
        """Begin to leave, as the operator wants. False: we leave already."""
        if self._leave_by_s is not None:
            return False
        leave_s = self._shared.timing.leave_s
        self._shared.leave(now + WAITED_SHARE * leave_s)
        self._leave_by_s = now + leave_s
        alone = not self._shared.view.live(now)
        for fragment in self._fragments:
            if self._shared.confirmed and (fragment.office.holding or not alone):
                fragment.flush()
        return True

    def _handed_over(self, now: float) -> bool:
        """Tell whether another member holds the newest versions that we made: else they would go away with
        us."""
        shared, view = self._shared, self._shared.view
        others = [peer for peer in view.live(now) if (p := view.progress(peer)) and p.confirmed]
        others = [peer for peer in others if shared.has_seat(peer)] or others
        made = [f for f in self._fragments if f.chain.signed.header.syncer == shared.me]
        return not others or all(
            any((h := view.head(peer, f.index)) and h.number >= f.chain.head.number for peer in others)
            for f in made
        )

    def poll(self, now: float) -> None:
        """Go, once nothing of ours is pending or our patience is over."""
        if self._leave_by_s is None or self._shared.departed:
            return
        remaining = [f for f in self._fragments if not f.leave(now)]
        helped = bool(self._shared.view.live(now))
        waits = any(helped or f.office.holding for f in remaining) or not self._handed_over(now)
        if now < self._leave_by_s and waits:
            return
        making = any(post.round.busy for f in self._fragments for post in f.posts.taken)
        for fragment in self._fragments:
            fragment.posts.leave(now, "leaving")
        heads = () if making else tuple(f.chain.head for f in self._fragments)
        for peer in self._shared.view.members(now):
            self._shared.out.send(peer, Leaving(self._shared.incarnation, heads))
        reason = (
            f"{len(remaining)} contributions were not merged in time" if remaining else "nothing was pending"
        )
        self._shared.out.record("leave", None, reason)
        self._shared.out.put(Left())
        self._shared.depart()


def in_one(older: Progress, newer: Progress) -> Progress:
    """Merge two heartbeats: the newer one, with heads that only the older, unsent one carries."""
    if older.incarnation != newer.incarnation:
        return newer
    return replace(newer, heads=tuple(sorted((dict(older.heads) | dict(newer.heads)).items())))

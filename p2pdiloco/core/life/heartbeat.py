"""Heartbeats: what we tell the members every half second, and what we learn from theirs.

Rules: docs/protocol/membership.md, section 2.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from p2pdiloco.core.api.events import LearnerStatus, Miscalculates, PresenceSeen, ReachChanged, UplinkMeasured
from p2pdiloco.core.api.grouping import Roster, is_group, leaf_index
from p2pdiloco.core.api.messages import Progress
from p2pdiloco.core.api.reach import WORDS
from p2pdiloco.core.api.reasons import MessageFault, Suspicion
from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.core.election.rendezvous import ranking
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.life.joining import Joining
from p2pdiloco.core.life.news import News
from p2pdiloco.core.members.vote_disk import HEARD_S
from p2pdiloco.core.shared import Shared
from p2pdiloco.core.uplinks.uplink import asked_bits_per_s

UNPROVEN_OFFICES = 64
"""Limit of offices that a peer without a mark may claim: they are kept for as long as it is heard."""
REVIEW_EVERY_S = 2.0
"""Interval at which merged contributions that everybody has are looked for."""


class Heartbeats:
    """Sender and receiver of `Progress`, which also notices who has fallen silent."""

    def __init__(
        self, shared: Shared, fragments: tuple[Fragment, ...], joining: Joining, genesis: bool, now: float
    ) -> None:
        self._shared = shared
        self._genesis = genesis
        self._sampled: Roster | None = None
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
            self._review_at_s = now + REVIEW_EVERY_S
            self._look_at_uplink(now)
            peers = shared.view.may_fork(now, shared.roster, neighbours)
            strangers = [peer for peer in peers if not shared.trusts(peer)]
            if strangers:
                peers = [peer for peer in peers if shared.trusts(peer)]
            for fragment in self._fragments:
                fragment.review(peers, strangers, now)
        for peer in shared.view.newly_silent(now, neighbours):
            shared.out.record("silent", None, "not counted on: silent or unreachable", peer=peer)
        if not shared.departed:
            whole = self.progress()
            brief = replace(whole, heads=self._news.beat()) if shared.confirmed else whole
            greeted = neighbours
            if neighbours is not None:
                greeted = neighbours.union(*(fragment.seats.contacts(now) for fragment in self._fragments))
            for peer in shared.view.to_greet(now, greeted):
                shared.out.send(peer, brief if shared.view.alive(peer, now) else whole)

    def _neighbours(self, now: float) -> set[str] | None:
        """Find the peers to exchange heartbeats with: None for everybody, while a fragment has only one
        group."""
        found: set[str] = set()
        for fragment in self._fragments:
            some = fragment.seats.neighbours(now)
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
        if shared.confirmed or self._genesis or len(shared.roster) <= 2 * room:
            return None
        if self._sampled is not shared.roster:
            self._sampled = shared.roster
            others = [peer for peer, _ in shared.roster.members if peer != shared.me]
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
            for peer, incarnation in shared.roster.members:
                shared.view.listed(peer, incarnation, now)
            return
        for peer in sorted(neighbours):
            known = shared.roster.incarnation(peer)
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
            proofs=shared.excluded.mark,
            offices=tuple(
                [
                    (seat.name, f.index, seat.office.term)
                    for f in self._fragments
                    for seat in f.seats.taken
                    if seat.office.holding
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
            for seat in fragment.seats.taken:
                seat.office.stand_later(now + HEARD_S)
        self.tell_neighbours(now)

    def miscalculates(self, _event: Miscalculates, now: float) -> None:
        """Stand for no office any more: who has one signs states, and ours would be false for all others."""
        self._shared.miscalculates()
        reason = "we stand for none: this machine calculates otherwise than all others"
        self._shared.out.record("office", None, reason)
        for fragment in self._fragments:
            fragment.touch()
            for seat in fragment.seats.taken:
                seat.office.lay_down("this machine calculates otherwise than all others")
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
            shared.out.record("reach", None, WORDS[event.reach] or "not known")
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
        if not shared.uplink.look(asked, now):
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
                for seat in fragment.seats.taken:
                    if seat.office.syncer == sender:
                        seat.office.suspect(Suspicion.RESTARTED)
        claimed = shared.claims.heard(sender, message.offices, now)
        if before is not None and (
            (claimed and self._beside(message)) or self._stranger(sender, message, now)
        ):
            self.greet(sender)
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
                self._fragments[index].seats.on_claim(sender, group, term, now)
        if claimed or (before is not None and before.votes != message.votes):
            moved = list(self._fragments)
        self._joining.poll(now)
        for fragment in moved:
            fragment.poll(now)

    def _without_false_offices(self, sender: str, message: Progress) -> Progress:
        """Leave out of a heartbeat the offices that there cannot be, and of a stranger's those beyond the
        limit."""
        most = len(message.offices) if self._shared.has_worked(sender) else UNPROVEN_OFFICES
        real = [o for o in message.offices[:most] if is_group(o[0]) and o[1] < len(self._fragments)]
        return message if len(real) == len(message.offices) else replace(message, offices=tuple(real))

    def _beside(self, message: Progress) -> bool:
        """Tell whether the sender holds an office beside one of ours: then it is to know of ours."""
        return any(
            index < len(self._fragments) and self._fragments[index].seats.beside(group)
            for group, index, _ in message.offices
        )

    def _stranger(self, sender: str, message: Progress, now: float) -> bool:
        """Tell whether the sender is a newcomer that we would not greet by ourselves."""
        if message.confirmed:
            return False
        neighbours = self._neighbours(now)
        return neighbours is not None and sender not in neighbours

"""State that the fragments of one node share, and how it is told, timed and guided.

`Shared` is that state; its effects go into an `Outbox`. `Guidance` says whom a node that begins with nothing
believes. The functions compute pauses, and how long a syncer or learner waits (the grace window is that of
Decoupled DiLoCo, arXiv 2604.21428).

Rules: docs/protocol/rounds.md, section 3; docs/protocol/belief.md, section 5.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from p2pdiloco.core.api.config import CoreConfig, Timing
from p2pdiloco.core.api.events import Ask, Effect, Record, Send
from p2pdiloco.core.api.messages import Message
from p2pdiloco.core.api.papers import Word
from p2pdiloco.core.api.reasons import Basis
from p2pdiloco.core.api.types import Crypto, Reach, Vouch, Wire, signed_bytes
from p2pdiloco.core.api.versions import MemberList
from p2pdiloco.core.audit_state import Accusations, Audits, LossAudits
from p2pdiloco.core.capacity import OwnUplink, VoteDisk
from p2pdiloco.core.distrust import Cause, Distrust, Excluded
from p2pdiloco.core.members import Claims, Derived, Health, OwnLearner, View
from p2pdiloco.core.roster import Papers, Roster
from p2pdiloco.errors import invariant


@dataclass(frozen=True)
class Notices:
    """Ways to tell the rest of the node at once what it, or others, wait for."""

    greet: Callable[[str], None]
    """Tells one peer how we stand."""
    confirmed: Callable[[float], None]
    """Says that we are a full member."""
    moved: Callable[[float], None]
    """Says that a fragment holds another peer's version."""
    regrouped: Callable[[float], None]
    """Says that the groups of a fragment changed: there are others to be known."""
    vote_disk: Callable[[str, float], None]
    """Says, with the reason, that our disk takes votes again, or no more."""


MAX_STEP_S = 3600.0
"""Longest inner step that counts in an average, in seconds. Peers may say anything, infinity included."""


class Shared:
    """State of the node that its fragments read; the life of the node tells it what changes."""

    def __init__(
        self,
        config: CoreConfig,
        me: str,
        incarnation: int,
        crypto: Crypto,
        rng: random.Random,
        notices: Notices,
    ) -> None:
        self.config = config
        self.timing = config.timing
        self.me = me
        self.incarnation = incarnation
        self.crypto = crypto
        self.rng = rng
        self.notices = notices
        self.out = Outbox()
        self.health = Health(config.timing)
        self.papers = Papers(config.run, config.owners, crypto.verify)
        self.excluded = Excluded(config.run, me, crypto.verify, self._is_known, self.has_seat)
        """Members that are shown to have lied."""
        self.view = View(me, config.timing, self.has_seat, self.excluded)
        self.derived = Derived()
        self.guidance = Guidance(self.view, config.timing)
        """Guidance on whom to believe, if we began with nothing."""
        self.confirmed = False
        """True: this node holds versions that peers confirm, so it votes, stands, and serves."""
        self.vote_disk = VoteDisk(notices.vote_disk, config.timing.suspect_s)
        """Ability to save votes: while it is lost, this node neither votes nor stands."""
        self.reach = Reach.DIRECT
        """Ways in which others can reach us."""
        self.uplink = OwnUplink()
        self.learner = OwnLearner()
        self.exact = True
        """False: this machine calculates otherwise than all others, and its versions would be false."""
        self.leaving = False
        self.gather_until_s = -math.inf
        """End of the time for which rounds of a leaving node wait for live learners: if all leave, none is to
        come back."""
        self.departed = False
        """True: nothing is offered any more; what is unmerged now is for our next life."""
        self._listed = self.listing = MemberList(())
        """Members that are listed, as far as we know."""
        self.claims = Claims(config.fragments)
        self.audits = Audits()
        self.distrust = Distrust()
        """Peers that disappointed us."""
        self.accusations = Accusations(self.distrust)
        """Accusations of others that wait for an audit of ours."""
        drawing = random.Random(rng.random() if config.loss_audits else 0)
        self.loss_audits = LossAudits(config.loss_audits, drawing, self.distrust)
        self._rosters: list[Roster] = []
        """One for each fragment."""
        self._answer_times: dict[int, AnswerTime] = {}
        self._paces_at_s = -1e18
        self._median_s = self._fastest_s = 0.0

    def keep(self, roster: Roster) -> None:
        """Ask one more fragment's chain who has a seat."""
        self._rosters.append(roster)

    def has_mark(self, peer: str) -> bool:
        """Tell whether that peer has a mark in any fragment's chain: something of it was merged."""
        return any(roster.has_worked(peer) for roster in self._rosters)

    def has_seat(self, peer: str) -> bool:
        """Tell whether that peer has a seat in any fragment, or may have one soon."""
        return any(peer in roster.known for roster in self._rosters)

    def awaits(self, word: Word) -> bool:
        """Tell whether a seat's word may change the table of any fragment."""
        return any(roster.awaits(word) for roster in self._rosters)

    @property
    def told_mark(self) -> int:
        """Number by which two nodes see whether both know the same proofs and words of seats; 0: of none."""
        return (self.excluded.mark + self.papers.mark) % (1 << 56)

    def takes_part(self, peer: str) -> bool:
        """Tell whether that peer has a seat, or something of it was merged."""
        return self.has_seat(peer) or self.has_mark(peer)

    def _is_known(self, peer: str) -> bool:
        """Tell whether that peer takes part, or had a seat."""
        return self.takes_part(peer) or any(roster.marks.seat(peer) for roster in self._rosters)

    def confirm(self) -> None:
        """Count this node as a full member from now on."""
        self.confirmed = True

    def miscalculates(self) -> None:
        """Note that this machine calculates otherwise than all others."""
        self.exact = False

    def leave(self, gather_until_s: float) -> None:
        """Begin to leave; rounds of ours wait for live learners until that time."""
        self.leaving, self.gather_until_s = True, gather_until_s

    def depart(self) -> None:
        """Offer nothing any more: leaving is complete."""
        self.departed = True

    def listed(self, members: MemberList) -> None:
        """Take in which members are listed."""
        self._listed = members
        self.listing = self._without_excluded()

    def _without_excluded(self) -> MemberList:
        members = self._listed.members
        left = tuple(member for member in members if member[0] not in self.excluded)
        return self._listed if len(left) == len(members) else MemberList(left)

    def exclude(self, peer: str, now: float) -> None:
        """Let a peer count for nothing any more, for good."""
        self.view.exclude(peer)
        self.claims.heard(peer, (), now)
        self.listing = self._without_excluded()

    def reached(self, reach: Reach) -> bool:
        """Take in how others can reach us. Tell whether that is news."""
        news, self.reach = reach is not self.reach, reach
        return news

    @property
    def willing(self) -> bool:
        """True: we would be syncer."""
        return self.exact and not self.leaving

    @property
    def learning(self) -> bool:
        """True: this node's learner runs."""
        return self.learner.running

    def answer_time(self, level: int) -> AnswerTime:
        """Find how long calls are answered that we sent as a syncer on that level, whatever the fragment."""
        return self._answer_times.setdefault(level, AnswerTime())

    def sign(self, domain: str, value: Wire) -> bytes:
        """Sign a wire value."""
        return self.crypto.sign(signed_bytes(domain, value))

    def signed_by(self, peer: str, domain: str, value: Wire, signature: bytes) -> bool:
        """Tell whether that peer signed the wire value."""
        return self.crypto.verify(peer, signed_bytes(domain, value), signature)

    @property
    def votes(self) -> bool:
        """True: we have a vote."""
        return self.confirmed and self.vote_disk.works

    def voters(self, now: float) -> list[str]:
        """List everyone that counts in a majority now, oneself included with a vote."""
        others = self.view.voters(now)
        return self.derived.of("voters", self.with_me, others) if self.votes else others

    def expected_learners(self, now: float) -> list[str]:
        """List the live learners that a round waits for, oneself included."""
        others = self.view.live_learners(now)
        if expelled := self.distrust.noted[Cause.USELESS]:
            others = [peer for peer in others if peer not in expelled]
        return self.derived.of("learners", self.with_me, others) if self.learning else others

    def training(self, now: float) -> tuple[int, int]:
        """Count the learners that train, all and those with a seat; our own, too, which may be about to say
        so."""
        learners = {*self.expected_learners(now), self.me}
        return len(learners), sum(map(self.has_seat, learners))

    def with_me(self, others: list[str]) -> list[str]:
        """List these others and oneself, sorted."""
        return sorted([*others, self.me])

    def median_step_s(self, now: float) -> float:
        """Median inner step time of the live learners, 0 if none is known; looked at anew a few times a
        second."""
        self._look_at_paces(now)
        return self._median_s

    def fastest_step_s(self, now: float) -> float:
        """Inner step time of the fastest live learner, by its own word; 0 if none is known."""
        self._look_at_paces(now)
        return self._fastest_s

    def _look_at_paces(self, now: float) -> None:
        if abs(now - self._paces_at_s) <= self.timing.heartbeat_s / 2:
            return
        self._paces_at_s = now
        everybody = self.view.live_learners(now)
        learners = list(filter(self.has_seat, everybody)) or everybody
        said = [progress.step_time_s for peer in learners if (progress := self.view.progress(peer))]
        own = [self.learner.step_s] if self.learning and self.learner.step_s > 0 else []
        times = sorted(t for t in own + said if 0 < t <= MAX_STEP_S)
        self._median_s, self._fastest_s = (median(times), times[0]) if times else (0.0, 0.0)


class Asked(NamedTuple):
    """Effect that is to be answered."""

    effect: Effect
    fragment: int | None
    """Fragment that looks at everything again after the answer; None: all do."""
    heard: Callable[[Any, float], None]
    """Taker of the answer, at its time."""


class Outbox:
    """Effects that one `handle` call wants carried out, in order. What must be answered gets a token."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self._next_token = 1
        self._asked: dict[int, Asked] = {}

    def put(self, effect: Effect) -> None:
        """Append one effect."""
        self._effects.append(effect)

    def send(self, peer: str, message: Message) -> None:
        """Append a message."""
        self._effects.append(Send(peer, message))

    def ask(self, effect: Effect, heard: Callable[[Any, float], None], fragment: int | None = None) -> int:
        """Append an effect that is answered once. Returns its token."""
        token, self._next_token = self._next_token, self._next_token + 1
        self._asked[token] = Asked(effect, fragment, heard)
        self._effects.append(Ask(token, effect))
        return token

    def answered(self, token: int) -> Asked:
        """Take out what was asked under that token."""
        invariant(token in self._asked, f"nothing is asked under token {token}")
        return self._asked.pop(token)

    def record(
        self, kind: str, fragment: int | None, reason: str, **fields: str | int | float | bool | None
    ) -> None:
        """Append a line for people."""
        self._effects.append(Record(kind, fragment, reason, tuple(fields.items())))

    def cut(self, fragment: int, learners: Iterable[str], me: str) -> None:
        """Append a line for every one of these learners but us whose contribution was cut."""
        for learner in learners:
            if learner != me:
                self.record("cut", fragment, "too long to count in full: cut", peer=learner)

    def take(self) -> list[Effect]:
        """Take all effects so far, in order; the outbox is empty afterwards."""
        effects, self._effects = self._effects, []
        return effects


class Guidance:
    """Guidance of a node that begins with nothing: whom its person and the run's owner named to believe.

    It is the same for all fragments of the node.

    1. What the owner vouched for: members that had worked by then. What most of those that are here stand on
       is the run; without any of them a newcomer waits.
    2. Else a peer that the person named to join through, as long as it is here.
    3. Else what most confirmed members stand on.

    Rules: docs/protocol/belief.md, section 5.
    """

    def __init__(self, view: View, timing: Timing) -> None:
        self._view = view
        self._timing = timing
        self.fresh = False
        """True: this life began with nothing saved, so that others' word is all that there is."""
        self.anchors: frozenset[str] = frozenset()
        """Peers that the person named to join through, and that are members."""
        self.vouches: dict[int, Vouch] = {}
        """Newest word of the owner, by fragment."""
        self.witnesses: frozenset[str] = frozenset()
        """Members that had worked when the owner vouched."""
        self._first_s = math.inf
        """Time since which confirmed members are here."""

    def begin_with_nothing(self) -> None:
        """Note that nothing was saved."""
        self.fresh = True

    def told(self, anchors: tuple[str, ...], vouches: tuple[Vouch, ...]) -> None:
        """Take in what person and owner say now."""
        self.anchors = frozenset(anchors)
        self.vouches = {vouch.fragment: vouch for vouch in vouches}
        self.witnesses = frozenset(peer for vouch in vouches for peer in vouch.members)

    def hears(self, now: float) -> None:
        """Note that a confirmed member was heard."""
        self._first_s = min(self._first_s, now)

    def basis(self, fragment: int, confirmed: list[str], now: float) -> Basis:
        """Choose whose word counts now: a joined peer's if it is confirmed, or may turn out to be."""
        if fragment in self.vouches:
            return Basis.VOUCHED
        late = now >= self._first_s + self._timing.resume_alone_s
        joined = any(p in confirmed or not (late or self._view.progress(p)) for p in self.anchors)
        return Basis.JOINED if joined else Basis.MOST

    def heard_enough(self, now: float) -> bool:
        """Tell whether everybody who is listed has spoken, or had the time to."""
        waited_s = now - self._first_s
        return waited_s >= self._timing.genesis_wait_s or (waited_s >= 0 and not self._view.unheard(now))


WAITED_SHARE = 0.75
"""Share of a time that a round may wait: of the sync interval, H inner steps, for answers to its closing
call; of the patience of those that are in, for payloads on their way; of the window above, or of the time
that leaving may take. A merge and a version follow."""

RHYTHM_SHARE = 0.5
"""Share of the time that the fastest learner takes for H inner steps: no round begins sooner after a
version."""
WAITED_INTERVALS = 16
"""Sync intervals for which a round that no majority is in waits for payloads that are on their way, or for
somebody else to hold its syncer's last version."""


class AnswerTime:
    """Time until the last live learner has answered a closing call.

    Smoothed mean and mean deviation with the weights of TCP's retransmission timer (RFC 6298): samples have a
    long tail, and waiting for nearly all of them costs nothing in the rounds in which all answer sooner.
    """

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def add(self, sample_s: float) -> None:
        """Take in how long after the call a round's last answer came (or had not come by then)."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = sample_s, sample_s / 2
            return
        self._deviation_s += (abs(sample_s - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (sample_s - self._mean_s) / 8

    @property
    def expected_s(self) -> float:
        """Time in which nearly all answers are in; infinite while nothing is known. A new syncer's first
        round waits as long as it may: else it would close before anybody's answer and learn from that."""
        return math.inf if self._mean_s is None else self._mean_s + 4 * self._deviation_s


def grace_window_s(
    delay_steps: int,
    step_s: float,
    quorum_s: float,
    sync_s: float,
    fraction: float,
    cap_s: float,
    answer_s: float = 0.0,
) -> float:
    """Compute how long a syncer waits after quorum: min(max(gamma * slack, answer time), cap), never
    negative.

    slack = tau * xi_step - (xi_quorum + xi_sync), as in the paper: the result is still back before step t +
    tau. Where tau steps are shorter than a message's way there and back, nobody could answer in that time;
    hence `answer_s`, what answers are expected to take, within `answer_bound_s`.
    """
    slack_s = delay_steps * step_s - (quorum_s + sync_s)
    return max(0.0, min(max(fraction * slack_s, answer_s), cap_s))


def answer_bound_s(inner_steps: int, step_s: float) -> float:
    """Compute the most that is waited beyond the slack: a share (`WAITED_SHARE`) of the time between two
    contributions of a learner, so that a round has ended before the next one is due."""
    return WAITED_SHARE * inner_steps * step_s


def patience_s(floor_s: float, round_s: float, delay_steps: int, step_s: float) -> float:
    """Compute how long a learner waits for the version that contains what its syncer took: four times what
    such rounds take, their payloads' way included, or four times tau inner steps."""
    return max(floor_s, 4 * round_s, 4 * delay_steps * step_s)


def earliest(times: Iterable[float | None]) -> float | None:
    """Find the first of these times, None if there is none. A loop, since it is asked after every event."""
    first_s = None
    for time_s in times:
        if time_s is not None and (first_s is None or time_s < first_s):
            first_s = time_s
    return first_s

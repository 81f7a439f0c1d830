"""State of one node that its fragments share."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from p2pdiloco.core.api.config import CoreConfig
from p2pdiloco.core.api.grouping import Roster
from p2pdiloco.core.api.reach import Reach
from p2pdiloco.core.api.types import Crypto, Wire, signed_bytes
from p2pdiloco.core.audits.accusations import Accusations
from p2pdiloco.core.audits.distrust import Distrust
from p2pdiloco.core.audits.loss.loss_audits import LossAudits
from p2pdiloco.core.audits.permission import Audits
from p2pdiloco.core.members.answers import Answers
from p2pdiloco.core.members.claims import Claims
from p2pdiloco.core.members.derived import Derived
from p2pdiloco.core.members.guidance import Guidance
from p2pdiloco.core.members.health import Health
from p2pdiloco.core.members.own_learner import OwnLearner
from p2pdiloco.core.members.view import View
from p2pdiloco.core.members.vote_disk import VoteDisk
from p2pdiloco.core.outbox import Outbox
from p2pdiloco.core.proofs.excluded import Excluded
from p2pdiloco.core.timing import AnswerTime
from p2pdiloco.core.uplinks.uplink import OwnUplink

MAX_STEP_S = 3600.0
"""Longest inner step that counts in an average, in seconds. Peers may say anything, infinity included."""


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


class WorkRecord(Protocol):
    """Record of who has worked, by one fragment's chain (`core.members.standing`)."""

    def has(self, peer: str) -> bool:
        """Tell whether that peer has a mark."""

    def voters(self) -> frozenset[str]:
        """List the peers that vote."""

    @property
    def number(self) -> int:
        """Number of the newest version."""


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
        self.health = Health()
        self.excluded = Excluded(config.run, me, crypto.verify, self.has_worked, self.has_vote)
        """Members that are shown to have lied."""
        self.view = View(me, config.timing, self.has_worked, self.excluded)
        self.derived = Derived()
        self.answers = Answers()
        """Peers that do not answer when they are asked for their votes."""
        self.guidance = Guidance(self.view, config.timing)
        """Guidance on whom to believe, if we began with nothing."""
        self.confirmed = False
        """True: this node holds versions that peers confirm, so it votes, stands, and serves."""
        self.vote_disk = VoteDisk(notices.vote_disk)
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
        self._listed = self.roster = Roster(())
        """Members that are listed, as far as we know."""
        self.claims = Claims(config.fragments)
        self.audits = Audits()
        self.accusations = Accusations()
        """Accusations of others that wait for an audit of ours."""
        self.distrust = Distrust()
        """Members that are counted on in no office: a merge of theirs was false."""
        drawing = random.Random(rng.random() if config.loss_audits else 0)
        self.loss_audits = LossAudits(config.loss_audits, drawing)
        """Loss audits, and whom they have expelled."""
        self._records: list[WorkRecord] = []
        """Records of who has worked, one for each fragment."""
        self._answer_times: dict[int, AnswerTime] = {}
        self._paces_at_s = -1e18
        self._median_s = self._fastest_s = 0.0

    def keep(self, record: WorkRecord) -> None:
        """Ask one more fragment's chain who has worked."""
        self._records.append(record)

    def has_mark(self, peer: str) -> bool:
        """Tell whether that peer has a mark in any fragment's chain: something of it was merged."""
        return any(record.has(peer) for record in self._records)

    def has_worked(self, peer: str) -> bool:
        """Tell whether that peer counts by its work. Before anybody votes by any chain, everybody does."""
        return self.has_mark(peer) or not any(record.voters() for record in self._records)

    def has_vote(self, peer: str) -> bool:
        """Tell whether that peer votes by any fragment's chain. Before anybody does, everybody does."""
        voters = [record.voters() for record in self._records]
        return any(peer in each for each in voters) or not any(voters)

    @property
    def newest_number(self) -> int:
        """Number of the newest version of any fragment: so old is the run."""
        return max((record.number for record in self._records), default=0)

    def trusts(self, peer: str) -> bool:
        """Tell whether that confirmed peer's word counts, whoever else is here: it has worked, or was let in
        by the run's owner."""
        return (self.config.admits or self.has_worked(peer)) and peer not in self.excluded

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

    def listed(self, members: Roster) -> None:
        """Take in which members are listed."""
        self._listed = members
        self.roster = self._without_excluded()

    def _without_excluded(self) -> Roster:
        members = self._listed.members
        left = tuple(member for member in members if member[0] not in self.excluded)
        return self._listed if len(left) == len(members) else Roster(left)

    def exclude(self, peer: str, now: float) -> None:
        """Let a peer count for nothing any more, for good."""
        self.view.exclude(peer)
        self.claims.heard(peer, (), now)
        self.answers.came(peer)
        self.roster = self._without_excluded()

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
        if self.loss_audits.expels:
            others = [peer for peer in others if peer not in self.loss_audits]
        return self.derived.of("learners", self.with_me, others) if self.learning else others

    def training(self, now: float) -> int:
        """Count the learners that train, our own included, which may be about to say so."""
        return len(self.expected_learners(now)) + (not self.learning)

    @property
    def expected_members(self) -> int:
        """Members that the run was to have at its start; 0: nobody knows."""
        return self.config.expected_members

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
        learners = filter(self.has_worked, self.view.live_learners(now))
        said = [progress.step_time_s for peer in learners if (progress := self.view.progress(peer))]
        own = [self.learner.step_s] if self.learning and self.learner.step_s > 0 else []
        times = sorted(t for t in own + said if 0 < t <= MAX_STEP_S)
        self._median_s, self._fastest_s = (median(times), times[0]) if times else (0.0, 0.0)

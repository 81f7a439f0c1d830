"""Members of the run as one node sees them: who is here, who counts, who may come back."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable
from typing import Any, TypeVar, cast

from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.events import LearnerStatus
from p2pdiloco.core.api.messages import Progress
from p2pdiloco.core.api.types import MAX_PEERS, WHOLE_RUN, Head, Reach
from p2pdiloco.util import MovingAverage

MUTE_S = 30.0
"""Time without an answer to requests for a vote after which a member counts in no majority, until it answers
one."""
NEWCOMERS_A_BEAT = 256
"""Limit of peers without a seat that get our heartbeat at one time: more than a group has. Of more, each has
its turn."""


class KnownPeer:
    """Knowledge of one peer."""

    __slots__ = (
        "failures",
        "heads",
        "heard_s",
        "incarnation",
        "left_incarnation",
        "listed_s",
        "progress",
        "tried_s",
    )

    def __init__(self) -> None:
        self.incarnation = 0
        self.left_incarnation = 0
        self.progress: Progress | None = None
        self.heads: dict[int, Head] = {}
        """Newest head that it named of every fragment, in this incarnation."""
        self.heard_s = -1e18
        self.listed_s = -1e18
        self.tried_s = -1e18
        self.failures = 0


class _Lists:
    """Lists of members by kind, valid from `from_s` until (excluding) `until_s`, unless something happens."""

    __slots__ = ("confirmed", "from_s", "learners", "live", "members", "until_s", "voters")

    def __init__(self, from_s: float) -> None:
        self.from_s = from_s
        self.until_s = 1e18
        self.members: list[str] = []
        self.confirmed: list[str] = []
        self.voters: list[str] = []
        self.live: list[str] = []
        self.learners: list[str] = []


class View:
    """View of the members, without this node itself: what they said last, and whether they count.

    Three degrees, from strict to lax:

    - alive: heard from lately and reachable; expected to contribute, worth asking, able to hold an office
    - member: heard from within `member_ttl_s`; counts in every majority, also when silent just now
    - known: listed by the DHT or heard of; gets our progress, so that it can learn of us

    A member that says good-bye leaves all three at once.

    Rules: docs/protocol/election.md, section 1.
    """

    def __init__(
        self,
        me: str,
        timing: Timing,
        has_seat: Callable[[str], bool] = lambda peer: True,
        excluded: Container[str] = (),
    ) -> None:
        self._me = me
        self._timing = timing
        self._has_seat = has_seat
        self._excluded = excluded
        self._displaced: list[str] = []
        """Peers that gave way to others since `forget_stale`."""
        self._members: dict[str, KnownPeer] = {}
        self._counted_on: set[str] = set()
        self._in_vain: dict[str, tuple[float, float]] = {}
        """Members that did not answer when they were asked for a vote: since when, and when the last time."""
        self._lists: _Lists | None = None
        """Lists of members, live ones, and so on: asked for at every event, changed by few."""

    def listed(self, peer: str, incarnation: int, now: float) -> None:
        """Take in that the DHT has an unexpired presence record of this peer."""
        if peer == self._me or not self._has_room(peer):
            return
        member = self._members.get(peer)
        if member is None:
            member = self._members[peer] = KnownPeer()
        if incarnation > member.left_incarnation:
            member.listed_s = now
            member.incarnation = max(member.incarnation, incarnation)

    def _has_room(self, peer: str) -> bool:
        """Tell whether that peer can be known. In a full table one without a seat gives way, the longest
        silent first, to one that has one."""
        if peer in self._excluded:
            return False
        if peer in self._members or len(self._members) < MAX_PEERS:
            return True
        if not self._has_seat(peer):
            return False
        others = [(m.heard_s, m.listed_s, p) for p, m in self._members.items() if not self._has_seat(p)]
        if not others:
            return False
        *_, silent = min(others)
        del self._members[silent]
        self._displaced.append(silent)
        self._lists = None
        return True

    def exclude(self, peer: str) -> None:
        """Forget a peer that is never to come back."""
        self._members.pop(peer, None)
        self._counted_on.discard(peer)
        self._lists = None

    def heard(self, peer: str, progress: Progress, now: float) -> bool:
        """Take in a heartbeat. False: it is from before the peer's restart or good-bye, and was ignored."""
        member = self._members.get(peer)
        if member is None:
            if not self._has_room(peer):
                return False
            member = self._members[peer] = KnownPeer()
        if progress.incarnation < member.incarnation or progress.incarnation <= member.left_incarnation:
            return False
        before = member.progress
        if before is None or _kind(before) != _kind(progress):
            self._lists = None
        if before is not None and progress.incarnation > before.incarnation:
            member.heads = {}
        member.incarnation = progress.incarnation
        member.progress = progress
        known = len(member.heads)
        member.heads.update(progress.heads)
        if len(member.heads) != known:
            member.heads = dict(sorted(member.heads.items()))
        self._heard(member, now)
        return True

    def _heard(self, member: KnownPeer, now: float) -> None:
        if member.failures or not self._fresh(member, now):
            self._lists = None
        member.heard_s = now
        member.failures = 0

    def _fresh(self, member: KnownPeer, now: float) -> bool:
        return now - member.heard_s < self._timing.suspect_s

    def forgive(self, lag_s: float) -> None:
        """Count nobody's silence for the time in which we did not run."""
        self._lists = None
        for member in self._members.values():
            member.heard_s += lag_s
            member.listed_s += lag_s

    def heard_message(self, peer: str, now: float) -> None:
        """Take in that another message than a heartbeat arrived from a peer that already counts as a
        member."""
        member = self._members.get(peer)
        if member and member.progress and member.incarnation > member.left_incarnation:
            self._heard(member, now)

    def failed(self, peer: str) -> bool:
        """Count a failed send. Tell whether that was the failure that made the peer count as gone."""
        member = self._members.get(peer)
        if member is None:
            return False
        member.failures = min(member.failures + 1, 1000)
        if member.failures != self._timing.failures_to_suspect:
            return False
        self._lists = None
        return True

    def try_soon(self, peer: str) -> bool:
        """Let the next heartbeat to a peer that we still count on not wait its turn, after a failure."""
        member = self._members.get(peer)
        if member is None or member.progress is None or member.failures != 1:
            return False
        member.tried_s = -1e18
        return True

    def said_goodbye(self, peer: str, incarnation: int, now: float) -> None:
        """Take in a peer's good-bye."""
        member = self._members.get(peer)
        if member and incarnation >= member.incarnation:
            member.left_incarnation = incarnation
            member.progress = None
            member.heads = {}
            self._lists = None

    def asked_in_vain(self, peers: Iterable[str], now: float) -> None:
        """Count a request for a vote that these have not answered."""
        for peer in peers:
            since_s, last_s = self._in_vain.get(peer, (now, now))
            self._in_vain[peer] = (since_s if now - last_s < MUTE_S else now), now
        self._lists = None

    def answered(self, peer: str) -> None:
        """Take in that a member takes part in elections."""
        if self._in_vain.pop(peer, None) is not None:
            self._lists = None

    def mute(self, peer: str) -> bool:
        """Tell whether that member counts in no majority: for long it gave no answer when it was asked for a
        vote, though it is heard."""
        since_s, last_s = self._in_vain.get(peer, (0.0, 0.0))
        return last_s - since_s >= MUTE_S

    def progress(self, peer: str) -> Progress | None:
        """Find the last heartbeat of that peer."""
        member = self._members.get(peer)
        return member.progress if member else None

    def heads(self, peer: str) -> list[tuple[int, Head]]:
        """List per fragment the newest head that the peer named; fragments of which it never spoke are
        missing."""
        member = self._members.get(peer)
        return list(member.heads.items()) if member else []

    def head(self, peer: str, fragment: int) -> Head | None:
        """Find the newest head of that fragment that the peer named."""
        member = self._members.get(peer)
        return member.heads.get(fragment) if member else None

    def dialable(self, peer: str) -> bool:
        """Tell whether others can reach that peer, by its last heartbeat; of one never heard it is
        believed."""
        member = self._members.get(peer)
        progress = member.progress if member else None
        return progress is None or progress.reach is Reach.DIRECT

    def thin(self, peer: str) -> bool:
        """Tell whether that peer's uplink carries less than offices ask, by its last heartbeat."""
        member = self._members.get(peer)
        progress = member.progress if member else None
        return progress is not None and progress.thin

    def has_left(self, peer: str) -> bool:
        """Tell whether the peer said good-bye and has not come back."""
        member = self._members.get(peer)
        return member is not None and 0 < member.incarnation <= member.left_incarnation

    def alive(self, peer: str, now: float) -> bool:
        """Tell whether the peer was heard from lately and is reachable."""
        member = self._members.get(peer)
        return member is not None and self._alive(member, now)

    def _alive(self, member: KnownPeer, now: float) -> bool:
        reachable = member.failures < self._timing.failures_to_suspect
        return member.progress is not None and reachable and self._fresh(member, now)

    def may_come(self, peer: str, now: float) -> bool:
        """Tell whether a peer that does not count now will once it is heard: we know nothing new of it."""
        member = self._members.get(peer)
        if member is None:
            return peer not in self._excluded
        if member.failures >= self._timing.failures_to_suspect or self.has_left(peer):
            return False
        progress = member.progress
        if progress is None:
            return True
        if progress.confirmed:
            return now - member.heard_s >= self._timing.member_ttl_s
        return not self._fresh(member, now)

    def silence_s(self, peer: str, now: float) -> float:
        """Compute the seconds since anything was heard from the peer (very large: never)."""
        member = self._members.get(peer)
        return now - member.heard_s if member else 1e18

    def newly_silent(self, now: float, neighbours: set[str] | None = None) -> list[str]:
        """List the members (of these) that were counted on at the last call and are not now, sorted."""
        live = set(self.live(now))
        if neighbours is not None:  # nobody else is expected to be heard
            live &= neighbours
            self._counted_on &= neighbours
        gone = sorted(peer for peer in self._counted_on - live if not self.has_left(peer))
        self._counted_on = live
        return gone

    def _lists_at(self, now: float) -> _Lists:
        """Make the lists as of now, or return those of last time while nobody can have fallen silent."""
        lists = self._lists
        if lists is not None and lists.from_s <= now < lists.until_s:
            return lists
        lists = self._lists = _Lists(now)
        ttl_s = self._timing.member_ttl_s
        for peer, member in sorted(self._members.items()):
            progress = member.progress
            if progress is None or not now - member.heard_s < ttl_s:
                continue
            alive = self._alive(member, now)
            lists.members.append(peer)
            lists.until_s = min(lists.until_s, member.heard_s + (self._timing.suspect_s if alive else ttl_s))
            if progress.confirmed:
                lists.confirmed.append(peer)
                if progress.votes and not self.mute(peer):
                    lists.voters.append(peer)
            if alive:
                lists.live.append(peer)
                if progress.learning and progress.confirmed:
                    lists.learners.append(peer)
        return lists

    def members(self, now: float) -> list[str]:
        """List the peers heard of lately, sorted. The caller does not change it (nor the following ones)."""
        return self._lists_at(now).members

    def live(self, now: float) -> list[str]:
        """List the peers to count on, sorted."""
        return self._lists_at(now).live

    def confirmed(self, now: float) -> list[str]:
        """List the members whose versions are confirmed, sorted."""
        return self._lists_at(now).confirmed

    def voters(self, now: float) -> list[str]:
        """List the confirmed members that can save a vote, sorted."""
        return self._lists_at(now).voters

    def live_learners(self, now: float) -> list[str]:
        """List the live confirmed peers with a running learner, sorted."""
        return self._lists_at(now).learners

    def to_greet(self, now: float, neighbours: set[str] | None = None) -> list[str]:
        """List the peers (of these) that are due our heartbeat: members always, silent listed ones
        sometimes. Of those without a seat so many at a time; of those never heard, who may be names
        only, a few."""
        timing = self._timing
        greet, newcomers, names = [], [], []
        for peer, member in sorted(self._members.items()):
            if neighbours is not None and peer not in neighbours:
                continue
            fresh = self._fresh(member, now)
            listed = now - member.listed_s < timing.member_ttl_s * 3
            waited = now - member.tried_s >= (timing.heartbeat_s if fresh else timing.redial_s) * 0.99
            recent = now - member.heard_s < timing.member_ttl_s
            gone = member.left_incarnation >= member.incarnation > 0
            if gone or not waited or not (fresh or listed or recent):
                continue
            if self._has_seat(peer):
                greet.append(peer)
            elif member.progress is None:
                names.append((member.tried_s, peer))
            else:
                newcomers.append((member.tried_s, peer))
        greet += [peer for _, peer in [*sorted(newcomers)[:NEWCOMERS_A_BEAT], *sorted(names)[:1]]]
        for peer in greet:
            self._members[peer].tried_s = now
        return greet

    def unheard(self, now: float) -> bool:
        """Tell whether the DHT lists a peer of which we have heard nothing yet."""
        ttl = self._timing.member_ttl_s
        return any(m.progress is None and now - m.listed_s < ttl for m in self._members.values())

    def forget_stale(self, now: float) -> list[str]:
        """Drop and list the peers that nobody lists and that have been silent for long. Bounds the table."""
        horizon = self._timing.member_ttl_s * 6
        stale = [p for p, m in self._members.items() if now - max(m.heard_s, m.listed_s) > horizon]
        for peer in stale:
            del self._members[peer]
            self._in_vain.pop(peer, None)
        displaced, self._displaced = self._displaced, []
        return [*stale, *(peer for peer in displaced if peer not in self._members)]


def _kind(said: Progress) -> tuple[bool, bool, bool, Reach]:
    """Pick what decides in which lists a heartbeat's sender is, and which of them count."""
    return said.learning, said.confirmed, said.votes, said.reach


Found = TypeVar("Found")


class Derived:
    """Results worked out from lists of the view, and again only when the view has made new ones.

    Most questions are asked many times between two changes. The caller does not change what it gets.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[object, ...], Any]] = {}

    def of(self, name: str, make: Callable[..., Found], *sources: object) -> Found:
        """Compute `make(*sources)`, or return what that gave for these very objects."""
        kept = self._kept.get(name)
        if kept is not None and all(map(operator.is_, kept[0], sources)):
            return cast(Found, kept[1])
        found = make(*sources)
        self._kept[name] = (sources, found)
        return found


Claim = tuple[str, int, int]
"""(group, fragment, term) of an office that a peer says it holds."""
NOBODY: dict[str, int] = {}


class Claims:
    """Claims of peers to offices, by group: how the syncers of neighbouring groups know each other.

    A peer's new heartbeat replaces all that it claimed before.
    """

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._of: dict[tuple[int, str], dict[str, int]] = {}
        """Map (fragment, group) -> peer -> term."""
        self._by: dict[str, dict[tuple[int, str], int]] = {}
        self._heard_s: dict[str, float] = {}
        """Time at which each claimant was last heard to claim."""
        self.version = 0
        """Counter that grows with every change."""

    def heard(self, peer: str, offices: tuple[Claim, ...], now: float) -> bool:
        """Take in what that peer claims now. Tell whether that is news."""
        if offices:
            self._heard_s[peer] = now
        else:
            self._heard_s.pop(peer, None)
        new = {(o[1], o[0]): o[2] for o in offices if o[0] != WHOLE_RUN and o[1] < self._fragments}
        old = self._by.pop(peer, {})
        if new:
            self._by[peer] = new
        if new == old:
            return False
        for office in old:
            del self._of[office][peer]
            if not self._of[office]:
                del self._of[office]
        for office, term in new.items():
            self._of.setdefault(office, {})[peer] = term
        self.version += 1
        return True

    def expire(self, before_s: float) -> None:
        """Void the claims that were not repeated since then: a peer may have other neighbours by now."""
        for peer in [p for p, heard_s in self._heard_s.items() if heard_s < before_s]:
            self.heard(peer, (), before_s)

    def of(self, fragment: int, group: str) -> dict[str, int]:
        """Find the claimants of that office: peer -> term."""
        return self._of.get((fragment, group), NOBODY)


class OwnLearner:
    """Newest word of this node's learner, and its pace."""

    def __init__(self) -> None:
        self.status = LearnerStatus(False, 0, 0, 0.0, 0.0, None)
        self.running = False
        self._step_time = MovingAverage()

    @property
    def step_s(self) -> float:
        """Moving average of its inner step time; 0: not known."""
        return self._step_time.value

    def said(self, status: LearnerStatus) -> bool:
        """Take in where it is. Tell whether others wait for that: it began, or its pace is known now."""
        news = status.running and not self.running
        self.status, self.running = status, status.running
        if status.running and status.step_time_s > 0:
            news = news or self.step_s == 0
            self._step_time.add(status.step_time_s)
        return news

    def lost(self) -> None:
        """Take in that it crashed."""
        self.running = False


class Health:
    """Lateness of this node's event loop: time in which it did not run is not the silence of others.

    The core knows when it asked to be woken. If it is handed its next event much later, the process was
    stopped, starved, or its loop blocked; what others sent meanwhile waits in our own queues. So everybody's
    silence is counted from that much later; before we have listened for a while nobody is suspected, no
    office sought (docs/protocol/rules.md, section 10).
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._promised_s = math.inf
        self._counted_s = -1e18
        self.listens_until_s = -1e18
        """End of listening: until then silence and failed sends mean nothing, and we stand for no office."""

    def promise(self, due_s: float) -> None:
        """Remember the time at which we asked to be woken."""
        self._promised_s = due_s

    def lag_s(self, now: float) -> float:
        """Compute how much too late the event that is handled now comes; 0 unless that is remarkable. Asked
        once."""
        # What was due meanwhile is still due after the first event: no second is counted twice.
        late_s = now - max(self._promised_s, self._counted_s)
        if late_s < self._timing.heartbeat_s:  # less is usual on a busy machine
            return 0.0
        self._counted_s = now
        self.listen(now)
        return late_s

    def listen(self, now: float) -> None:
        """Hear the others before we stand: what waited in our queues, and what comes next."""
        self.listens_until_s = now + 2 * self._timing.heartbeat_s

"""Report of a node about itself: the snapshot for the live view and `status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from p2pdiloco.core.api.reasons import Unheard
from p2pdiloco.core.api.types import MAX_VOUCHED, REACH_WORDS, Seat, Vouch
from p2pdiloco.core.api.versions import level_sizes
from p2pdiloco.core.distrust import Cause
from p2pdiloco.core.follower import FollowState
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.node import Core
from p2pdiloco.core.seating import stands
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.daemon.course import RunCourse
from p2pdiloco.daemon.diary import Diary, LearnerDiary
from p2pdiloco.daemon.display.logs import Audience
from p2pdiloco.daemon.display.snapshot import (
    MAX_PEER_ROWS,
    MAX_PROPOSED,
    MAX_REFUSAL_REASONS,
    SETTLED,
    DataRow,
    FragmentRow,
    NewestRow,
    NodeSnapshot,
    NodeState,
    PeerRow,
    Proposed,
    ProposedSeat,
    StatusReport,
    excluded_rows,
    mean_loss,
    offices_of,
    sane_loss,
    status_of,
)
from p2pdiloco.daemon.display.timeline import Timeline
from p2pdiloco.daemon.driver import Outbound
from p2pdiloco.daemon.learner_link import LearnerLink
from p2pdiloco.daemon.network.discovery import NOT_TOLD, Sharing
from p2pdiloco.daemon.network.link import LinkWatch
from p2pdiloco.daemon.network.reach import Reachability
from p2pdiloco.daemon.network.router import Router
from p2pdiloco.daemon.owner.control import NodeControls
from p2pdiloco.daemon.payloads import OUT_OF_BUDGET, Memory
from p2pdiloco.daemon.run_files.footprint import STATE_BYTES
from p2pdiloco.daemon.run_files.run import Run
from p2pdiloco.daemon.wire import MAX_BEARERS
from p2pdiloco.errors import RemoteError
from p2pdiloco.learner import channel as ch
from p2pdiloco.ports import Transport
from p2pdiloco.util import loop_s

NEVER_S = 1e9
"""Silence of a peer that was never heard is longer."""
MOST_COMPARED = 64
"""Fragments of which heads are compared, for a report: each is a step for each of its rows of peers."""


@dataclass
class Report:
    """Report of what a node is and does."""

    _run: Run
    _core: Core
    _diary: Diary
    _learner: LearnerLink
    _learner_diary: LearnerDiary
    _course: RunCourse
    _link_watch: LinkWatch
    _outbound: Outbound
    _transfers: Transfers
    _transport: Transport
    _memory: Memory
    _sharing: Sharing
    _router: Router | None = None
    _reach: Reachability | None = None

    def __post_init__(self) -> None:
        self._measurements = self._learner_diary.measurements
        self.state: NodeState = "joining"
        self._owner: NodeControls | None = None

    def enter(self, state: NodeState) -> None:
        """Note that a new part of the node's life begins."""
        self.state = state

    def owned_by(self, owner: NodeControls) -> None:
        """Report what the machine's owner wants, too."""
        self._owner = owner

    @property
    def shown_state(self) -> NodeState:
        """State in one word: a node that could train, and rests for its owner, is idle."""
        rests = self._owner is not None and self._owner.pause_row() is not None
        return "idle" if rests and self.state == "training" else self.state

    def snapshot(self, now: float) -> NodeSnapshot:
        """Take a snapshot: everything that the live view shows."""
        status, newest = self._learner.status, self._measurements.newest
        fragments, peers = self._fragment_rows(now), self._peer_rows(now)
        members = (self._own_row(fragments), *peers[:MAX_PEER_ROWS])
        refusals = self._refusals()
        timeline = self._diary.timeline
        return NodeSnapshot(
            run_name=self._run.name,
            run_id=self._run.id,
            answered_by=self._diary.me,
            state=self.shown_state,
            members=members,
            members_total=len(peers) + 1,
            fragments=fragments,
            run_tokens=self._course.tokens,
            run_versions=sum(row.number for row in fragments),
            loss=mean_loss(members),
            heldout_loss=newest.loss if newest else None,
            heldout_by=self._measurements.by,
            heldout_age_s=round(now - self._measurements.at_s, 1) if newest else None,
            refusals={reason[:80]: n for reason, n in refusals.most_common(MAX_REFUSAL_REASONS)},
            recent=self._diary.recent,
            doubt=self._doubt(now)[:240],
            link=self._link_watch.words[:240],
            router=self._router.words if self._router is not None else "",
            data=_data_row(status) if status else None,
            bulk=self._transfers.counters(),
            course=self._course.row(now),
            start=self._core.grounds,
            rest=self._owner.pause_row() if self._owner is not None else None,
            transfer=self._owner.transfer_row() if self._owner is not None else None,
            newest=_newest_row(timeline),
            curve=timeline.curve.points,
            marks=timeline.marks.events,
            clock_s=round(timeline.now_s(), 3),
            excluded=excluded_rows(self._core.shared.excluded, self._diary.name_of),
            device=self._learner.device,
            loss_history=tuple(self._learner_diary.losses),
            learner_age_s=self._learner_diary.age_s(),
            step_time_s=status.step_time_s if status else None,
            copied_share=self._copied_share(),
            bytes_sent=self._outbound.bytes_sent + self._transfers.bytes_out,
            bytes_received=self._transfers.bytes_in,
        )

    def _refusals(self) -> Counter[str]:
        """Count what peers did wrong, by reason, also before the core heard of it."""
        counts = self._diary.refusals + Counter(self._transport.refusals)
        if self._memory.refused:
            counts[OUT_OF_BUDGET] += self._memory.refused
        if self._sharing.failures:
            counts[NOT_TOLD] += self._sharing.failures
        return counts

    def _doubt(self, now: float) -> str:
        words = [f"a state was taken untried: {self._core.untried}"] if self._core.untried else []
        chain = self._core.fragments[0].chain
        seats = chain.marks.seats
        here = seats.intersection((self._diary.me, *self._core.shared.view.confirmed(now)))
        # In groups each node hears its neighbours only.
        if chain.header.groups == 1 and 2 * len(here) < len(seats):
            words.append(f"few seats are here: {len(here)} of {len(seats)}")
        return "; ".join(words)

    def _own_row(self, fragments: Sequence[FragmentRow]) -> PeerRow:
        me, status, timeline = self._diary.me, self._learner.status, self._diary.timeline
        return PeerRow(
            peer=me,
            name=self._diary.name,
            inner_step=status.inner_step if status else 0,
            tokens_per_s=status.tokens_per_s if status else 0.0,
            tokens_total=status.tokens_total if status else 0,
            last_seen_s=0.0,
            confirmed=self.shown_state in SETTLED,
            votes=self._core.shared.vote_disk.works,
            learning=self.shown_state == "training",
            offices=len(offices_of(fragments, me)),
            loss=status.loss if status else None,
            reach=self._reach.words if self._reach else REACH_WORDS[self._core.shared.reach],
            thin=self._core.shared.uplink.thin,
            in_last_merge=me in timeline.last_contributors,
            merged_age_s=timeline.merged_age_s(me),
            weighs=self._weighs(me),
        )

    def stands(self) -> wire.Stands:
        """Say on which versions this node stands, and who had worked on them. Raises: RemoteError
        ("not-ready")."""
        if not self._core.confirmed:
            raise RemoteError(Unheard.NOT_READY.value, "no full member yet")
        named: set[str] = set()
        versions = []
        seats: dict[str, Seat] = {}
        for fragment in self._core.fragments:
            chain = fragment.chain
            seats = {m.learner: m.seat for m in chain.marks.table if m.seat and stands(m.seat)} | seats
            if not chain.head.number:
                continue
            marks = sorted(chain.marks.table, key=lambda m: (m.seat is None, -m.number, m.learner))
            members = [mark.learner for mark in marks if mark.learner not in named]
            members = members[: MAX_VOUCHED - len(named)]
            named.update(members)
            head = chain.head
            versions.append(Vouch(fragment.index, head.number, head.digest, tuple(sorted(members))))
        lines = [self._seat_line(peer, seat) for peer, seat in seats.items()]
        lines.sort(key=lambda line: (line.seat.place, line.peer))
        return wire.Stands(tuple(versions), tuple(lines[: wire.MAX_SEATS]))

    def _seat_line(self, peer: str, seat: Seat) -> wire.SeatLine:
        if peer == self._diary.me:
            return wire.SeatLine(peer, self._diary.name, seat, 0)
        silence_s = self._core.shared.view.silence_s(peer, loop_s())
        heard = None if silence_s > NEVER_S else int(silence_s)
        return wire.SeatLine(peer, self._diary.names.get(peer, ""), seat, heard)

    def status(self, now: float, reader: Audience = Audience.ANYBODY) -> StatusReport:
        """Make the answer to a status query. Whoever asks is not known as this machine's owner, whose
        wishes and transfer are nobody else's: `p2pdiloco status` asks its own node for them
        (`daemon.owner.control`)."""
        told = status_of(self.snapshot(now))
        return replace(told, rest=None, transfer=None, recent=self._diary.recent_for(reader))

    def bearers(self, name: str) -> tuple[str, ...]:
        """List the peers that were called so lately, for the answer to a name query."""
        return self._diary.names.lately(name)[:MAX_BEARERS]

    def proposed(self, now: float) -> Proposed:
        """List members here to which the run's owner could give a seat: that merged longest ago the first
        time comes first, and of those the one that was merged most. Whom loss audits expelled is not named.
        """
        shared, found = self._core.shared, []
        for peer in shared.view.confirmed(now):
            tables = [f.chain.marks for f in self._some() if f.context.roster.awaits_word(peer)]
            if tables and peer not in shared.distrust.noted[Cause.USELESS]:
                merges = sum(table.mean(peer).merges for table in tables)
                found.append((min(table.first(peer) or 0 for table in tables), -merges, peer))
        named = [(peer, self._diary.name_of(peer)) for *_, peer in sorted(found)[:MAX_PROPOSED]]
        return tuple(ProposedSeat(peer=peer, name=name) for peer, name in named)

    def _copied_share(self) -> float | None:
        """Part of the state that is here, if some of it is being copied."""
        sizes, copying = [layout.numel for layout in self._run.layouts], self._transfers.copying
        copied = {
            fragment.index: copying.here_bytes(fragment.index) / max(1, STATE_BYTES * sizes[fragment.index])
            for fragment in self._core.fragments
            if fragment.follower.state is FollowState.COPYING
        }
        if not copied:
            return None
        return sum(min(1.0, copied.get(index, 1.0)) * numel for index, numel in enumerate(sizes)) / sum(sizes)

    def _fragment_rows(self, now: float) -> tuple[FragmentRow, ...]:
        return tuple(self._fragment_row(fragment, now) for fragment in self._core.fragments)

    def _fragment_row(self, fragment: Fragment, now: float) -> FragmentRow:
        header, head = fragment.chain.header, fragment.chain.head
        held = [seat.level for seat in fragment.posts.taken if seat.office.holding]
        return FragmentRow(
            index=fragment.index,
            number=head.number,
            digest=head.digest.hex()[:8],
            term=fragment.office.term,
            syncer=fragment.office.syncer or "",
            tokens=head.tokens,
            state=fragment.words(now)[:48] or "idle",
            pending=fragment.own.words()[:48],
            epoch=header.epoch,
            groups=header.groups,
            levels=len(level_sizes(header.groups, self._run.manifest.group.size)),
            group=fragment.posts.leaf.index,
            root=header.syncer if head.number else "",
            level=max(held, default=None),
            final=header.finality.final.number,
        )

    def _peer_rows(self, now: float) -> list[PeerRow]:
        view, counts, timeline = self._core.shared.view, self._measurements.counts, self._diary.timeline
        rows = []
        for peer in view.members(now):
            progress = view.progress(peer)
            if progress is None:
                continue
            rows.append(
                PeerRow(
                    peer=peer,
                    name=self._diary.names.get(peer, ""),
                    inner_step=progress.inner_step,
                    tokens_per_s=progress.tokens_per_s,
                    tokens_total=progress.tokens_total,
                    last_seen_s=round(view.silence_s(peer, now), 3),
                    confirmed=progress.confirmed,
                    votes=progress.votes,
                    learning=progress.learning,
                    offices=len(progress.offices),
                    loss=sane_loss(progress.loss) if counts(peer) else None,
                    reach=REACH_WORDS[progress.reach],
                    thin=progress.thin,
                    behind_versions=self._behind_versions(peer),
                    in_last_merge=peer in timeline.last_contributors,
                    merged_age_s=timeline.merged_age_s(peer),
                    weighs=self._weighs(peer),
                    expelled=self._core.shared.loss_audits.finding(peer),
                    seated=self._core.shared.has_seat(peer),
                )
            )
        return rows

    def _behind_versions(self, peer: str) -> int:
        """Count the versions by which a peer's heads are behind ours, at most; of many fragments, of some."""
        view = self._core.shared.view
        heads = ((fragment.chain.head, view.head(peer, fragment.index)) for fragment in self._some())
        return max([0, *(ours.number - head.number for ours, head in heads if head is not None)])

    def _weighs(self, peer: str) -> float | None:
        """Compute what a learner's work weighs, the mean over fragments; of many, over some."""
        all_shares = (fragment.chain.marks.weighs(peer) for fragment in self._some())
        shares = [share for share in all_shares if share is not None]
        return round(sum(shares) / len(shares), 3) if shares else None

    def _some(self) -> Sequence[Fragment]:
        fragments = self._core.fragments
        return fragments[:: max(1, len(fragments) // MOST_COMPARED)]


def _newest_row(timeline: Timeline) -> NewestRow | None:
    newest = timeline.newest
    if newest is None:
        return None
    age_s, usual_s = round(timeline.age_s(newest.at_s), 1), timeline.usual_s
    return NewestRow(
        fragment=newest.fragment,
        number=newest.number,
        age_s=age_s,
        contributors=newest.contributors,
        usual_s=None if usual_s is None else round(usual_s, 2),
    )


def _data_row(status: ch.Status) -> DataRow | None:
    share = status.share
    if share is None:
        return None  # a program's own loop
    begun = int.from_bytes(share.taken, "big").bit_count()
    return DataRow(epoch=share.epoch, shards=share.shards, begun=begun, tokens=status.tokens_total)

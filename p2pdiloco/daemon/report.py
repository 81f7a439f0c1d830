"""What a node says about itself: snapshot for the live view and `status`, diary lines, log lines."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from p2pdiloco.adapters.disk.events_log import EventsLog, FieldValue
from p2pdiloco.core.api.effects import Record
from p2pdiloco.core.api.grouping import level_sizes
from p2pdiloco.core.api.reach import WORDS
from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.node import Core
from p2pdiloco.daemon.display.logs import RecentLines
from p2pdiloco.daemon.display.snapshot import (
    MAX_LOSS_HISTORY,
    MAX_PEER_ROWS,
    MAX_REFUSAL_REASONS,
    DataRow,
    FragmentRow,
    NodeSnapshot,
    NodeState,
    PeerRow,
    StatusReport,
    status_of,
)
from p2pdiloco.daemon.finding.presence import Presence
from p2pdiloco.daemon.learner.evaluating import Turns
from p2pdiloco.daemon.learner.host import LearnerExited
from p2pdiloco.daemon.learner.learner_link import LearnerLink
from p2pdiloco.daemon.run_files.runs import Run
from p2pdiloco.learner import channel_messages as ch

logger = logging.getLogger(__name__)
LOUD = frozenset(
    [
        "join",
        "silent",
        "leave",
        "reach",
        "office",
        "suspicion",
        "catchup",
        "fork",
        "refusal",
        "election",
        "learner",
    ]
)
"""Kinds that are shown among the latest reasons and logged; the others only go into the diary."""

UPLOADS = frozenset({"pushed_bytes", "updates_given_bytes", "updates_passed_on_bytes"})
"""What a node gives others of versions: its own contributions, updates that it made, and other updates."""


class Report:
    """Collects what happened and shows it."""

    def __init__(self, run: Run, me: str, name: str, events: EventsLog, recent: RecentLines) -> None:
        self._run = run
        self._me = me
        self._name = name
        self._events = events
        self._recent = recent
        self.core: Core
        self.learner: LearnerLink
        self.presence: Presence
        self.state: NodeState = "joining"
        self.refusals: Counter[str] = Counter()
        self.turns: Turns
        self.evaluated: Callable[[float, int], None] = lambda loss, tokens: None
        """Told of what our learner has measured."""
        self.link = ""
        """What a person should know of the link; empty: it keeps up."""
        self._losses: list[float] = []
        self._merges: list[tuple[int, int]] = []
        self.traffic: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Bytes (sent, received): messages that we sent, and payloads both ways."""
        self.bulk: Callable[[], dict[str, int]] = dict
        """What became of bulk transfers."""
        self.transport_refusals: Callable[[], Mapping[str, int]] = dict
        """What peers did wrong before the core heard of it, by reason."""

    # --- what happened -------------------------------------------------------------------------------

    def on_record(self, record: Record) -> None:
        """A decision of the core, with its reason."""
        self._events.write(record.kind, record.fragment, record.reason, record.fields)
        values = dict(record.fields)
        if record.kind == "refusal":
            self.refusals[record.reason[:80]] += 1
        if record.kind in LOUD:
            where = f"fragment {record.fragment} " if record.fragment is not None else ""
            group = values.get("group")
            where += f"group {group} " if group and group != WHOLE_RUN else ""
            text = f"{record.kind}: {where}{record.reason}"
            peer = values.get("syncer") or values.get("peer") or values.get("candidate")
            if isinstance(peer, str) and peer:
                text += f" ({self.label(peer)})"
            self._recent.add(text)
            level = logging.INFO if record.kind in ("join", "leave", "learner", "fork") else logging.DEBUG
            logger.log(level, "%s", text)

    def write(self, kind: str, reason: str, **fields: str | int | float | bool | None) -> None:
        """A line of the daemon's own."""
        self._events.write(kind, None, reason, fields.items())

    def on_learner(self, event: ch.LearnerEvent | LearnerExited) -> None:
        """Something that the learner said, for people."""
        match event:
            case ch.Ready():
                self.write("learner", "running", device=event.device, parameters=event.parameters)
                note = f"; {event.note}" if event.note else ""
                logger.info("learner: %d parameters on %s%s", event.parameters, event.device, note)
            case ch.Note():
                self.write("learner", event.text)
                logger.info("learner: %s", event.text)
            case ch.Status():
                self._on_status(event)
            case ch.Evaluated():
                self.evaluated(event.loss, event.tokens)
                found: dict[str, FieldValue] = {
                    "loss": event.loss,
                    "tokens": event.tokens,
                    "metrics": event.metrics,
                }
                self._events.write("evaluation", None, "held-out samples", found.items())
            case ch.StateSaved(ok=False):
                self.write("checkpoint", f"learner state not saved: {event.reason}")
                logger.error("learner state not saved: %s", event.reason)
            case LearnerExited():
                self.write("learner", f"ended: {event.reason}", code=event.code)
            case _:
                pass

    def _on_status(self, status: ch.Status) -> None:
        if status.loss is not None:
            self._losses.append(status.loss)
            if len(self._losses) > MAX_LOSS_HISTORY:
                self._losses = self._losses[::2]
        self.write(
            "progress",
            "",
            inner_step=status.inner_step,
            tokens_total=status.tokens_total,
            run_tokens=status.run_tokens,
            learning_rate=status.learning_rate,
            tokens_per_s=round(status.tokens_per_s, 1),
            step_time_s=round(status.step_time_s, 6),
            loss=status.loss,
            longest_gap_s=round(status.longest_gap_s, 6),
            cpu_s=round(status.cpu_s, 3),
            deferred_copies=status.deferred_copies,
            **{key: n for key, n in self.bulk().items() if key in UPLOADS},
        )

    def label(self, peer: str) -> str:
        """A peer's name, or the end of its id."""
        if peer == self._me:
            return self._name or "this node"
        return self.presence.names.get(peer) or f"…{peer[-6:]}"

    # --- what is -------------------------------------------------------------------------------------

    def snapshot(self, now: float) -> NodeSnapshot:
        """Everything that the live view shows."""
        status, newest = self.learner.status, self.turns.newest
        fragments = self._fragment_rows(now)
        peers = self._peer_rows(now)
        refusals = self.refusals + Counter(self.transport_refusals())
        sent, received = self.traffic()
        return NodeSnapshot(
            name=self._name,
            peer=self._me,
            run_name=self._run.name,
            run_id=self._run.id,
            state=self.state,
            device=self.learner.device,
            inner_step=status.inner_step if status else 0,
            loss=status.loss if status else None,
            loss_history=tuple(self._losses),
            heldout_loss=newest.loss if newest else None,
            heldout_by=self.turns.by,
            tokens_per_s=status.tokens_per_s if status else 0.0,
            tokens_total=status.tokens_total if status else 0,
            data=_data_row(status) if status else None,
            step_time_s=status.step_time_s if status else None,
            peers=tuple(peers[:MAX_PEER_ROWS]),
            peers_total=len(peers),
            fragments=fragments,
            run_tokens=max((row.tokens for row in fragments), default=0),
            run_versions=sum(row.number for row in fragments),
            refusals={reason[:80]: n for reason, n in refusals.most_common(MAX_REFUSAL_REASONS)},
            recent=self._recent.lines(),
            bytes_sent=sent,
            bytes_received=received,
            bulk=self.bulk(),
            reach=WORDS[self.core.shared.reach],
            thin=self.core.shared.uplink.thin,
            votes=self.core.shared.saving.works,
            link=self.link[:240],
        )

    def status(self, now: float) -> StatusReport:
        """The answer to a status query."""
        return status_of(self.snapshot(now))

    def _fragment_rows(self, now: float) -> tuple[FragmentRow, ...]:
        return tuple(self._fragment_row(fragment, now) for fragment in self.core.fragments)

    def _fragment_row(self, fragment: Fragment, now: float) -> FragmentRow:
        header, head = fragment.chain.header, fragment.chain.head
        held = [seat.level for seat in fragment.seats.taken if seat.office.holding]
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
            group=fragment.seats.leaf.index,
            root=header.syncer if head.number else "",
            level=max(held, default=None),
        )

    def _peer_rows(self, now: float) -> list[PeerRow]:
        view = self.core.shared.view
        rows = []
        for peer in view.members(now):
            progress = view.progress(peer)
            if progress is None:
                continue
            rows.append(
                PeerRow(
                    peer=peer,
                    name=self.presence.names.get(peer, ""),
                    inner_step=progress.inner_step,
                    tokens_per_s=progress.tokens_per_s,
                    tokens_total=progress.tokens_total,
                    last_seen_s=round(view.silence_s(peer, now), 3),
                    confirmed=progress.confirmed,
                    votes=progress.votes,
                    learning=progress.learning,
                    offices=len(progress.offices),
                    loss=progress.loss,
                    reach=WORDS[progress.reach],
                    thin=progress.thin,
                )
            )
        return rows


def _data_row(status: ch.Status) -> DataRow | None:
    share = status.share
    if share is None:
        return None  # a program's own loop
    begun = int.from_bytes(share.taken, "big").bit_count()
    return DataRow(epoch=share.epoch, shards=share.shards, begun=begun, tokens=status.tokens_total)

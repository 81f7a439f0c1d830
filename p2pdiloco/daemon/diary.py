"""Diary of a node: lines of events.jsonl, latest reasons, log lines, and what is counted of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from p2pdiloco.adapters.data_dir import EventsLog, FieldValue
from p2pdiloco.core.api.events import Record
from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.daemon.course import Measurements
from p2pdiloco.daemon.display.logs import Audience, RecentLines
from p2pdiloco.daemon.display.snapshot import MAX_LOSS_HISTORY
from p2pdiloco.daemon.display.timeline import Timeline
from p2pdiloco.daemon.learner_host import LearnerExited
from p2pdiloco.daemon.network.discovery import Names
from p2pdiloco.learner import channel as ch

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
        "cut",
        "excluded",
        "expelled",
        "election",
        "learner",
    ]
)
"""Kinds that are shown among the latest reasons and logged; the others only go into the diary."""
TOLD = frozenset({"join", "leave", "learner", "fork", "excluded", "expelled"})
"""Kinds that the log tells without being asked for all."""
PUBLIC = frozenset({"join", "silent", "leave", "suspicion", "fork", "refusal", "excluded", "expelled"})
"""Kinds whose reasons are words of ours, so that whoever asks for a status may read them. Others may say what
went wrong on this machine, with paths and names of its own."""
PUT_OUT = {"excluded": "is excluded", "expelled": "is expelled here"}
UPLOADS = frozenset({"pushed_bytes", "updates_given_bytes", "updates_passed_on_bytes"})
"""Counters of what a node gives others of versions: its contributions, updates that it made, and others."""


@dataclass
class Diary:
    """Diary that writes down what happened, and remembers what is shown of it."""

    me: str
    """Our peer id."""
    name: str
    names: Names
    """Names of the others, as far as they are known."""
    _events: EventsLog
    _recent: RecentLines
    timeline: Timeline = field(default_factory=Timeline)
    """Timeline, with that of earlier lives."""

    def __post_init__(self) -> None:
        self.refusals: Counter[str] = Counter()
        """Refusals of the core, by reason."""

    @property
    def recent(self) -> tuple[str, ...]:
        """Reasons of the latest decisions, for people."""
        return self._recent.lines()

    def recent_for(self, reader: Audience) -> tuple[str, ...]:
        """List those of the latest reasons that this reader may read."""
        return self._recent.lines_for(reader)

    def on_record(self, record: Record) -> None:
        """Write a decision of the core down, with its reason."""
        self._events.write(record.kind, record.fragment, record.reason, record.fields)
        values = dict(record.fields)
        self.timeline.note(record.kind, record.fragment, record.reason, values, self.name_of, self.me)
        if record.kind == "refusal":
            self.refusals[record.reason[:80]] += 1
        elif record.kind == "cut":
            self.refusals["too-long" if "peer" in values else "own-too-long"] += 1
        if record.kind in LOUD:
            where = f"fragment {record.fragment} " if record.fragment is not None else ""
            group = values.get("group")
            where += f"group {group} " if group and group != WHOLE_RUN else ""
            text = f"{record.kind}: {where}{record.reason}"
            peer = values.get("syncer") or values.get("peer") or values.get("candidate")
            if isinstance(peer, str) and peer:
                text += f" ({self.label(peer)})"
            if record.kind in PUT_OUT and isinstance(peer, str):
                text = f"{self.label(peer)} {PUT_OUT[record.kind]}: {record.reason}"
            level = logging.INFO if record.kind in TOLD else logging.DEBUG
            if record.kind == "cut" and "peer" not in values:
                level = logging.WARNING
            # Who was elected is public, why an office was laid down may be a disk's error.
            is_public = record.kind in PUBLIC or (record.kind == "office" and "syncer" in values)
            audience = Audience.ANYBODY if is_public else Audience.MEMBERS
            if level < self._recent.level:  # the others come there by the log
                self._recent.add(text, audience)
            fields = {"fragment": record.fragment, "reason": record.reason, **values}
            extra = {"event": record.kind, "fields": fields, "audience": audience}
            logger.log(level, "%s", text, extra=extra)

    def write(self, kind: str, reason: str, **fields: FieldValue) -> None:
        """Write a line of the daemon's own."""
        self._events.write(kind, None, reason, fields.items())
        self.timeline.note(kind, None, reason, fields, self.name_of, self.me)

    def say(self, level: int, kind: str, words: str, **fields: FieldValue) -> None:
        """Write a line of the daemon's own, and log it with its figures."""
        self.write(kind, words, **fields)
        told = {"fragment": None, "reason": words, **fields}
        logger.log(level, "%s", words, extra={"event": kind, "fields": told})

    def label(self, peer: str) -> str:
        """Name a peer: by its name, or the end of its id."""
        if peer == self.me:
            return self.name or "this node"
        return self.names.get(peer) or f"…{peer[-6:]}"

    def name_of(self, peer: str) -> str:
        """Name by which a peer calls itself; empty: it is not known."""
        return self.name if peer == self.me else self.names.get(peer, "")

    def close(self, reason: str) -> None:
        """Write the last line."""
        self.write("shutdown", reason, dropped=self._events.dropped)


@dataclass
class LearnerDiary:
    """Diary of the learner: what it said, for people."""

    _diary: Diary
    measurements: Measurements
    _counters: Callable[[], dict[str, int]]
    """Function that counts the bytes of bulk transfers, by kind."""

    def __post_init__(self) -> None:
        self.losses: list[float] = []
        """Training losses, thinned out as they become many."""
        self._told_s: float | None = None

    def age_s(self) -> float | None:
        """Compute how long ago the learner said how it is doing; None: it never did."""
        return None if self._told_s is None else round(time.monotonic() - self._told_s, 1)

    def on_learner(self, event: ch.LearnerEvent | LearnerExited) -> None:
        """Take in something that the learner said."""
        write = self._diary.write
        match event:
            case ch.Ready():
                write("learner", "running", device=event.device, parameters=event.parameters)
                note = f"; {event.note}" if event.note else ""
                figures = {"parameters": event.parameters, "device": event.device, "note": note}
                logger.info("learner: %(parameters)d parameters on %(device)s%(note)s", figures)
            case ch.Note():
                write("learner", event.text)
                logger.info("learner: %s", event.text)
            case ch.Status():
                self._on_status(event)
            case ch.Evaluated(loss=float(loss)):
                self.measurements.measured(loss, event.tokens)
                words, took_s = "held-out samples", round(event.took_s, 6)
                write(
                    "evaluation", words, loss=loss, tokens=event.tokens, metrics=event.metrics, took_s=took_s
                )
            case ch.StateSaved(ok=False):
                write("checkpoint", f"learner state not saved: {event.reason}")
                logger.error("learner state not saved: %s", event.reason)
            case LearnerExited():
                write("learner", f"ended: {event.reason}", code=event.code)
            case _:
                pass

    def _on_status(self, status: ch.Status) -> None:
        self._told_s = time.monotonic()
        if status.loss is not None:
            self.losses.append(status.loss)
            if len(self.losses) > MAX_LOSS_HISTORY:
                self.losses = self.losses[::2]
        self._diary.write(
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
            longest_aside_s=round(status.longest_aside_s, 6),
            cpu_s=round(status.cpu_s, 3),
            deferred_copies=status.deferred_copies,
            **{key: n for key, n in self._counters().items() if key in UPLOADS},
        )

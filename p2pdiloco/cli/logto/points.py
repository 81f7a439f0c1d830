"""Points of charts, from events: figures, their names, at how many tokens (docs/topics/watching.md)."""

from __future__ import annotations

import math
import time
from typing import Any

from msgspec import Struct, structs

MOST_TOKENS = 1 << 62
PROGRESS = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "tokens_per_s": "train/tokens_per_s",
    "step_time_s": "train/step_time_s",
    "longest_gap_s": "train/longest_gap_s",
    "inner_step": "node/inner_step",
    "tokens_total": "node/tokens",
    "deferred_copies": "node/deferred_copies",
    "pushed_bytes": "node/pushed_bytes",
    "updates_given_bytes": "node/updates_given_bytes",
    "updates_passed_on_bytes": "node/updates_passed_on_bytes",
}
"""Figure of an event `progress` -> name of its chart."""
COUNTED = {
    "election": "run/elections",
    "suspicion": "run/suspicions",
    "silent": "run/silent",
    "refusal": "run/refusals",
    "fork": "run/forks",
}
CONTRIBUTIONS = {"attempts": "node/merged", "syncer": "node/refused", "lost": "node/given_up"}
"""Field that only one outcome of a contribution has -> name of the chart in which that is counted."""
VERSIONS = ("publish", "apply", "catchup")


class Point(Struct, frozen=True):
    """Values at one number of tokens."""

    tokens: int
    t: float
    """Unix time."""
    values: dict[str, float]


class LogTally(Struct, frozen=True):
    """Memory of what was read so far, which goes with the place: the next reader counts on from it."""

    tokens: int = 0
    """Tokens that the run has consumed, as the learner last said: where all that follows is drawn."""
    counts: dict[str, int] = {}
    version: int = 0


class Points:
    """Maker of points out of events, in their order."""

    def __init__(self, tally: LogTally | None = None) -> None:
        """`tally`: of an earlier reader."""
        self._tally = tally or LogTally()

    @property
    def tally(self) -> LogTally:
        """Tally up to the last event that was taken."""
        return self._tally

    def of(self, event: dict[str, Any]) -> Point | None:
        """Take an event; None: there is nothing to draw."""
        kind, values = event["kind"], {}
        if kind == "progress":
            tokens = _number(event.get("run_tokens"))
            if tokens is not None and 0 <= tokens <= MOST_TOKENS:
                self._tally = structs.replace(self._tally, tokens=int(tokens))
            values = {
                name: found
                for key, name in PROGRESS.items()
                if (found := _number(event.get(key))) is not None
            }
        elif kind == "evaluation":
            values = _evaluation(event)
        elif kind == "merge":
            names = {"contributors": "run/contributors", "live": "run/live"}
            values = {
                name: found for key, name in names.items() if (found := _number(event.get(key))) is not None
            }
        elif kind in VERSIONS:
            values = self._version(event)
        elif kind == "link":
            rates = {key: _number(event.get(f"{key}_bits_per_s")) for key in ("upload", "download")}
            values = {f"node/{key}_bits_per_s": rate for key, rate in rates.items() if rate is not None}
        elif kind in COUNTED:
            values = self._count(COUNTED[kind])
        elif kind == "contribution":
            name = next((name for field, name in CONTRIBUTIONS.items() if field in event), "")
            values = self._count(name) if name else {}
        if not values:
            return None
        t = _number(event.get("t"))
        return Point(self._tally.tokens, time.time() if t is None else t, values)

    def _count(self, name: str) -> dict[str, float]:
        number = self._tally.counts.get(name, 0) + 1
        self._tally = structs.replace(self._tally, counts={**self._tally.counts, name: number})
        return {name: number}

    def _version(self, event: dict[str, Any]) -> dict[str, float]:
        """Draw the newest version of any fragment, when there is a newer one."""
        number = _number(event.get("number"))
        if number is None or number <= self._tally.version:
            return {}
        self._tally = structs.replace(self._tally, version=int(number))
        return {"run/newest_version": number}


def _evaluation(event: dict[str, Any]) -> dict[str, float]:
    metrics = event.get("metrics")
    named = metrics.items() if isinstance(metrics, dict) else ()
    found = {f"eval/{name}": _number(value) for name, value in named}
    found["eval/loss"] = _number(event.get("loss"))
    return {name: value for name, value in found.items() if value is not None}


def _number(value: object) -> float | None:
    """Take a finite number; None: there is none (a loss that is no number is null)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value

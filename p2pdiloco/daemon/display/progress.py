"""Wording of how far a run is, and when it will be over."""

from __future__ import annotations

import math

from p2pdiloco.core.api.config import Going
from p2pdiloco.daemon.display.snapshot import CourseRow
from p2pdiloco.daemon.display.wording import count, duration
from p2pdiloco.errors import clean

_GOING_WORDS = {Going.TRAIN: "", Going.PAUSE: "the run pauses", Going.END: "the run ends"}


def percent(row: CourseRow) -> str:
    """Word the share of the schedule that is merged: "37.2 %". It is 100 only at the end."""
    share = row.tokens / max(1, row.schedule_tokens)
    return f"{math.floor(1000 * share) / 10:.1f} %"


def progress_text(row: CourseRow) -> str:
    """Word how far the run is: "37.2 % of 153k tokens, 2.5 h left", "ended at 100.3 % of 153k tokens"."""
    text = f"{percent(row)} of {count(row.schedule_tokens)} tokens"
    if row.rests != "no":
        return f"{row.rests} at {text}"
    if row.tokens >= row.schedule_tokens:
        return f"{text}, past the schedule"
    return text if row.left_s is None else f"{text}, {duration(row.left_s)} left"


def owner_text(row: CourseRow) -> str:
    """Word what the run's owner changed, and says; empty: nothing."""
    words = []
    ahead, stays = row.amendment_from_tokens > row.tokens, row.rate_factor == row.amendment_rate_factor
    if row.amendment:
        holds = f"will hold from {count(row.amendment_from_tokens)} tokens on" if ahead else "holds"
        does = amendment_text(row)
        words.append(f"amendment {row.amendment} {holds}" + (f": {does}" if does else ""))
    if row.rate_factor != 1 and (ahead or not stays):
        words.append(
            f"learning rate times {row.rate_factor:g}" + (" until then" if ahead and not stays else "")
        )
    if row.message:
        words.append(f"the owner says: {clean(row.message)}")
    return "; ".join(words)


def amendment_text(row: CourseRow) -> str:
    """Word what the owner's newest amendment does from its number of tokens on: "the run ends"; a learning
    rate that already holds is left out."""
    words = [_GOING_WORDS[row.amendment_going]]
    if row.amendment_schedule_tokens:
        words.append(f"a schedule of {count(row.amendment_schedule_tokens)} tokens")
    before = row.rate_factor if row.amendment_from_tokens > row.tokens else 1.0
    if row.amendment_rate_factor != before:
        words.append(f"learning rate times {row.amendment_rate_factor:g}")
    return ", ".join(filter(None, words))


def copied_text(share: float | None) -> str:
    """Word how much of the state is here, while it is copied: "state 37 %"; empty: it is not."""
    return "" if share is None else f"state {math.floor(100 * share)} %"

"""Status of the learner, as the core takes it in."""

from __future__ import annotations

from p2pdiloco.core.api import events as ev
from p2pdiloco.learner import channel as ch


def core_status(found: ch.Status) -> ev.LearnerStatus:
    """Translate a status. Who rests for its machine's owner, with all handed over, is no learner for the
    others: no round waits for it."""
    return ev.LearnerStatus(
        running=not found.handed_over,
        inner_step=found.inner_step,
        tokens_total=found.tokens_total,
        tokens_per_s=found.tokens_per_s,
        step_time_s=found.step_time_s,
        loss=found.loss,
    )

"""Ends of learners: which of them are the last."""

import math

from p2pdiloco.daemon.learner_host import HEALTHY_S, Failures, LearnerExited
from p2pdiloco.errors import DataError, StorageError, UserError
from p2pdiloco.learner.lifeline import EXIT_DATA, EXIT_FAILED, exit_status


def test_no_other_learner_finds_better_data() -> None:
    assert exit_status(DataError("a.jsonl: ...")) == EXIT_DATA
    assert exit_status(UserError("the hub cannot be reached")) == EXIT_FAILED
    assert exit_status(StorageError("the disk is full")) == EXIT_FAILED
    failures = Failures()
    assert failures.ended(LearnerExited(EXIT_DATA, "..."), False, 0.0) == math.inf
    # In the middle of a run a read may fail for once, not twice; and a program is its owner's to start again.
    failures = Failures()
    failures.made_step()
    assert failures.ended(LearnerExited(EXIT_DATA, "..."), False, 100.0) < 30.0
    failures.made_step()
    assert failures.ended(LearnerExited(EXIT_DATA, "..."), False, 110.0) == math.inf
    assert failures.ended(LearnerExited(EXIT_DATA, "..."), True, 200.0) == 0.0
    failures = Failures()
    for now in (300.0, 400.0):
        failures.ready(now)
        failures.made_step()
        assert failures.ended(LearnerExited(EXIT_DATA, "..."), False, now + HEALTHY_S) < 30.0, "long after it"
    assert failures.ended(LearnerExited(EXIT_FAILED, "..."), False, 300.0) < 30.0

"""The mailbox of the daemon's commands, between inner steps."""

import math

import pytest
from learner_kit import alone

from p2pdiloco.learner.channel import (
    BaseRef,
    ChannelBroken,
    CopiedOut,
    CopyOut,
    Evaluate,
    Evaluated,
    FollowCourse,
    Install,
    NothingToCopy,
    SpareMachine,
    Status,
    Stop,
)
from p2pdiloco.learner.mailbox import FINISH_POLL_S, Mailbox


def test_rebases_by_zero_do_not_change_the_training(bench):
    _, expected = alone(12)
    losses = []
    for step in range(12):
        report = bench.training.step()
        losses.append(report.loss)
        for layout in bench.fragments.layouts:
            old = bench.fragments.bases[layout.index]
            bench.exchange.base(layout.index, 1 - old.buffer).copy_(
                bench.exchange.base(layout.index, old.buffer)
            )
            bench.post(Install(layout.index, step + 1, 1 - old.buffer, "rebase"))
        assert bench.mailbox.boundary(report)
    assert losses == expected
    assert bench.fragments.bases == [BaseRef(12, 0)] * 4


def test_evaluation_is_of_the_global_parameters_not_of_the_learner_s(bench):
    bench.post(Evaluate())
    bench.mailbox.boundary(bench.training.step())
    for _ in range(20):
        bench.training.step()
    bench.post(Evaluate())
    bench.mailbox.boundary(bench.training.step())
    first, second = [event for event in bench.events() if isinstance(event, Evaluated)]
    assert first.loss == second.loss == pytest.approx(math.log(256), abs=0.3)
    bench.exchange.base(0, 0).zero_()
    bench.post(Evaluate())
    bench.mailbox.boundary(bench.training.step())
    assert next(e for e in bench.events() if isinstance(e, Evaluated)).loss != first.loss


def test_commands_that_come_while_others_are_obeyed_wait_for_the_next_boundary(bench, monkeypatch):
    made = []

    def evaluate_and_be_asked_again():
        bench.post(Evaluate())
        bench.channel.take_calls()  # as the thread that answers closing calls reads meanwhile
        made.append(bench.training.inner_step)
        assert len(made) < 10, "no inner step is made any more"

    monkeypatch.setattr(bench.mailbox, "_evaluate", evaluate_and_be_asked_again)
    bench.post(Evaluate())
    for _ in range(3):
        assert bench.mailbox.boundary(bench.training.step())
    assert made == [1, 2, 3]
    (first, *_) = [event for event in bench.events() if isinstance(event, Evaluated)]
    assert first.loss is None, "nothing was measured"


def test_a_daemon_that_does_not_read_never_blocks_the_learner(bench):
    for step in range(3000):
        longest_s = 2.0 if step == 2990 else 1.0
        bench.channel.emit(Status(step, 0, 0.0, 0.0, None, longest_s, 0.0, 3 * longest_s))
    seen = []
    while events := bench.events():
        seen += events
        bench.channel.flush()
    assert len(seen) < 3000
    assert seen[-1].inner_step == 2999
    assert max(status.longest_gap_s for status in seen) == 2.0
    assert max(status.longest_aside_s for status in seen) == 6.0
    with pytest.raises(ChannelBroken, match="does not read"):
        for _ in range(100_000):
            bench.channel.emit(NothingToCopy(0, False))


def test_a_step_with_a_least_length_waits_for_commands_not_for_time(bench):
    """The clock stands still except while the learner waits; the daemon speaks in the middle of a wait."""
    now, waits = [100.0], []

    def wait(timeout_s):
        waits.append(timeout_s)
        if len(waits) == 2:
            bench.post(CopyOut(0))
            now[0] += 3.0
        else:
            now[0] += timeout_s

    bench.channel.wait = wait
    args = (bench.channel, bench.training, bench.fragments, (), None, 1000.0)
    mailbox = Mailbox(*args, clock=lambda: now[0])
    mailbox.spare(SpareMachine(min_step_s=10.0))
    assert mailbox.boundary(bench.training.step()) and mailbox.boundary(bench.training.step())
    bench.events()
    assert (waits, now) == ([10.0], [110.0])
    now[0] += 2.0  # what the step takes itself
    assert mailbox.boundary(bench.training.step())
    assert waits == [10.0, 8.0, 5.0]
    answers = [e for e in bench.events() if isinstance(e, CopiedOut | NothingToCopy)]
    assert answers[-1].fragment == 0, "asked in the wait, answered in it"
    now[0] += 11.5  # 1.5 s too late: made up for by the next one
    assert mailbox.boundary(bench.training.step())
    assert mailbox.boundary(bench.training.step())
    assert waits[3:] == [8.5]
    now[0] += 100.0
    for _ in range(3):
        assert mailbox.boundary(bench.training.step())
    assert waits[4:] == [8.0], "2 s of it are made up for"
    bench.post(Stop(None))
    assert not mailbox.boundary(bench.training.step())
    assert len(waits) == 5


@pytest.mark.parametrize(
    ("wish", "then_s"), [(SpareMachine(min_step_s=2.0), 2.0), (SpareMachine(True, 10.0), FINISH_POLL_S)]
)
def test_a_wait_for_the_next_step_ends_when_its_owner_wants_something_else(bench, wish, then_s):
    now, waited = [100.0], []

    def wait(timeout_s):
        waited.append(timeout_s)
        now[0] += 0.0 if len(waited) == 1 else timeout_s
        bench.post(wish if len(waited) == 1 else SpareMachine())

    bench.channel.wait = wait
    args = (bench.channel, bench.training, bench.fragments, (), None, 1000.0)
    mailbox = Mailbox(*args, clock=lambda: now[0])
    mailbox.spare(SpareMachine(min_step_s=10.0))
    for _ in range(2):
        assert mailbox.boundary(bench.training.step())
    assert waited == [10.0, then_s]


def test_a_learner_rests_for_its_machine_until_all_is_merged_and_apart_from_the_run(bench, monkeypatch):
    waits = []

    def wait(timeout_s):
        waits.append(timeout_s)
        if len(waits) == 2:  # what it handed out is merged
            for fragment in range(len(bench.fragments)):
                bench.post(Install(fragment, 1, 1, "merged"))
        if len(waits) == 4:
            bench.post(FollowCourse((), "paused"))
        if len(waits) == 5:
            bench.post(SpareMachine())  # the run's pause is another's
        if len(waits) == 7:
            bench.post(FollowCourse())

    monkeypatch.setattr(bench.channel, "wait", wait)
    mailbox = Mailbox(bench.channel, bench.training, bench.fragments, (), None, 0.0)
    assert mailbox.boundary(bench.training.step())
    bench.events()
    bench.post(SpareMachine(rests=True))
    assert mailbox.boundary(bench.training.step())
    assert len(waits) == 7, "it rested for both"
    events = bench.events()
    copied = [event.fragment for event in events if isinstance(event, CopiedOut)]
    assert copied == list(range(len(bench.fragments))), "each once, whatever its due date"
    statuses = [event for event in events if isinstance(event, Status)]
    assert not any(event.tokens_per_s for event in statuses[:5])
    said = [event.handed_over for event in statuses]
    assert said[:2] == [False, False] and said[2:5] == [True] * 3 and not any(said[5:])


@pytest.mark.parametrize("daemon_stopped", [False, True])
def test_a_rest_is_no_inner_step_and_no_evaluation(bench, monkeypatch, daemon_stopped):
    """A measurement within a rest is left out once: twice, steps would take less than no time."""
    now, waits = [100.0], []

    def wait(timeout_s):
        now[0] += timeout_s
        waits.append(timeout_s)
        if len(waits) == 3:
            bench.post(Evaluate())
        if len(waits) == 5:
            bench.post(FollowCourse())

    def evaluate():
        now[0] += 7.0

    stops = []
    monkeypatch.setattr(bench.channel, "wait", wait)
    monkeypatch.setattr(bench.channel.standstill, "lasts", lambda: bool(stops) and len(waits) < 5)
    args = (bench.channel, bench.training, bench.fragments, (), None, 0.0)
    mailbox = Mailbox(*args, clock=lambda: now[0])
    monkeypatch.setattr(mailbox, "_evaluate", evaluate)
    assert mailbox.boundary(bench.training.step())
    now[0] += 2.0
    if daemon_stopped:
        stops.append(True)
    else:
        bench.post(FollowCourse((), "paused"))
    assert mailbox.boundary(bench.training.step())
    assert len(waits) == 5, "it rested"
    now[0] += 2.0
    assert mailbox.boundary(bench.training.step())
    seen = [event for event in bench.events() if isinstance(event, Status)]
    assert seen[-1].step_time_s == 2.0
    assert max(status.longest_gap_s for status in seen) == 2.0
    assert max(status.longest_aside_s for status in seen) == 7.0

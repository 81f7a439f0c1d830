"""A learner goes by the run's course: amended rates, and no inner steps while the run rests."""

import threading

import pytest
from deadlines import within_s
from learner_kit import LAYOUTS

from p2pdiloco.config.presets import MICRO
from p2pdiloco.core.api.config import Amendment
from p2pdiloco.learner.channel import CopiedOut, FollowCourse, FreeSlot, Status, Stop
from p2pdiloco.learner.loop import train
from p2pdiloco.learner.schedule import RATE_FLOOR, learning_rate

INNER = MICRO.inner
PATIENCE_S = 30.0


def test_an_amendment_changes_the_rate_from_its_tokens_on(bench):
    at = INNER.warmup_tokens + 10 * INNER.tokens_per_step
    longer = Amendment(1, at, schedule_tokens=10 * INNER.schedule_tokens, rate_factor=0.5)
    bench.training.amend((longer,))
    rates = []
    for tokens in (at - INNER.tokens_per_step, at):
        bench.training.run_is_at(tokens)
        bench.training.step()
        rates.append(bench.training.optimizer.param_groups[0]["lr"])
    assert rates[0] == learning_rate(INNER, at - INNER.tokens_per_step, 0)
    assert rates[1] == learning_rate(INNER, at, 1, longer) < 0.52 * rates[0]


def test_the_floor_comes_where_the_amended_schedule_ends():
    ends = 2 * INNER.schedule_tokens
    longer = Amendment(1, 0, schedule_tokens=ends)
    assert learning_rate(INNER, INNER.schedule_tokens, 1) == pytest.approx(RATE_FLOOR * INNER.learning_rate)
    assert learning_rate(INNER, INNER.schedule_tokens, 1, longer) > 0.5 * INNER.learning_rate
    assert learning_rate(INNER, ends, 1, longer) == pytest.approx(RATE_FLOOR * INNER.learning_rate)
    # Whatever an owner writes, it is a number.
    assert learning_rate(INNER, INNER.warmup_tokens, 1, Amendment(1, 0, schedule_tokens=1)) > 0


def heard(bench, kind, number):
    """Wait for so many events of a kind, and return them; whatever comes beside them is left out."""
    bench.daemon.settimeout(within_s(PATIENCE_S))
    found = []
    while len(found) < number:
        found += [event for event in bench.events() if isinstance(event, kind)]
    return found


@pytest.mark.parametrize("at_its_start", [False, True])
def test_who_rests_hands_out_what_it_has_and_goes_on_when_it_is_told(bench, at_its_start):
    bench.mailbox.boundary(bench.training.step())
    bench.events()
    bench.post(FollowCourse((), "paused"))

    def learn():
        if not at_its_start or bench.mailbox.begin():
            train(bench.training, bench.mailbox.boundary)

    training = threading.Thread(target=learn)
    training.start()
    try:
        copies = heard(bench, CopiedOut, len(LAYOUTS))  # long before any is due
        assert sorted(copy.fragment for copy in copies) == [layout.index for layout in LAYOUTS]
        stands = bench.training.inner_step
        bench.post(FreeSlot(2))  # nobody took that one: it goes out again
        assert [copy.fragment for copy in heard(bench, CopiedOut, 1)] == [2]
        assert bench.training.inner_step == stands == (1 if at_its_start else 2)
        bench.mailbox._next_status = 0.0
        assert heard(bench, Status, 1)[0].tokens_per_s == 0.0
        bench.post(FollowCourse())
        bench.mailbox._status_interval_s = 0.0
        bench.mailbox._next_status = 0.0
        while heard(bench, Status, 1)[0].inner_step < stands + 3:
            pass
    finally:
        bench.post(Stop())
        training.join(within_s(PATIENCE_S))
    assert not training.is_alive()

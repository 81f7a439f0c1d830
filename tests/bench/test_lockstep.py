"""A few learners in lockstep: they learn, and a long absence is merged in shares."""

import pytest

from p2pdiloco.config.presets import MICRO
from study.lockstep import Absence, Lockstep, Restart, mean_loss


@pytest.fixture
def swarm():
    made = Lockstep(MICRO, learners=2)
    yield made
    made.close()


def test_learners_in_lockstep_learn_and_hold_the_same_versions(swarm):
    start = swarm.loss()
    losses = swarm.run(48, evaluate_every=16)
    assert [step for step, _ in losses] == [16, 32, 48]
    assert mean_loss(losses, 0.3) == losses[-1][1] < start - 0.5
    assert {swarm.global_state.version(fragment) for fragment in range(4)} == {6}


def test_who_was_away_brings_its_work_in_shares(swarm, monkeypatch):
    period, seen = MICRO.sync.inner_steps, []
    merge = swarm.global_state.merge

    def watch(fragment, number, inputs):
        if fragment == 0:
            seen.append([steps for _, _, steps, *_ in inputs])
        return merge(fragment, number, inputs)

    monkeypatch.setattr(swarm.global_state, "merge", watch)
    swarm.run(13 * period, 1000, [Absence(learner=1, from_step=1, steps=6 * period)])
    first = 2  # the step at which fragment 0 is due for the first time
    assert seen[:6] == [[first], *[[period]] * 5]
    # Seven rounds' worth waits and one more comes with each round: five double ones work it off.
    assert [steps[1] for steps in seen[6:]] == [*[2 * period] * 5, period + first, period]
    assert {steps[0] for steps in seen[6:]} == {period}


def test_who_died_goes_on_from_the_global_parameters_with_the_moments_that_it_is_given(swarm):
    first, second = swarm._learners
    restarts = [Restart(0, 6, "disk", saved_steps=2), Restart(1, 8, "peer"), Restart(0, 12, "none")]
    swarm.run(6, 100, restarts=restarts)
    state = next(iter(first.training.optimizer.state.values()))
    assert state["step"] == 4, "as they were two steps ago"
    assert all(counters.unmerged_steps == 0 for counters in first.fragments.counters)
    swarm.run(12, 100, restarts=restarts[1:])
    assert first.training.optimizer_steps == 0 and not first.training.optimizer.state
    assert next(iter(second.training.optimizer.state.values()))["step"] == 4 + 8 + 4, (
        "the other's, then its own"
    )

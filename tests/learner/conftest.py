"""Fixtures of tests of the learner."""

import pytest
from learner_kit import Bench


@pytest.fixture
def benches():
    """Maker of learners without a process."""
    made = []

    def make(*arguments, **more):
        made.append(Bench(*arguments, **more))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture
def bench(benches):
    return benches()

"""Fixtures of tests of the learner."""

import pytest
from learner_kit import Bench


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()

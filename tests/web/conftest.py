"""What the tests of the page share: one browser for all of a worker's, and what the page must never do."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from chromium import Chromium, program
from page_looks import Looks
from page_scene import scene
from page_server import PageServer


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """A browser of this worker's."""
    if program() is None:
        pytest.skip("no Chromium is installed here (apt install chromium)")
    with Chromium() as started:
        yield started


@pytest.fixture
def server() -> Iterator[PageServer]:
    """A page with the usual scene."""
    with PageServer(scene(time.time())) as made:
        yield made


@pytest.fixture
def looks(browser: Chromium) -> Iterator[Looks]:
    """Pages of one test."""
    made = Looks(browser)
    try:
        yield made
        made.check()
    finally:
        made.close()

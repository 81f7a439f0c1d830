"""What the tests of the page share: one browser for all of a worker's, and what the page must never do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from chromium import Chromium, Page, program
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


class Looks:
    """Opens pages; at the end none of them may have complained, or asked anybody else."""

    def __init__(self, browser: Chromium) -> None:
        self._browser = browser
        self._opened: list[Page] = []

    def at(self, url: str, **how: Any) -> Page:
        """A page of that address, as it is a moment after loading."""
        page = self._browser.page(**how)
        self._opened.append(page)
        page.open(url)
        if how.get("scripts", True):
            page.until("document.documentElement.classList.contains('js')", "the script")
        return page

    def check(self) -> None:
        """Nothing was said on the console, refused by the policy, or asked of another host."""
        for page in self._opened:
            page.js("0")  # takes in what is still on its way
            foreign = [
                url for url in page.asked if not url.startswith(("http://127.0.0.1:", "data:", "about:"))
            ]
            assert (page.said, foreign) == ([], [])

    def close(self) -> None:
        """All of them are gone."""
        for page in self._opened:
            page.close()


@pytest.fixture
def looks(browser: Chromium) -> Iterator[Looks]:
    """Pages of one test."""
    made = Looks(browser)
    try:
        yield made
        made.check()
    finally:
        made.close()

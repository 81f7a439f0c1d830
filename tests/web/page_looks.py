"""Looks at pages: what a page must never do is checked of all that a test opens."""

from __future__ import annotations

from typing import Any

from chromium import Chromium, Page


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

"""Cache of what follows from the view's lists, kept for as long as they last."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

Found = TypeVar("Found")


class Derived:
    """Results worked out from lists of the view, and again only when the view has made new ones.

    Most questions are asked many times between two changes. The caller does not change what it gets.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[object, ...], Any]] = {}

    def of(self, name: str, make: Callable[..., Found], *sources: object) -> Found:
        """Compute `make(*sources)`, or return what that gave for these very objects."""
        kept = self._kept.get(name)
        if kept is not None and all(map(operator.is_, kept[0], sources)):
            return cast(Found, kept[1])
        found = make(*sources)
        self._kept[name] = (sources, found)
        return found

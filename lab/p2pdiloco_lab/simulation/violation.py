"""The exception of a broken rule of the simulator."""

from __future__ import annotations


class Violation(Exception):
    """An invariant of the protocol does not hold. `rule` names it; one bug has one rule."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule

"""Findings of the doctor: each good, worth a warning, bad, or not to be had, with what to do."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from msgspec import Struct


class Level(Enum):
    """Levels of a finding."""

    GOOD = "good"
    SKIPPED = "skipped"
    """Level of what could not be looked at; the words say why."""
    WARNING = "warning"
    BAD = "bad"


class Diagnosis(Struct, frozen=True):
    """Finding on one thing."""

    check: str
    level: Level
    words: str
    todo: str = ""
    """Sentence on what to do; empty: nothing."""


EXIT_STATUSES = {Level.GOOD: 0, Level.SKIPPED: 0, Level.WARNING: 1, Level.BAD: 2}


def good(check: str, words: str) -> Diagnosis:
    """Make a finding that all is well."""
    return Diagnosis(check, Level.GOOD, words)


def warning(check: str, words: str, todo: str) -> Diagnosis:
    """Make a finding of what works, but not well."""
    return Diagnosis(check, Level.WARNING, words, todo)


def bad(check: str, words: str, todo: str) -> Diagnosis:
    """Make a finding of what keeps a node from its work."""
    return Diagnosis(check, Level.BAD, words, todo)


def skipped(check: str, why: str, todo: str = "") -> Diagnosis:
    """Make a finding that something could not be looked at."""
    return Diagnosis(check, Level.SKIPPED, why, todo)


def exit_status(findings: Iterable[Diagnosis]) -> int:
    """Return 0 if nothing is wrong, 1 with warnings, 2 if something is bad."""
    return max((EXIT_STATUSES[finding.level] for finding in findings), default=0)

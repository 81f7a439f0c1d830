"""Findings of the doctor: each good, worth a warning, bad, or not to be had, with what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from enum import Enum

from msgspec import Struct

from p2pdiloco.errors import UserError, first_line


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
Looked = Awaitable[Iterable[Diagnosis]]


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


async def looked(check: str, look: Callable[[], Looked], within_s: float) -> AsyncIterator[Diagnosis]:
    """Look at one thing. Whatever goes wrong with that is a finding, too."""
    try:
        async with asyncio.timeout(within_s):
            found = list(await look())
    except TimeoutError:
        found = [skipped(check, f"this took longer than {within_s:g} s")]
    except UserError as error:
        found = [bad(check, str(error), error.hint)]
    except Exception as error:  # noqa: BLE001  (a doctor looks at broken machines)
        found = [skipped(check, f"this could not be looked at: {type(error).__name__}: {first_line(error)}")]
    for finding in found:
        yield finding

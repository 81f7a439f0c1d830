"""Checks of the doctor, each with a bound in time, and all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from p2pdiloco.cli.options import Diagnosis, bad, skipped
from p2pdiloco.errors import UserError, first_line

Findings = Awaitable[Iterable[Diagnosis]]


async def findings_of(check: str, look: Callable[[], Findings], within_s: float) -> AsyncIterator[Diagnosis]:
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


async def all_of(
    found: AsyncIterator[Diagnosis], within_s: float, tell: Callable[[Diagnosis], None]
) -> list[Diagnosis]:
    """Tell of each finding when it is there; list them. A check that is not done in time is one more."""
    findings: list[Diagnosis] = []
    try:
        async with asyncio.timeout(within_s):
            async for finding in found:
                findings.append(finding)
                tell(finding)
    except TimeoutError:
        rest = f"what is left was not looked at: {within_s:g} s are over"
        findings.append(skipped("time", rest, "raise --timeout-s"))
        tell(findings[-1])
    return findings

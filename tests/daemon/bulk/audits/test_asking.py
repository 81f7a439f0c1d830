"""Whom an audit asks for what it needs, while peers take long, or are busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from audit_kit import AuditTown, memory_town
from daemon_kit import until

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import AuditOutcome
from p2pdiloco.daemon.bulk import merge_audits
from p2pdiloco.daemon.bulk.merge_audits import Subject


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[AuditTown]:
    async with await memory_town(tmp_path) as made:
        yield made


async def test_who_is_busy_is_asked_again(town: AuditTown, monkeypatch: pytest.MonkeyPatch) -> None:
    """When somebody is accused all members ask the same few."""
    monkeypatch.setattr(merge_audits, "BUSY_S", 0.001)
    version, givers = await town.version(), [*town.learners, town.syncer]
    for node in givers:
        node.transfers.giving._to["others"] = merge_audits.MAX_GIVEN
    times, pull_into = [0], town.auditor.transport.pull_into

    async def counted(*given: Any) -> Any:
        times[0] += 1
        return await pull_into(*given)

    monkeypatch.setattr(town.auditor.transport, "pull_into", counted)
    audit = asyncio.create_task(town.auditor.audit(version))
    await until(lambda: times[0] > 4 * len(givers) or audit.done(), "all are asked more than once")
    for node in givers:
        node.transfers.giving._to.clear()
    assert await audit is AuditOutcome.SAME


async def test_who_takes_long_goes_on_while_another_is_asked(
    town: AuditTown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_audits, "SOURCE_S", 0.05)
    version, asked, slow = await town.version(), asyncio.Event(), town.learners[0].transfers.giving
    find = slow._find

    async def late(pull: Any) -> Any:
        await asked.wait()
        return await find(pull)

    async def nothing(_pull: Any) -> None:
        asked.set()

    monkeypatch.setattr(slow, "_find", late)
    monkeypatch.setattr(town.syncer.transfers.giving, "_find", nothing)
    assert await town.auditor.audit(version) is AuditOutcome.SAME
    assert asked.is_set() and town.auditor.transfers.auditing.held_bytes == 0


async def test_the_core_hears_whether_the_syncer_withholds_what_it_merged(town: AuditTown) -> None:
    version, auditor = await town.version(), town.auditor
    await town.gone(town.learners[0])
    assert await auditor.audit(version) is AuditOutcome.SAME and not auditor.withheld
    auditor.forget()
    town.syncer.transfers.merged.forget()
    assert await auditor.audit(version) is AuditOutcome.MISSING and auditor.withheld
    await town.gone(town.syncer)
    assert await auditor.audit(version) is AuditOutcome.MISSING and not auditor.withheld


async def test_where_somebody_is_accused_each_asks_in_an_order_of_its_own(town: AuditTown) -> None:
    version, ask = await town.version(), town.auditor.transfers.auditing._asking
    for accusers, few in (((), True), ((town.learners[2].name,), False)):
        subject = Subject(ev.Audit(0, version, accusers))
        wanted = subject.wanted()[0]
        first = {ask._sources(subject, wanted)[0] for _ in range(64)}
        assert (first == set(wanted.makers)) is few

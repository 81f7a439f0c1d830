"""Chains of versions by hand, and histories of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kit import RUN, child, genesis

from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.credits import FragmentLedger, HeadRef, HistoryRecord, HistoryStore, count_line

START_S = 1_800_000_000
DAY_S = 86_400


def chain(length: int, learners: tuple[str, ...] = ("p1", "p2"), fragment: int = 0) -> list[SignedVersion]:
    """So many versions after version 0."""
    found = [genesis(fragment)]
    for _ in range(length):
        found.append(child(found[-1].header, learners=learners))
    return found[1:]


def record(version: SignedVersion) -> HistoryRecord:
    """The record of a version that was taken a minute after its parent."""
    return HistoryRecord(START_S + 60 * version.header.number, version)


def history_of(folder: Path, versions: Iterable[SignedVersion]) -> HistoryStore:
    """A history that has these."""
    history = HistoryStore(folder)
    for version in versions:
        history.append(record(version))
    return history


def tip(version: SignedVersion) -> HeadRef:
    """The version as the end of a line."""
    return HeadRef.of(version.header.head())


def ledger_of(history: HistoryStore, head: SignedVersion, bucket_s: int = 0) -> FragmentLedger:
    """What the line that ends there counts."""
    return count_line(history, RUN, head.header.fragment, tip(head), bucket_s=bucket_s)

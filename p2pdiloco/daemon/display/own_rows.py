"""Rows of a report beside those of members and fragments: rest, this month's bytes, who is excluded."""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco.core.audit_state import Excluded
from p2pdiloco.daemon.display.bounds import Line, Natural, Row, Text, Words
from p2pdiloco.daemon.rest.reasons import RestReason

MAX_EXCLUDED_ROWS = 32


class RestRow(Row, frozen=True, kw_only=True):
    """Row of why this node's learner rests, by the wish of its machine's owner (`daemon.rest`)."""

    reason: RestReason
    since: float = 0.0
    """Seconds since 1970, by the node's clock."""
    words: Line = ""
    """Words for one line: "idle: on battery since 14:02, until mains power is back"."""
    ends: Line = ""
    """Words on what ends it."""
    handed_over: bool = False
    """True: all that was made is merged."""


class TransferRow(Row, frozen=True, kw_only=True):
    """Row of the bytes that this node moved in a calendar month, over all its lives
    (docs/topics/limits.md)."""

    month: Words = ""
    """Month as "2026-11", by the node's clock."""
    sent_bytes: Natural = 0
    received_bytes: Natural = 0
    budget_bytes: Natural = 0
    """Bytes both ways that its owner permits; 0: no bound."""


class ExcludedRow(Row, frozen=True, kw_only=True):
    """Row of a peer that is shown to have lied (docs/protocol/proofs.md)."""

    peer: Text
    name: Text = ""
    reason: Line = ""
    """Words on what it did."""


def excluded_rows(excluded: Excluded, name_of: Callable[[str], str]) -> tuple[ExcludedRow, ...]:
    """Make the rows of those who were found out last."""
    pairs = list(zip(excluded.peers, excluded.proofs, strict=True))[-MAX_EXCLUDED_ROWS:]
    return tuple(ExcludedRow(peer=peer, name=name_of(peer), reason=proof.words()) for peer, proof in pairs)

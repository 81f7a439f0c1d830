"""Wording of the bytes that a node moved this month."""

from __future__ import annotations

from p2pdiloco.daemon.display.own_rows import TransferRow
from p2pdiloco.daemon.display.wording import size
from p2pdiloco.errors import clean


def transfer_text(row: TransferRow) -> str:
    """Word them: "transfer in 2026-11: 1.2 GB sent, 3.4 GB received, of 200 GB"."""
    text = f"transfer in {clean(row.month)}: {size(row.sent_bytes)} sent, {size(row.received_bytes)} received"
    return f"{text}, of {size(row.budget_bytes)}" if row.budget_bytes else text

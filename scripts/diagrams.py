#!/usr/bin/env python3
"""Draws the core's transition tables into ARCHITECTURE.md, between its two diagram markers.

python scripts/diagrams.py           write the diagrams
python scripts/diagrams.py --check   exit 1 if the file's diagrams are not those of the code
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from p2pdiloco.core.contributions.pending import SEND_TABLE, SendState
from p2pdiloco.core.election.office_table import OFFICE_TABLE, OfficeState
from p2pdiloco.core.following.follower import FOLLOW_TABLE, FollowState
from p2pdiloco.core.machine import mermaid
from p2pdiloco.core.rounds.round_table import ROUND_TABLE, RoundState

DOCUMENT = Path(__file__).parent.parent / "ARCHITECTURE.md"
BEGIN, END = "<!-- diagrams:begin -->", "<!-- diagrams:end -->"
TABLES: tuple[tuple[str, Any, Any], ...] = (
    ("A member towards a fragment's office (`core/election/office.py`)", OFFICE_TABLE, OfficeState.VACANT),
    ("The syncer's round (`core/rounds/round_table.py`)", ROUND_TABLE, RoundState.IDLE),
    ("A learner's contribution (`core/contributions/pending.py`)", SEND_TABLE, SendState.WAITING),
    ("Following the chain (`core/following/follower.py`)", FOLLOW_TABLE, FollowState.RESTING),
)


def diagrams() -> str:
    """Markdown of all tables."""
    parts = [f"**{title}**\n\n```mermaid\n{mermaid(table, start)}\n```" for title, table, start in TABLES]
    return "\n\n".join(parts)


def drawn(document: str) -> str:
    """The document with fresh diagrams. Raises: ValueError when it lacks the markers."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} … {END} in the document")
    return f"{before}{BEGIN}\n\n{diagrams()}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Exit status."""
    document = DOCUMENT.read_text(encoding="utf-8")
    fresh = drawn(document)
    if arguments == ["--check"]:
        if document != fresh:
            print("ARCHITECTURE.md: diagrams are stale: run python scripts/diagrams.py", file=sys.stderr)
        return int(document != fresh)
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    DOCUMENT.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

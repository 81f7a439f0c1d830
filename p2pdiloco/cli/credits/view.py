"""View of credits: a table for people, CSV for spreadsheets, JSON for scripts."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2pdiloco.cli.credits.collecting import RunCredits
from p2pdiloco.credits import CreditRow
from p2pdiloco.daemon.display.snapshot import count, counted, short_peer
from p2pdiloco.errors import clean, json_line

DAY_S = 86_400
FORMULA = "=+-@＝＋－＠"
"""First characters by which a spreadsheet takes a text for a formula."""
COLUMNS = (
    "begins", "name", "peer", "tokens", "fragment_tokens", "claimed_tokens", "inner_steps", "contributions",
    "first", "last",
)  # fmt: skip


def moment(at_s: int, day_only: bool = False) -> str:
    """Word a time, UTC; empty: it is not known."""
    if not at_s:
        return ""
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d" if day_only else "%Y-%m-%dT%H:%MZ")
    except (OverflowError, ValueError, OSError):
        return "?"


def cell(text: str) -> str:
    """Make a text that a spreadsheet takes for a text: names are others' own choice."""
    text = clean(text)
    return f"'{text}" if text[:1] in FORMULA and text else text


def as_csv(found: RunCredits) -> str:
    """Table with one line for each learner, or each learner and stretch of time."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in found.credits.rows:
        figures = row.tokens, row.fragment_tokens, row.claimed_tokens, row.inner_steps, row.contributions
        times = moment(row.first_s), moment(row.last_s)
        name = cell(found.names.get(row.peer, ""))
        writer.writerow((moment(row.begins_s), name, cell(row.peer), *figures, *times))
    return out.getvalue()


def as_json(found: RunCredits) -> str:
    """One JSON object."""
    credits = found.credits
    rows: list[dict[str, Any]] = [
        {
            "peer": row.peer,
            "name": found.names.get(row.peer, ""),
            "tokens": row.tokens,
            "fragment_tokens": row.fragment_tokens,
            "claimed_tokens": row.claimed_tokens,
            "inner_steps": row.inner_steps,
            "contributions": row.contributions,
            "first_s": row.first_s or None,
            "last_s": row.last_s or None,
            "begins_s": row.begins_s or None,
        }
        for row in credits.rows
    ]
    return json_line(
        {
            "run_id": found.run,
            "run_name": found.run_name,
            "tokens": credits.tokens,
            "fragments": credits.fragments,
            "fragment_tokens": credits.fragment_tokens,
            "before_fragment_tokens": credits.before_fragment_tokens,
            "uncredited_fragment_tokens": credits.uncredited_fragment_tokens,
            "missing_before": {str(f): number for f, number in credits.missing.items()},
            "counted_here": found.counted_here,
            "signatures_checked": found.checked,
            "doubts": credits.doubts,
            "notes": found.notes,
            "members_asked": found.members,
            "keepers": found.keepers,
            "heads": [{"number": tip.number, "digest": tip.digest.hex()} for tip in found.tips],
            "rows": rows,
        }
    )


def render(found: RunCredits, top: int, buckets: bool) -> RenderableType:
    """Table for people, with what it is worth below it."""
    rows = found.credits.rows
    shown = rows if buckets else rows[:top]
    title = Text.assemble(
        "run ", (clean(found.run_name), "bold"), f" {found.run[:16]}: ",
        f"{count(found.credits.tokens)} tokens, {counted(len({row.peer for row in rows}), 'learner')}",
    )  # fmt: skip
    parts: list[RenderableType] = [title, Text(), _table(found, shown, buckets)]
    if len(shown) < len(rows):
        parts.append(Text(f"{len(rows) - len(shown)} more: --top {len(rows)}", style="dim"))
    parts += [Text(), *(Text(line, style=style) for line, style in words(found))]
    return Group(*parts)


def _table(found: RunCredits, rows: tuple[CreditRow, ...], buckets: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    if buckets:
        table.add_column("from", no_wrap=True)
    table.add_column("name", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("peer", no_wrap=True)
    for heading in ("tokens", "share", "steps", "merged"):
        table.add_column(heading, justify="right", no_wrap=True)
    if not buckets:  # there each row has its own time
        table.add_column("first")
        table.add_column("last")
    whole = max(1, found.credits.fragment_tokens)
    for row in rows:
        cells = [clean(found.names.get(row.peer, "")) or "-", f"…{short_peer(row.peer)}", count(row.tokens)]
        cells += [f"{100 * row.fragment_tokens / whole:.1f} %", count(row.inner_steps)]
        cells += [str(row.contributions)]
        if buckets:
            cells = [moment(row.begins_s) or "not known", *cells]
        else:
            cells += [moment(row.first_s, True) or "-", moment(row.last_s, True) or "-"]
        table.add_row(*map(Text, cells))
    return table


def words(found: RunCredits) -> list[tuple[str, str]]:
    """Sentences, with a style each, on what the figures are worth."""
    credits, fragments = found.credits, max(1, found.credits.fragments)
    lines: list[tuple[str, str]] = []
    if credits.missing:
        first, number = max(credits.missing.values()), len(credits.missing)
        before = count(credits.before_fragment_tokens / fragments)
        text = f"Nobody who answers keeps all: in {number} fragments versions before {first} are missing. "
        lines.append((f"{text}Of {before} tokens it is not known whose they are.", "yellow"))
    if not found.keepers:
        text = "No member that answers keeps the history: what is shown is of the newest versions. "
        lines.append((f"{text}`p2pdiloco node --keep-history` keeps it from now on.", "yellow"))
    for doubt, times in credits.doubts.items():
        lines.append((f"{clean(doubt)}: {times} times", "red"))
    if credits.uncredited_fragment_tokens:
        lost = count(credits.uncredited_fragment_tokens / fragments)
        lines.append((f"for that, {lost} tokens are credited to nobody", "red"))
    lines += [(clean(note), "red") for note in found.notes]
    lines.append((_worth(found), "dim"))
    return lines


def _worth(found: RunCredits) -> str:
    if found.checked is not None:
        heads = f"the heads of {found.members} members" if found.members != 1 else "the heads of 1 member"
        return f"Counted here from {heads}; {found.checked} signatures of learners and syncers checked."
    if found.counted_here:
        return "Counted here; signatures were not checked (--verify does)."
    others = f" of {len(found.keepers)} that keep the history" if len(found.keepers) > 1 else ""
    keeper = f"one member{others}" if others else f"…{short_peer(found.keepers[0])}"
    return f"The word of {keeper}; --verify counts it here, from the learners' signatures."

"""View of a status report: tables for people, JSON for scripts."""

from __future__ import annotations

from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2pdiloco.daemon.display.snapshot import (
    FragmentRow,
    PeerRow,
    StatusReport,
    count,
    counted,
    duration,
    loss_text,
    owner_text,
    progress_text,
    short_peer,
    transfer_text,
)
from p2pdiloco.daemon.display.terminal import (
    activity_text,
    age_text,
    data_text,
    groups_text,
    peer_names,
    refusals_text,
    role_text,
    seat_text,
    versions_text,
)
from p2pdiloco.errors import clean, json_line


def status_json(report: StatusReport) -> str:
    """One JSON object with the fields of `StatusReport`; numbers that are not finite become null."""
    return json_line(report)


def render_status(report: StatusReport) -> RenderableType:
    """Summary, members, fragments, latest reasons, from top to bottom; any width from 80 columns on."""
    names = {**peer_names("", "-", report.members), "": "-"}
    parts: list[RenderableType] = [
        _summary(report, names),
        Text(),
        _members(report),
        Text(),
        _fragments(report.fragments, names),
    ]
    if report.recent:
        parts += [Text(), Text("latest", style="dim"), *(Text(clean(line)) for line in report.recent)]
    return Group(*parts)


def _summary(report: StatusReport, names: dict[str, str]) -> Text:
    answered_by = names.get(report.answered_by) or clean(report.answered_by)
    text = Text.assemble("run ", (clean(report.run_name), "bold"), f" {clean(report.run_id[:16])}\n")
    members = counted(report.members_total, "member")
    text.append(f"{members}, {len(report.fragments)} fragments, ")
    text.append(f"versions {versions_text(report.fragments)}{groups_text(report.fragments)}\n")
    text.append(f"{count(report.run_tokens)} tokens merged in {count(report.run_versions)} versions, ")
    text.append(f"{count(sum(member.tokens_per_s for member in report.members))} tokens/s\n")
    if report.course.schedule_tokens:
        text.append(f"{progress_text(report.course)}\n", "bold")
    if owner := owner_text(report.course):
        text.append(f"{owner}\n", "yellow")
    text.append(f"loss {loss_text(report.loss, 3)} (training, mean of members)")
    if report.heldout_loss is not None:
        by = names.get(report.heldout_by) or f"…{short_peer(report.heldout_by)}"
        text.append(
            f", {loss_text(report.heldout_loss, 3)} (held-out{f', by {by}' if report.heldout_by else ''})"
            f"{age_text(report.heldout_age_s)}"
        )
    if report.data is not None:
        text.append(f"\ndata: {data_text(report.data)} begun; ")
        text.append(f"{answered_by} trained on {count(report.data.tokens)} tokens")
    if report.refusals:
        text.append(f"\nrefused {refusals_text(report.refusals)}", "yellow")
    if report.rest is not None:
        text.append(f"\n{answered_by} is {clean(report.rest.words)}", "yellow")
    if report.transfer is not None:
        text.append(f"\n{answered_by}: {transfer_text(report.transfer)}")
    for liar in report.excluded:
        text.append(
            f"\n{clean(liar.name) or f'…{short_peer(liar.peer)}'} is excluded: {clean(liar.reason)}", "red"
        )
    if report.link:
        text.append(f"\n{clean(report.link)}", "yellow")
    if report.start is not None:
        text.append(f"\n{answered_by} {clean(report.start.words())}")
    return text.append(f"\nas seen by {answered_by} ({report.state})", "dim")


def _table(title: str, columns: list[tuple[str, int]]) -> Table:
    """Columns are (heading, width), of numbers if above 0. Width 0: the rest of the line, wrapped."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for name, width in columns:
        align: Literal["right", "left"] = "right" if width > 0 else "left"
        table.add_column(
            name, justify=align, width=abs(width) or None, no_wrap=width != 0, overflow="ellipsis"
        )
    return table


def _members(report: StatusReport) -> Table:
    hidden = report.members_total - len(report.members)
    more = f", {len(report.members)} shown" if hidden > 0 else ""
    columns = [("name", -12), ("peer", -7), ("step", 7), ("tokens/s", 8)]
    columns += [("loss", 5), ("seen", 7), ("reach", -8), ("", 0)]
    table = _table(f"members ({report.members_total}{more})", columns)
    for row in report.members:
        table.add_row(*map(Text, _member_cells(row, row.peer == report.answered_by)))
    return table


def _member_cells(row: PeerRow, answered: bool) -> list[str]:
    seen = "never" if row.last_seen_s is None else duration(row.last_seen_s)
    return [
        clean(row.name) or "-",
        f"…{short_peer(row.peer)}",
        str(row.inner_step),
        count(row.tokens_per_s),
        loss_text(row.loss, 3),
        "answers" if answered else seen,
        clean(row.reach).partition(" ")[0] or "-",
        role_text(row),
    ]


def _fragments(rows: tuple[FragmentRow, ...], names: dict[str, str]) -> Table:
    """Make the table of fragments. Columns of groups take the room of terms and tokens: the JSON has all."""
    grouped = any(row.groups > 1 for row in rows)
    columns = [("fragment", 8), ("version", 7), ("digest", -8)]
    if grouped:
        columns += [("leaf syncer", -12), ("group", -8), ("root", -8), ("state", 0)]
    else:
        columns += [("term", 6), ("syncer", -14), ("tokens", 6), ("state", 0)]
    table = _table(f"fragments ({len(rows)})", columns)
    for row in rows:
        syncer = names.get(row.syncer) or f"…{short_peer(row.syncer)}"
        root = names.get(row.root) or f"…{short_peer(row.root)}"
        cells = [str(row.index), str(row.number), clean(row.digest[:8])]
        cells += [syncer, seat_text(row), root] if grouped else [str(row.term), syncer, count(row.tokens)]
        table.add_row(*map(Text, [*cells, activity_text(row)]))
    return table

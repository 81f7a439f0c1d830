"""The report of a chaos run: figures against their goals, in JSON and for people."""

from __future__ import annotations

from msgspec import Struct
from rich.table import Table

from p2pdiloco_lab.chaos.verdict import Comparison, Figures


class ChaosReport(Struct, kw_only=True, frozen=True):
    """report.json. Shares are fractions; what could not be measured is null."""

    nodes: int
    preset: str
    seed: int
    load: float
    """Share of the processors that all learners together were asked to use."""
    min_step_s: float
    """Least time of an inner step, which follows from the load; 0: as short as may be."""
    seconds: float
    faults: int
    """Carried out."""
    skipped: int
    faults_per_hour: float
    faulty: Figures
    fault_free: Figures | None
    comparison: Comparison | None
    settled_s: float | None
    digests_agree: bool
    failures: tuple[str, ...]
    """Reasons of exit status 1; empty: nobody stuck, digests equal, no unexpected exit."""
    goals: dict[str, bool]
    """Figure -> whether it reaches the goal of a long run (docs/lab/chaos.md); no part of the exit status."""


def goals(faulty: Figures, comparison: Comparison | None) -> dict[str, bool]:
    """Judge which of the goals are reached, as far as they were measured."""
    found = {}
    if faulty.participation is not None:
        found["participation >= 95 %"] = faulty.participation >= 0.95
    if faulty.t_resume.median_s is not None:
        found["T_resume < 3 s median"] = faulty.t_resume.median_s < 3
    if faulty.t_back.median_s is not None:
        found["T_back < 15 s median"] = faulty.t_back.median_s < 15
    if comparison is not None:
        found["merges per fragment >= 99 %"] = comparison.merges >= 0.99
        if comparison.inner_steps_per_cpu_s is not None:
            found["inner steps per CPU-second within 3 %"] = comparison.inner_steps_per_cpu_s >= 0.97
        if comparison.loss_ratio is not None:
            found["loss within 1 % at equal tokens"] = comparison.loss_ratio <= 1.01
    return found


def table(report: ChaosReport) -> Table:
    """Make the table for a terminal."""
    shown = Table(show_header=False, box=None)
    for name, value in _rows(report):
        shown.add_row(name, value)
    return shown


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _rows(report: ChaosReport) -> list[tuple[str, str]]:
    ours, than = report.faulty, report.comparison
    least = min(ours.merges.values(), default=0)
    rows = [
        ("faults", f"{report.faults} in {report.seconds:.0f} s: {report.faults_per_hour:.0f} an hour"),
        ("merges", f"{sum(ours.merges.values())}, at least {least} of every fragment"),
        ("participation of live learners", _percent(ours.participation)),
        ("  of those that syncers counted on", _percent(ours.participation_by_core)),
        ("T_resume, median / worst", _seconds(ours.t_resume.median_s, ours.t_resume.worst_s)),
        ("T_back, median / worst", _seconds(ours.t_back.median_s, ours.t_back.worst_s)),
        ("tokens merged / trained", _percent(ours.tokens_merged / max(1, ours.tokens_trained))),
    ]
    if than is not None:
        rows += [
            ("against the run without faults:", ""),
            ("  merges per fragment, at least", _percent(than.merges)),
            ("  inner steps per CPU-second", _percent(than.inner_steps_per_cpu_s)),
            ("  goodput", _percent(than.goodput)),
            ("  held-out loss at equal tokens", _losses(than)),
        ]
    settled = "never" if report.settled_s is None else f"after {report.settled_s:.1f} s"
    rows.append(("all nodes equal at the end", settled))
    rows.append(("digests agree", "yes" if report.digests_agree else "NO"))
    rows += [("goal " + ("reached" if reached else "MISSED"), name) for name, reached in report.goals.items()]
    rows += [("FAILED", words) for words in report.failures]
    return rows


def _seconds(median_s: float | None, worst_s: float | None) -> str:
    return "nothing measured" if median_s is None else f"{median_s:.2f} s / {worst_s:.2f} s"


def _losses(than: Comparison) -> str:
    if than.loss_faulty is None or than.loss_fault_free is None:
        return "unknown"
    words = f"{than.loss_faulty:.3f} against {than.loss_fault_free:.3f}"
    return f"{words} at {than.loss_at_tokens / 1e6:.2f} M tokens"

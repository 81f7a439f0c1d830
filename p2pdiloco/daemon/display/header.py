"""Header of the live view: what a node is and does, packed into as few lines as the width allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from p2pdiloco.daemon.display.progress import copied_text, owner_text, progress_text
from p2pdiloco.daemon.display.snapshot import DataRow, NodeSnapshot
from p2pdiloco.daemon.display.transfer_text import transfer_text
from p2pdiloco.daemon.display.wording import count, duration, folded, loss_text, short_peer, size, sparkline
from p2pdiloco.errors import clean

STATE_STYLES = {"training": "bold green", "leaving": "bold red"}
OLD_S = 5.0
"""Age from which on a figure is shown with it: younger ones are as new as the picture."""
GAP = "  "
CURVE_CELLS = 7
LEFT_OUT = ("month", "traffic", "tokens", "data", "device", "pace")
"""Parts that are left out first where there is no room."""


def header(snapshot: NodeSnapshot, width: int, most: int) -> list[Text]:
    """Draw at most so many lines. What does not fit is left out whole, the least important first."""
    parts = _parts(snapshot)
    for name in LEFT_OUT:
        if len(packed(parts.values(), width)) <= most:
            break
        parts.pop(name, None)
    return packed(parts.values(), width)[: max(1, most)]


def packed(parts: Iterable[Text], width: int) -> list[Text]:
    """Pack parts into lines, in order; one that is longer than a line goes over several."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(GAP) + part.cell_len <= width:
            lines[-1].append(GAP).append_text(part)
        elif part.cell_len <= width:
            lines.append(part.copy())
        else:
            lines += [Text(line, part.style) for line in folded(part.plain, width)]
    return lines


def _parts(snapshot: NodeSnapshot) -> dict[str, Text]:
    course = snapshot.course
    parts = {
        "name": Text.assemble((clean(snapshot.name) or "node", "bold"), f" …{short_peer(snapshot.peer)}"),
        "run": Text.assemble("run ", (clean(snapshot.run_name), "bold"), f" {clean(snapshot.run_id[:8])}"),
        "state": Text(snapshot.state, STATE_STYLES.get(snapshot.state, "bold yellow")),
        "copied": Text(copied_text(snapshot.copied_share), "bold yellow"),
        "device": Text(clean(snapshot.device)),
        "data": Text(data_text(snapshot.data) if snapshot.data else ""),
        "step": Text(f"step {snapshot.inner_step}{age_text(snapshot.learner_age_s)}"),
        "loss": Text.assemble(
            "loss ",
            (loss_text(snapshot.loss, 3), "bold"),
            (f" {sparkline(snapshot.loss_history, CURVE_CELLS)}", "cyan"),
        ),
        "heldout": Text(_heldout(snapshot)),
        "speed": Text(f"{count(snapshot.tokens_per_s)} tokens/s"),
        "pace": Text(f"{duration(snapshot.step_time_s)}/step"),
        "traffic": Text(f"up {size(snapshot.bytes_sent)}, down {size(snapshot.bytes_received)}"),
        **{f"warning {number}": text for number, text in enumerate(_warnings(snapshot))},
        "month": Text(transfer_text(snapshot.transfer) if snapshot.transfer is not None else ""),
        "course": Text(progress_text(course) if course.schedule_tokens else "", "bold"),
        "tokens": Text(
            f"tokens {count(snapshot.tokens_total)} here, {count(snapshot.run_tokens)} in "
            f"{count(snapshot.run_versions)} versions"
        ),
    }
    return {name: part for name, part in parts.items() if part.plain}


def _warnings(snapshot: NodeSnapshot) -> Sequence[Text]:
    words = [clean(snapshot.rest.words)] if snapshot.rest is not None else []
    words.append(owner_text(snapshot.course))
    if not snapshot.votes:
        words.append("the disk takes nothing: no vote")
    words.append(clean(snapshot.link))
    if snapshot.reach not in ("", "direct"):
        words.append(clean(snapshot.reach))
    if snapshot.refusals:
        words.append(f"refused {refusals_text(snapshot.refusals)}")
    return [Text(word, "yellow") for word in words]


def _heldout(snapshot: NodeSnapshot) -> str:
    if snapshot.heldout_loss is None:
        return ""
    return f"held-out {loss_text(snapshot.heldout_loss, 3)}{age_text(snapshot.heldout_age_s)}"


def age_text(age_s: float | None) -> str:
    """Word how old a figure is, as " (40.0 s ago)"; empty for one that is new."""
    return "" if age_s is None or age_s < OLD_S else f" ({duration(age_s)} ago)"


def data_text(data: DataRow) -> str:
    """Word how many shards were begun, as "epoch 1, 57/240 shards"."""
    return f"epoch {data.epoch}, {data.begun}/{data.shards} shards"


def refusals_text(refusals: dict[str, int]) -> str:
    """Word refusals, as `4: stale 3, nan 1`: the sum, then the reasons, most frequent first."""
    ordered = sorted(refusals.items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{clean(reason)} {number}" for reason, number in ordered)
    return f"{sum(refusals.values())}: {reasons}"

"""Figures: every name is documented, every expression knows its names, nothing of the owner's is public."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deadlines import within_s
from msgspec.structs import replace
from page_scene import RUN, scene, with_public
from test_run_view import NOW_S, report
from web_kit import Shown

from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.daemon.display.snapshot import CourseRow, encode_status
from p2pdiloco.daemon.display.timeline import LossPoint, load_timeline
from p2pdiloco.daemon.network.discovery import ask_status
from p2pdiloco.errors import RemoteError
from p2pdiloco.web import sources
from p2pdiloco.web.metrics import FIGURES, PREFIX, Metrics
from p2pdiloco.web.sources import AskedSource, StartingSource, Views
from p2pdiloco.web.view import Pulse, RunChoice, RunView

ROOT = Path(__file__).parents[2]
UNITS = ("seconds", "bytes_total", "tokens_total", "tokens", "per_second", "nats", "_total")
COUNTS = {
    "run_pulse",
    "run_last_merge_contributors",
    "run_members",
    "run_members_known",
    "node_state",
    "node_resting",
}
COUNTS |= {
    "run_excluded_members",
    "node_weight_share",
    "node_contributions_waiting",
    "node_link_behind",
    "node_offices",
    "node_expelled_members",
}
"""Names of plain numbers of something, which have no unit."""


def exported(text: str) -> set[str]:
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}


def test_every_exported_name_is_in_the_table_and_the_table_has_no_other() -> None:
    text = Metrics(Views(Shown())).exposition(is_owner=True).decode()
    document = (ROOT / "docs" / "topics" / "metrics.md").read_text()
    shown = {name for name in re.findall(r"^\| `(p2pdiloco_\w+)` ", document, flags=re.MULTILINE)}
    assert shown == {PREFIX + figure.name for figure in FIGURES}
    assert exported(text) - {"p2pdiloco_build"} - shown == {
        n for n in exported(text) if n.startswith("process_")
    }
    assert all(f"`{name}`" in document for name in exported(text))
    for figure in FIGURES:
        assert f"| {figure.help} |" in document
        assert figure.name in COUNTS or figure.name.endswith(UNITS), "its unit"


def test_figures_are_those_of_the_page() -> None:
    lines = Metrics(Views(Shown())).exposition(is_owner=True).decode().splitlines()
    run = f'run="{RUN}"'
    for line in (
        f"p2pdiloco_run_versions_total{{{run}}} 5123.0",
        f"p2pdiloco_run_version_age_seconds{{{run}}} 8.0",
        f'p2pdiloco_run_members{{{run},state="silent"}} 1.0',
        f'p2pdiloco_node_state{{{run},state="training"}} 1.0',
        f'p2pdiloco_node_contributions_refused_total{{reason="stale",{run}}} 5.0',
        f'p2pdiloco_node_expelled_members{{reason="harm",{run}}} 1.0',
        f'p2pdiloco_node_expelled_members{{reason="nothing",{run}}} 0.0',
    ):
        assert line in lines


def test_anybody_sees_the_run_only() -> None:
    public = Metrics(Views(Shown())).exposition(is_owner=False).decode()
    assert "p2pdiloco_run_versions_total" in public and "node" not in public.replace('role="node"', "")
    assert "process_" not in public


def test_a_bootstrap_has_figures_of_all_its_runs_and_none_of_a_learner() -> None:
    class Two:
        def view(self, run: str) -> RunView | None:
            ids = ("aa" * 32, "bb" * 32)
            runs = tuple(RunChoice(run_id=known, run_name="r") for known in ids)
            return replace(with_public(scene(), run_id=run or ids[0]), role="bootstrap", runs=runs)

    text = Metrics(Views(Two())).exposition(is_owner=True).decode()
    assert text.count("\np2pdiloco_run_versions_total{") == 2 and "\np2pdiloco_node_step" not in text


def test_before_there_is_a_run_there_is_a_state() -> None:
    text = Metrics(Views(StartingSource("node", "", ""))).exposition(is_owner=True).decode()
    assert 'p2pdiloco_node_state{run="",state="joining"} 1.0' in text and "run_versions_total{" not in text


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_what_operators_copy_uses_names_that_exist(file: str) -> None:
    text = (ROOT / "bootstrap" / file).read_text()
    known = exported(Metrics(Views(Shown())).exposition(is_owner=True).decode())
    used = set(re.findall(r"\b(?:p2pdiloco_(?:run|node)|process)_\w+", text))
    assert used and used <= known


def test_the_dashboard_is_one() -> None:
    board = json.loads((ROOT / "bootstrap" / "grafana.json").read_text())
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in board["panels"]]
    assert len(set(places)) == len(places) and all(x + w <= 24 for x, _, w, _ in places)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_rules_and_example_are_what_prometheus_takes(tmp_path: Path) -> None:
    folder = ROOT / "bootstrap"
    subprocess.run(
        ["promtool", "check", "rules", str(folder / "alerts.yml")], check=True, capture_output=True
    )
    token = tmp_path / "web.token"
    token.write_text("x")
    text = (folder / "prometheus.yml").read_text()
    (tmp_path / "alerts.yml").write_text((folder / "alerts.yml").read_text())
    config = tmp_path / "prometheus.yml"
    config.write_text(text.replace("/var/lib/p2pdiloco/bootstrap/web.token", str(token)))
    subprocess.run(["promtool", "check", "config", str(config)], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize(
    ("alert", "changed", "at", "comes"),
    [
        ("P2pdilocoRunStandsStill", 'run_pulse{pulse="still"}', "9m", False),
        ("P2pdilocoRunStandsStill", 'run_pulse{pulse="still"}', "11m", True),
        ("P2pdilocoRunStandsStill", 'run_pulse{pulse="unknown"}', "11m", True),
        ("P2pdilocoRunStandsStill", "", "110m", False),
        ("P2pdilocoNodeWorkNotMerged", "node_contributions_merged_total{}", "59m", False),
        ("P2pdilocoNodeWorkNotMerged", "node_contributions_merged_total{}", "66m", True),
        ("P2pdilocoNodeWorkNotMerged", "", "110m", False),
        ("P2pdilocoNodeNotTakingPart", 'node_state{state="waiting"}', "14m", False),
        ("P2pdilocoNodeNotTakingPart", 'node_state{state="waiting"}', "16m", True),
        ("P2pdilocoNodeNotTakingPart", "up{}", "16m", True),
        ("P2pdilocoNodeNotTakingPart", "", "110m", False),
    ],
)
def test_alerts_come_when_they_should_and_not_before(
    tmp_path: Path, alert: str, changed: str, at: str, comes: bool
) -> None:
    well = {
        'run_pulse{pulse="still"}': "0x120",
        'run_pulse{pulse="unknown"}': "0x120",
        'node_state{state="training"}': "1x120",
        'node_state{state="waiting"}': "0x120",
        "node_contributions_merged_total{}": "7+1x120",
        "up{}": "1x120",
    }
    ill = {"node_contributions_merged_total{}": "7x120", "up{}": "0x120"}
    labels = '{instance="box:8080", job="p2pdiloco", run="r", '
    series = {
        ("" if name == "up{}" else "p2pdiloco_") + name.replace("{", labels): ill.get(name, "1x120")
        if name == changed
        else values
        for name, values in well.items()
    }
    one = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": []}],
    }
    path = tmp_path / "tests.yml"
    rules = [str(ROOT / "bootstrap" / "alerts.yml")]
    path.write_text(json.dumps({"rule_files": rules, "evaluation_interval": "1m", "tests": [one]}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == comes, said
    assert not comes or f"alertname: {alert}" in said  # it is there, and none was expected


# A bootstrap's page among members that lie: who is asked, and what it outlives.


MANIFEST = SimpleNamespace(admission=SimpleNamespace(seats=("ann", "ben")))


class Run:
    id, name, manifest = "ab" * 32, "test", MANIFEST


class Near:
    """Transport to whom it does not matter."""

    async def connect(self, peer: str, addresses: Any) -> None: ...

    def connected(self) -> list[str]:
        return []


async def test_any_members_are_asked_and_a_bug_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    enough = asyncio.Event()

    async def listed_members(*_: Any) -> dict[str, tuple[str, ...]]:
        return {f"p{number}": () for number in range(100)}

    async def ask_status(_: Any, peer: str, run: str) -> Any:
        asked.append(peer)
        if len(asked) > 80:
            enough.set()
        if len(asked) > 40:
            raise RemoteError("busy")
        return report(), 1

    def take(*_: Any) -> None:
        raise OverflowError("a bug")

    monkeypatch.setattr(sources, "listed_members", listed_members)
    monkeypatch.setattr(sources, "ask_status", ask_status)
    monkeypatch.setattr(sources.WatchedRun, "take", take)
    monkeypatch.setattr(sources, "EVERY_S", 0.0)
    monkeypatch.setattr(sources, "SELDOM_S", 0.0)
    source = AskedSource(Near(), lambda: [Run()], tmp_path)  # type: ignore[arg-type, list-item]
    watching = asyncio.create_task(source.watch())
    either = [watching, asyncio.create_task(enough.wait())]
    await asyncio.wait_for(asyncio.wait(either, return_when="FIRST_COMPLETED"), within_s(10))
    assert not watching.done()
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert len(set(asked)) > sources.MOST_ASKED, "not always those that are listed first"


async def test_what_was_told_gets_old_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Member(Near):
        peer_id = "here"

        def payload_bytes(self) -> tuple[int, int]:
            return 0, 0

        def addresses(self) -> list[str]:
            return []

        def connected(self) -> list[str]:
            return []

    async def listed_members(*_: Any) -> dict[str, tuple[str, ...]]:
        return {"ann": ()}

    told = asyncio.Event()

    async def ask_status(_: Any, peer: str, run: str) -> Any:
        if told.is_set():
            await asyncio.Event().wait()
        told.set()
        return report(curve=(LossPoint(NOW_S, 0, 3.0),)), 1

    monkeypatch.setattr(sources, "listed_members", listed_members)
    monkeypatch.setattr(sources, "ask_status", ask_status)
    monkeypatch.setattr(sources, "EVERY_S", 0.0)
    monkeypatch.setattr(sources, "SELDOM_S", 0.0)
    monkeypatch.setattr(sources.time, "time", lambda: NOW_S)
    run: Any = SimpleNamespace(id=Run.id, name="test", signed=SimpleNamespace(owner="ann"), manifest=MANIFEST)
    source = AskedSource(Member(), lambda: [run], tmp_path)  # type: ignore[arg-type]

    def pulse() -> Pulse:
        view = source.view("")
        assert view is not None and view.public is not None
        return view.public.pulse

    run_folder(tmp_path, Run.id).mkdir(parents=True)
    assert pulse() is Pulse.UNKNOWN
    watching = asyncio.create_task(source.watch())
    await asyncio.wait_for(told.wait(), within_s(10))
    assert pulse() is Pulse.ALIVE
    monkeypatch.setattr(sources.time, "time", lambda: NOW_S + sources.OLD_S + 1)
    assert pulse() is Pulse.UNKNOWN
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert load_timeline(run_folder(tmp_path, Run.id)).curve.points == (LossPoint(NOW_S, 0, 3.0),)


async def test_of_a_crowd_those_are_believed_that_the_run_file_seats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def listed_members(*_: Any) -> dict[str, tuple[str, ...]]:
        return {peer: () for peer in (*(f"stranger{number}" for number in range(60)), "ann", "ben")}

    async def ask_status(_: Any, peer: str, run: str) -> Any:
        if peer == "ben":
            raise RemoteError("busy")
        tokens = 1000 if peer == "ann" else 1 << 40
        return replace(report(course=CourseRow(tokens=tokens)), answered_by=peer), 1

    monkeypatch.setattr(sources, "listed_members", listed_members)
    monkeypatch.setattr(sources, "ask_status", ask_status)
    source, run = AskedSource(Near(), list, tmp_path), Run()  # type: ignore[arg-type]
    await source._ask(run)  # type: ignore[arg-type]
    known = source._watched[run.id].report
    assert known is not None and known.answered_by == "ann"


async def test_nobody_answers_in_the_name_of_another() -> None:
    class Liar(Near):
        async def send(self, peer: str, data: bytes, timeout_s: float) -> bytes:
            return encode_status(report())

    assert (await ask_status(Liar(), "ann", Run.id))[0].answered_by == "ann"  # type: ignore[arg-type]
    with pytest.raises(RemoteError, match="in the name of another"):
        await ask_status(Liar(), "ben", Run.id)  # type: ignore[arg-type]

"""The demo for real, short: what it reports is what its nodes' logs say, and nothing of it is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from system_kit import Swarm

from p2pdiloco.demo.swarm import read_log

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def test_the_report_says_what_happened(swept_swarm: Swarm, tmp_path: Path) -> None:
    files = ["--report", str(tmp_path / "r.json"), "--plot", str(tmp_path / "plot.png")]
    kept = tmp_path / "kept"
    run = ["demo", "--nodes", "2", "--seconds", "25", "--preset", "micro", "--keep", str(kept), *files]
    done = swept_swarm.command(*run, timeout_s=240)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    logs = [read_log(path) for path in kept.glob("node-*/events.jsonl")]

    assert report["nodes"] == len(logs) == 2 and report["digests_agree"] is True
    assert report["loss_before"] > 5 and report["loss_after"] < report["loss_before"] - 1
    lines = [line for log in logs for line in log]
    # The one that is killed may have announced a version and not have written that down yet.
    made = {line.version for line in lines if line.is_head() and line.kind != "catchup"}
    assert report["outer_updates"] == len(made) >= 8
    merges = [line for line in lines if line.is_merge()]
    shares = sum(line.contributors for line in merges) / sum(line.live for line in merges)
    assert report["participation"] == pytest.approx(shares)
    assert 0 < report["median_inner_step_s"] <= report["longest_pause_s"]

    assert report["kills"] == 1 and "kill -9" in done.stderr
    starts = [sum(line.kind == "learner" and line.reason == "running" for line in log) for log in logs]
    assert sorted(starts) == [1, 2], "one node was started twice"
    assert report["t_resume_s"] > 0 and report["t_back_s"] > 0
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert "digests agree" in done.stdout


def test_ctrl_c_ends_everything(swept_swarm: Swarm, tmp_path: Path) -> None:
    command = [
        "demo",
        "--nodes",
        "2",
        "--seconds",
        "60",
        "--preset",
        "micro",
        "--plot",
        str(tmp_path / "p.png"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "p2pdiloco", *command],
        env=swept_swarm.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    shown = []
    for line in process.stderr:
        shown.append(line)
        if "joins" in line:  # by now there are daemons, p2pd processes and perhaps learners
            process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, "".join(shown)
    assert "interrupted" in shown[-1] and not (tmp_path / "p.png").exists()

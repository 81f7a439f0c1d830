"""Demo and chaos for real, short: what is reported is what the nodes' logs say, faults are mended, and
nothing is left, however it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from deadlines import Deadline
from system_kit import POLL_S, Swarm

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


def begun(swarm: Swarm, folder: Path, *words: str) -> subprocess.Popen[str]:
    """A demo in this folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "p2pdiloco", "demo", "--nodes", "2", "--preset", "micro", *words],
        env=swarm.environment,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_ends_everything(swept_swarm: Swarm, tmp_path: Path) -> None:
    process = begun(swept_swarm, tmp_path, "--seconds", "60", "--plot", str(tmp_path / "p.png"))
    assert process.stderr is not None
    shown = []
    for line in process.stderr:
        shown.append(line)
        if "joins" in line:  # by now there are daemons, p2pd processes and perhaps learners
            process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, "".join(shown)
    assert "interrupted" in shown[-1] and not (tmp_path / "p.png").exists()


FAULTS = 4
GONE_S = 20.0


@pytest.mark.slow
def test_short_chaos(swept_swarm: Swarm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rate = str(3600 * FAULTS / 25)
    # With seed 0 both old members may be lost before a newcomer contributed: then they wait for somebody whom
    # they know, for 10 minutes (docs/protocol/belief.md, section 3).
    run = ["chaos", "--nodes", "3", "--seconds", "25", "--seed", "9"]
    run += ["--faults-per-hour", rate, "--no-compare", "--json"]
    done = swept_swarm.command(*run, "--out", str(out), timeout_s=280)
    assert done.returncode == 0, done.stderr + done.stdout

    report = json.loads(done.stdout)
    assert report == json.loads((out / "report.json").read_text())
    assert report["failures"] == [] and report["digests_agree"] is True
    assert report["settled_s"] is not None and report["comparison"] is None
    assert 0 < report["faulty"]["participation"] <= 1
    assert min(report["faulty"]["merges"].values()) > 0

    tape = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
    events = Counter(entry["event"] for entry in tape)
    assert events["struck"] == report["faults"] and events["struck"] + events["skipped"] == FAULTS
    assert events["unexpected"] == 0
    for entry in tape:
        if entry["event"] == "struck" and entry["lasts_s"]:
            mended = [e for e in tape if e["event"] == "mended" and e["fault"] == entry["fault"]]
            assert len(mended) == 1 and mended[0]["mono"] >= entry["mono"], entry
    assert (out / "chaos.png").read_bytes()[:4] == b"\x89PNG"


def test_nothing_outlives_a_kill(swept_swarm: Swarm, tmp_path: Path) -> None:
    """kill -9: it cannot end anything itself any more, and a daemon's learner may be stopped."""
    process = begun(swept_swarm, tmp_path, "--no-kill")
    assert process.stderr is not None
    shown = []
    for line in process.stderr:
        shown.append(line)
        if "trains" in line:
            break
    assert shown and "trains" in shown[-1], "".join(shown)
    learner = next(p for p in swept_swarm.processes() if "p2pdiloco.learner" in p.cmdline())
    learner.suspend()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    deadline = Deadline(GONE_S)
    while (left := list(swept_swarm.processes())) and not deadline.over():
        time.sleep(POLL_S)
    assert left == []


def test_one_survives(swept_swarm: Swarm, tmp_path: Path) -> None:
    """Two of three are killed, so no majority is left until the dead do not count any more. Both come back.

    (A long name would make the temporary folder too long for unix sockets.)
    """
    out = tmp_path / "out"
    run = ["chaos", "--scenario", "survivor", "--nodes", "3", "--seconds", "3", "--json"]
    done = swept_swarm.command(*run, "--out", str(out), timeout_s=280)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["failures"] == [] and report["digests_agree"] is True
    assert report["versions_alone"] >= 4 and report["tokens_alone"] > 0
    assert report["next_version_s"] <= report["all_fragments_s"]
    assert set(report["back_s"]) == {"node-2", "node-3"} and report["equal_s"] > 0
    tape = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
    assert Counter(entry["event"] for entry in tape) == {"struck": 2, "mended": 2}

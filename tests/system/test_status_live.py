"""`p2pdiloco status`, `plan`, `doctor`, `credits`, `checkpoint` against a real bootstrap and a real node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from deadlines import within_s
from system_kit import PACE, Daemon, Swarm
from terminal_kit import Terminal

from p2pdiloco.config.settings import load_settings_table
from p2pdiloco.daemon.run_files.known_runs import read_link
from p2pdiloco.daemon.run_files.saved_state import load_result, result_on_disk

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
PROBE = Path(__file__).parents[2] / "scripts/probe_libp2p.py"


def _address(daemon: Daemon) -> str:
    return daemon.address() or ""


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """For commands that wait for as long as they may, while others are typed."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_status_of_a_living_run(visited_swarm: Swarm, beside: ThreadPoolExecutor) -> None:
    manifest = str(visited_swarm.manifest(seats=("one",)))
    bootstrap = visited_swarm.bootstrap("--run", manifest, "--lan")
    at = ("status", "--join", _address(bootstrap), "--timeout-s")
    asked_of_nobody = beside.submit(visited_swarm.command, *at, "6")
    _plan_of_the_run_that_the_peer_lists(visited_swarm, _address(bootstrap))

    # Told to stop, as by `timeout`: its folder and its network process are gone (the fixture looks).
    asking = visited_swarm.begin("status", "--join", _address(bootstrap), "--timeout-s", "60")
    (p2pd,) = visited_swarm.until(psutil.Process(asking.pid).children, "its network process")
    asking.send_signal(signal.SIGTERM)
    assert asking.wait(30) == 143
    # Whoever has no parent any more is cleared away by the system in its own time.
    assert not p2pd.is_running() or p2pd.status() == psutil.STATUS_ZOMBIE
    empty = asked_of_nobody.result()
    assert empty.returncode == 3 and "no member of run test answered within 6 s" in empty.stderr

    link = bootstrap.printed().rpartition("p2pdiloco node p2pdiloco:")[2].strip()
    link = f"p2pdiloco:{link}"
    node = visited_swarm.start("one", "node", link, *PACE, "--name", "one", "--genesis", "--keep-history")
    visited_swarm.training(node)
    doubt = "the schedule is about"  # of the run's owner, who alone can mend it
    assert doubt in bootstrap.said() and doubt not in node.said()
    for way in (link, _address(node)):  # any live peer is as good as a bootstrap
        asked = visited_swarm.command("status", "--join", way, "--json", "--timeout-s", "60")
        assert asked.returncode == 0, asked.stderr
        report = json.loads(asked.stdout)
        assert report["run_name"] == "test" and report["answered_by"] == node.peer_id
        assert [m["name"] for m in report["members"]] == ["one"] and len(report["fragments"]) == 4
        told = {f["index"]: f["number"] for f in report["fragments"]}
        # A version is told when it is taken, and stands in the event log when it is announced.
        visited_swarm.until(
            lambda told=told: all(number <= node.number(f) for f, number in told.items()), "its log"
        )
        assert {f["syncer"] for f in report["fragments"]} <= {node.peer_id, ""}
        data = report["data"]
        assert 1 <= data["begun"] <= data["shards"] and data["tokens"] == report["members"][0]["tokens_total"]

    asked_for_another = beside.submit(visited_swarm.command, *at, "8", "--run", "nope")

    # Guided, at a terminal: it looks at the run through the same link, and saves what was answered.
    guided = visited_swarm.folder / "guided"
    with Terminal(["-m", "p2pdiloco", "join", link, "--data-dir", str(guided)]) as terminal:
        for question in ("Name that", "to send", "to receive", "of the disk", "month", "Hours"):
            terminal.expect(question)
            terminal.type("")
        assert "run test (" in terminal.expect("What now?"), terminal.shown
        terminal.type("save")
        assert terminal.end() == 0 and load_settings_table(guided / "node.toml", "node")["invite"] == link

    folder = str(node.data_dir)
    here = visited_swarm.command("status", "--data-dir", folder, "--json", "--timeout-s", "60")
    assert here.returncode == 0 and json.loads(here.stdout)["answered_by"] == node.peer_id, here.stderr

    shown = visited_swarm.command("status", "--join", _address(bootstrap), "--timeout-s", "60")
    assert shown.returncode == 0 and "as seen by one (training)" in shown.stdout
    assert "shards begun; one trained on " in shown.stdout

    # The whole swarm, for as long as somebody looks.
    lines = visited_swarm.folder / "top.txt"
    watching = visited_swarm.begin("top", "--join", _address(bootstrap), "--every-s", "1", out=lines)
    visited_swarm.until(lambda: "run test  members 1  tokens/s" in lines.read_text(), "a line")

    # The doctor: this machine, and the way to the run. All is on this machine: what needs others is skipped.
    asked = visited_swarm.command("doctor", "--join", _address(node), "--data-dir", folder + "-new", "--json")
    found = {line["check"]: line for line in map(json.loads, asked.stdout.splitlines())}
    assert [line for line in found.values() if line["level"] == "bad"] == []
    assert asked.returncode in (0, 1) and "Traceback" not in asked.stderr
    for check in ("peers", "clock", "run", "versions", "port", "memory", "disk"):
        assert found[check]["level"] == "good", found[check]
    assert found["run"]["words"].startswith("test (") and found["link"]["level"] != "bad"

    unknown = asked_for_another.result()
    assert unknown.returncode == 2 and 'the peers know no run "nope"' in unknown.stderr
    assert "they know: test (" in unknown.stderr and "Traceback" not in unknown.stderr

    # The result, from the live run, and from what the node leaves behind.
    visited_swarm.until(lambda: node.number(0) > 0, "a merge")
    _credits_of_a_living_run(visited_swarm, bootstrap, node)
    saved = visited_swarm.folder / "theta.safetensors"
    asked = visited_swarm.command("checkpoint", "--join", link, "--out", str(saved))
    assert asked.returncode == 0 and "saved run test (" in asked.stderr, asked.stderr
    live = load_result(saved)
    numbers = [label.number for label in live.labels]
    heads = node.heads()
    held = {f: heads.get((f, n), "") for f, n in enumerate(numbers) if n}
    assert held, "something was merged"
    assert all(live.labels[f].digest.startswith(digest) and digest for f, digest in held.items()), held
    node.terminate()
    visited_swarm.until(lambda: "one does not answer us" in lines.read_text(), "the end of a node, seen")
    watching.send_signal(signal.SIGTERM)
    assert watching.wait(30) == 143
    gone = visited_swarm.command("status", "--data-dir", folder)
    assert gone.returncode == 4 and "no node and no bootstrap runs here" in gone.stderr
    after = result_on_disk(node.data_dir, "test")
    assert (
        all(b.number >= a for a, b in zip(numbers, after.labels, strict=True)) and after.merges > live.merges
    )

    # The bootstrap is found in the local network, by a node to whom nobody says whom to join.
    pytest.importorskip("zeroconf")
    near = visited_swarm.start("near", "node", "--lan", "--run", read_link(link).run, *PACE)
    visited_swarm.until(lambda: "run test (" in near.said(), "the run that it found")
    assert "found in this network: 1 peer of 1 run" in near.said()


def _plan_of_the_run_that_the_peer_lists(swarm: Swarm, address: str) -> None:
    """The link to the peer is measured, and not for two at once."""
    asked = swarm.command("plan", "--join", address, "--json", "--step-s", "1")
    assert asked.returncode == 0, asked.stderr
    (row,) = json.loads(asked.stdout)
    measured = row["measured"]
    assert 0 < measured["round_trip_s"] < 1
    assert measured["upload_bits_per_s"] > 1e6 and measured["download_bits_per_s"] > 1e6
    assert row["link"]["upload_bits_per_s"] == measured["upload_bits_per_s"]
    assert row["demand"]["participation"] == 1

    again = swarm.command("plan", "--join", address)
    assert again.returncode == 2 and "measures a link for somebody else just now" in again.stderr
    assert "hint: try again later" in again.stderr and "Traceback" not in again.stderr

    gone = swarm.command("plan", "--join", "/ip4/127.0.0.1/tcp/1" + address[address.index("/p2p/") :])
    assert gone.returncode == 2 and "None of the initial peers can be reached" in gone.stderr


@pytest.mark.skipif(
    not os.environ.get("P2PDILOCO_PROBE_PYTHON"),
    reason="no Python with py-libp2p: P2PDILOCO_PROBE_PYTHON names one (docs/topics/doctor.md)",
)
def test_another_implementation_of_libp2p_gets_through(visited_swarm: Swarm) -> None:
    bootstrap = visited_swarm.bootstrap(seats=("one",))
    python = os.environ["P2PDILOCO_PROBE_PYTHON"]
    asked = subprocess.run(
        [python, PROBE, _address(bootstrap)], capture_output=True, text=True, timeout=within_s(60)
    )
    found = json.loads(asked.stdout)
    assert found["ok"] and any(protocol.startswith("p2pdiloco/") for protocol in found["protocols"]), found


def _credits_of_a_living_run(swarm: Swarm, bootstrap: Daemon, node: Daemon) -> None:
    """Whoever asks counts them itself; a certificate of them is checked without asking anybody."""
    asked = swarm.command("credits", "--join", _address(bootstrap), "--verify", "--json", "--timeout-s", "60")
    assert asked.returncode == 0, asked.stderr
    report = json.loads(asked.stdout)
    (row,) = report["rows"]
    assert row["peer"] == node.peer_id and row["name"] == "one" and report["keepers"] == [node.peer_id]
    assert row["fragment_tokens"] == report["fragment_tokens"] > 0 and row["first_s"]
    assert report["signatures_checked"] >= 2 * row["contributions"] > 0
    assert not report["doubts"] and not report["notes"] and not report["missing_before"]
    told = swarm.command("credits", "--data-dir", str(node.data_dir), "--csv")
    assert told.returncode == 0 and node.peer_id in told.stdout, told.stderr
    paper = str(swarm.folder / "one.json")
    where = ("--data-dir", str(node.data_dir))
    made = swarm.command("credits", *where, "--peer", "one", "--certificate", paper)
    assert made.returncode == 0, made.stderr
    checked = swarm.command("credits", "--check", paper)
    assert checked.returncode == 0 and "signed on" in checked.stdout, checked.stdout

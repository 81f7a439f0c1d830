"""Real nodes learn to read digits, another task than language: equal bits, and the web page of a node, of the
bootstrap, and a real Prometheus that scrapes both."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from deadlines import within_s
from system_kit import Daemon, Swarm
from test_swarm import assert_digests_agree

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
EACH = ("--threads", "1", "--min-step-s", "0.02", "--evaluate", "each", "--eval-every-s", "1")


def page_of(daemon: Daemon) -> str:
    """The address of its page, without the token."""
    return daemon.page().partition("?")[0]


def ask(daemon: Daemon, path: str, token: bool = True) -> Any:
    request = urllib.request.Request(page_of(daemon) + path)
    if token:
        request.add_header("Authorization", f"Bearer {(daemon.data_dir / 'web.token').read_text().strip()}")
    with urllib.request.urlopen(request, timeout=within_s(10)) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith("{") else text


def accuracy(daemon: Daemon) -> float:
    """Of the last evaluation of the global parameters; 0 before there is one."""
    found = daemon.events("evaluation")
    return found[-1].metrics["accuracy"] if found else 0.0


def test_two_nodes_learn_digits_and_are_on_pages_and_in_prometheus(visited_swarm: Swarm) -> None:
    swarm = visited_swarm
    file = str(swarm.manifest("digits", "--preset", "digits"))
    bootstrap = swarm.start("bootstrap", "bootstrap", "--run", file, "--web", "0", "--web-public")
    swarm.until(lambda: bootstrap.address() and "p2pdiloco node" in bootstrap.printed(), "a bootstrap")
    join = ["--join", bootstrap.address() or "", *EACH, "--yes"]
    one = swarm.start("one", "node", *join, "--name", "one", "--genesis", "--web", "0")
    swarm.until(lambda: page_of(one), "its page, before the run")
    two = swarm.start("two", "node", *join, "--name", "two")
    swarm.training(one, two)

    def merged_both() -> bool:
        public = ask(one, "view")["public"]
        shown = [(m["name"], m["is_me"], m["in_last_merge"]) for m in public["members"]]
        return bool(public["pulse"] == "alive" and shown == [("one", True, True), ("two", False, True)])

    # A name comes with a record of the DHT, perhaps after the first merge.
    swarm.until(merged_both, "a merge of both on the page")
    assert ask(one, "view")["own"]["state"] == "training" and ask(one, "healthz", token=False) == "training\n"
    swarm.until(lambda: ask(one, "view")["own"]["work"]["merged"] > 0, "a contribution of its own")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(one, "view", token=False)

    # The bootstrap is no member: it asks those that are, and shows what anybody may see.
    swarm.until(
        lambda: ask(bootstrap, "view", token=False)["public"]["pulse"] == "alive", "the run at the bootstrap"
    )
    shown = ask(bootstrap, "view", token=False)
    assert shown["own"] is None and len(shown["public"]["members"]) == 2
    assert shown["public"]["join"]["link"].startswith("p2pdiloco:")
    assert ask(bootstrap, "healthz", token=False) == "serving\n"

    if shutil.which("prometheus") is not None:
        scrape(swarm, one, bootstrap)

    # Chance is 0.1; these are the global parameters, of which each node computes its own copy.
    swarm.until(lambda: min(accuracy(one), accuracy(two)) > 0.4, "both to read digits", 120.0)
    swarm.until(lambda: one.full_merges(2) + two.full_merges(2) > 10, "both to take part")
    # What one has merged last the other may still be applying.
    swarm.until(lambda: len(set(one.heads()) & set(two.heads())) > 10, "both to hold the same versions")
    assert assert_digests_agree(one, two) > 10

    # Who dies is seen on the page, and why.
    two.kill()
    swarm.until(lambda: state_of(one, "two") == ("silent", "silent"), "the death of two on the page")
    assert any(mark["kind"] == "silent" for mark in ask(one, "view")["public"]["marks"])
    # The month's transfer is used up: it leaves, and its page stays, and says so.
    assert swarm.command("limits", "--data-dir", str(one.data_dir), "--max-transfer", "1kB").returncode == 0
    swarm.until(lambda: ask(one, "view")["own"]["state"] == "away", "the page of a node that is away")
    assert "are used up" in ask(one, "view")["own"]["rest"] and ask(one, "healthz", token=False) == "away\n"
    one.terminate()
    assert list((one.data_dir / "runs").glob("*/timeline.json"))


def state_of(daemon: Daemon, name: str) -> tuple[str, str]:
    members = ask(daemon, "view")["public"]["members"]
    return next(((m["state"], m["why"]) for m in members if m["name"] == name), ("", ""))


def scrape(swarm: Swarm, *daemons: Daemon) -> None:
    """Let a real Prometheus read their figures, with their tokens."""
    folder = swarm.folder / "prometheus"
    folder.mkdir()
    jobs = [
        {
            "job_name": daemon.name,
            "authorization": {"credentials_file": str(daemon.data_dir / "web.token")},
            "static_configs": [{"targets": [page_of(daemon).removeprefix("http://").rstrip("/")]}],
        }
        for daemon in daemons
    ]
    rules = Path(__file__).parents[3] / "bootstrap" / "alerts.yml"
    config = {"global": {"scrape_interval": "1s"}, "rule_files": [str(rules)], "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={at}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["prometheus", *words], cwd=folder, stdout=log, stderr=log)
    try:
        for daemon in daemons:
            query = f'p2pdiloco_run_versions_total{{job="{daemon.name}"}}'
            swarm.until(lambda query=query: value(at, query) > 0, f"{query} in Prometheus")
            assert value(at, f'up{{job="{daemon.name}"}}') == 1
        assert value(at, 'p2pdiloco_node_state{job="one",state="training"}') == 1
        assert value(at, 'p2pdiloco_node_state{job="bootstrap",state="serving"}') == 1
    finally:
        process.kill()  # whatever it does
        process.wait()


def value(at: str, query: str) -> float:
    """Of a query's only answer; 0: there is none (yet)."""
    words = urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(f"http://{at}/api/v1/query?{words}", timeout=within_s(5)) as answer:
            results = json.load(answer)["data"]["result"]
    except (OSError, ValueError):
        return 0.0  # it starts
    return float(results[0]["value"][1]) if results else 0.0

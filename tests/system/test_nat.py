"""Volunteers behind NATs: real nodes in network namespaces, with home routers between them and the rest."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from deadlines import within_s
from nat_kit import Nats, why_not
from system_kit import PACE, Swarm

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
ANY = "/ip4/0.0.0.0/tcp/4001"
QUICK_S = 80.0
SAID_S = 30.0
PEER = str(Path(__file__).parents[1] / "adapters" / "net" / "punch_peer.py")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path) as made:
        yield made


@pytest.fixture
def nats() -> Iterator[Nats]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Nats(public=2, homes=2) as made:
        yield made


def members(swarm: Swarm, nats: Nats, join: str) -> dict[str, dict[str, object]]:
    """What `status` says of everybody, by name."""
    done = swarm.command("status", "--join", join, "--json", within=nats.at(0))
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["members"]}


def test_who_is_behind_a_nat_contributes_and_leaves_offices_to_others(swarm: Swarm, nats: Nats) -> None:
    # One lets itself be reached through relays, the other does not; a hole joins the two.
    homes = {"home1": "relayed", "home2": "outbound only"}
    manifest = swarm.manifest(seats=("public", *homes))
    bootstrap = swarm.start("bootstrap", "bootstrap", "--run", str(manifest), listen=ANY, within=nats.at(0))
    swarm.until(lambda: bootstrap.address() is not None, "the bootstrap's address")
    join = bootstrap.address() or ""
    common = ["--join", join, *PACE]
    public = swarm.start(
        "public", "node", *common, "--name", "public", "--genesis", listen=ANY, within=nats.at(1)
    )
    hidden = [
        swarm.start(name, "node", *common, "--name", name, *more, listen=ANY, within=nats.at(2 + i))
        for i, (name, more) in enumerate((("home1", ()), ("home2", ("--no-relay",))))
    ]
    nodes = [public, *hidden]
    swarm.until(lambda: public.full_merges(3) > 0, "a version with everybody's work", QUICK_S)
    for node, word in zip(hidden, homes.values(), strict=True):
        swarm.until(
            lambda node=node, word=word: [e.reason for e in node.events("reach")][-1:] == [word], word, 30
        )
        swarm.until(lambda node=node: "a direct line to" in node.said(), "a hole", 30)
    everybody = {"public": "direct", **homes}
    shown: dict[str, dict[str, object]] = {}

    def all_shown() -> bool:
        # A record on the DHT says who is there: what is news in it comes seconds after the event.
        shown.update(members(swarm, nats, join))
        offices = {name for name, row in shown.items() if row["offices"]}
        return {name: row["reach"] for name, row in shown.items()} == everybody and offices == {"public"}

    # While nobody hears from public, as on a busy machine, the two may elect each other.
    swarm.until(all_shown, "status of everybody, and offices of public alone", 60)
    made = [len(node.events("publish")) for node in nodes]
    assert made[0] > sum(made[1:]), made
    for node in reversed(nodes):
        node.terminate()


def test_three_who_are_all_behind_nats_train_by_one_bootstrap_and_go_on_without_one(swarm: Swarm) -> None:
    if reason := why_not():
        pytest.skip(reason)
    names = ("home1", "home2", "home3")
    manifest = swarm.manifest(seats=names)
    with Nats(public=1, homes=3) as nats:
        bootstrap = swarm.start(
            "bootstrap", "bootstrap", "--run", str(manifest), listen=ANY, within=nats.at(0)
        )
        swarm.until(lambda: bootstrap.address() is not None, "the bootstrap's address")
        common = ["--join", bootstrap.address() or "", *PACE, "--name"]
        nodes = [
            swarm.start(
                name, "node", *common, name, *("--genesis",) * (i == 1), listen=ANY, within=nats.at(i)
            )
            for i, name in enumerate(names, 1)
        ]
        direct = "a direct line to"
        swarm.until(lambda: all(direct in node.said() for node in nodes), "holes", QUICK_S)
        for node in nodes:
            assert node.events("reach")[-1].reason != "direct"
        before = [node.full_merges(3) for node in nodes]
        swarm.until(lambda: sum(n.full_merges(3) for n in nodes) > sum(before), "a merge of all", QUICK_S)
        swarm.kill(nodes.pop(0))
        for node in nodes:
            had = node.full_merges(2)
            swarm.until(lambda node=node, had=had: node.full_merges(2) > had, "merges of the others", QUICK_S)
        for node in reversed(nodes):
            node.terminate()


def test_a_router_forwards_the_port_while_a_node_runs_and_links_lead_there(swarm: Swarm) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with Nats(public=1, homes=1, forward=True) as nats:
        outside = "/ip4/7.0.1.1/tcp/4001/p2p/"
        host = swarm.start("host", "bootstrap", listen=ANY, within=nats.at(1))
        swarm.until(lambda: host.address() is not None, "the host's address")
        join = host.address() or ""
        assert join.startswith(outside), "the link would lead nobody there"
        looked = swarm.command("doctor", "--join", join, within=nats.at(0))
        assert "is reached, and is who it should be" in looked.stdout, looked
        host.terminate()
        again = swarm.start("host", "bootstrap", "--no-port-map", listen=ANY, within=nats.at(1))
        swarm.until(lambda: again.address() is not None, "its address again")
        assert not (again.address() or "").startswith(outside)
        looked = swarm.command("doctor", "--join", join, within=nats.at(0))
        assert "1 bad" in looked.stdout, "the forwarding ended with the node"


@pytest.mark.parametrize(
    ("kinds", "direct"),
    [
        pytest.param(("", ""), True, id="port-restricted"),
        pytest.param(("symmetric", "full"), True, id="symmetric-full-cone"),
        pytest.param(("symmetric", ""), False, id="symmetric-port-restricted"),
    ],
)
def test_a_hole_is_punched_by_the_word_of_one_bootstrap(
    tmp_path: Path, kinds: tuple[str, str], direct: bool
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    ips, pushed_s = punched(tmp_path / "homes", kinds)
    assert ips == (["7.0.1.2"] if direct else []), "where the other home's router is"
    assert (pushed_s is not None) is direct, "4 MiB, of which a relay carries 128 KiB"


def punched(folder: Path, kinds: Sequence[str]) -> tuple[list[str], float | None]:
    """Where one home finds the other, and how long a push there took."""
    running: list[subprocess.Popen[str]] = []

    def start(nats: Nats, host: int, what: str, word: str) -> str:
        """What it says first."""
        its = folder / str(host)
        its.mkdir(parents=True)
        command = [*nats.at(host), sys.executable, PEER, what, str(its), word]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        return str(said(running[-1], 1)[0])

    def said(process: subprocess.Popen[str], count: int) -> list[Any]:
        """Its next line, of so many words."""
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], within_s(SAID_S))[0], "it says nothing"
        found: list[Any] = json.loads(process.stdout.readline() or "[]")
        assert len(found) == count, found
        return found

    with Nats(public=1, homes=2, kinds=kinds) as nats:
        try:
            bootstrap = start(nats, 0, "public", nats.addresses[0][0])
            start(nats, 1, "home", bootstrap)
            other = start(nats, 2, "home", bootstrap)
            print(other, file=running[1].stdin, flush=True)
            ips, _, pushed_s = said(running[1], 3)
            return ips, pushed_s
        finally:
            for process in running:
                if process.stdin is not None:
                    process.stdin.close()
            for process in running:
                try:
                    process.wait(within_s(10.0))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                if process.stdout is not None:
                    process.stdout.close()

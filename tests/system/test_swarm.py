"""Real processes: join, agree, lose whoever may be lost, come back; also in rotating groups of two."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from system_kit import LEARNER, START_S, Daemon, Swarm, asking

from p2pdiloco.config.presets import MICRO
from p2pdiloco.core.api.config import Timing
from p2pdiloco.learner.samples import SavedPlace

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

FRAGMENTS = [0, 1, 2, 3]  # of the micro preset
NICE = 10
LOG_VERSIONS = 8
"""Half of what is usual: updates are forgotten the sooner."""
TERM_VERSIONS = MICRO.group.term_versions
SAVE_OFTEN = ("--checkpoint-every-s", "2")


def assert_digests_agree(*daemons: Daemon, lost: Iterable[tuple[int, int, str]] = ()) -> int:
    """Equal version numbers must have equal digests. How many versions at least two of them held.

    `lost` (fragment, number, digest): published by a syncer in the moment in which it was killed, so that
    nobody else may have them."""
    seen: dict[tuple[int, int], dict[str, str]] = {}
    for daemon in daemons:
        for version, digest in daemon.heads().items():
            if (*version, digest) not in lost:
                seen.setdefault(version, {})[daemon.name] = digest
    assert [(v, held) for v, held in seen.items() if len(set(held.values())) > 1] == []
    return sum(len(held) > 1 for held in seen.values())


def assert_agree_at_last(swarm: Swarm, *daemons: Daemon) -> None:
    """Wait until all hold one version of every fragment that was made from now on, with one digest."""
    numbers = {f: max(d.number(f) for d in daemons) for f in FRAGMENTS}

    def agreed(fragment: int) -> bool:
        heads = [{n: g for (f, n), g in d.heads().items() if f == fragment} for d in daemons]
        common = set.intersection(*(set(h) for h in heads))
        newest = max(common, default=-1)
        return newest > numbers[fragment] and len({h[newest] for h in heads}) == 1

    swarm.until(lambda: all(agreed(f) for f in FRAGMENTS), "equal digests of equal versions")


def steps_back(daemon: Daemon) -> bool:
    """Whether p2pd and the tensors thread let others go first, and the event loop does not."""
    if sys.platform != "linux":
        return True
    p2pd = daemon.child("p2pd")
    carrying, own = ({niceness(t.id) for t in p.threads()} for p in (p2pd, psutil.Process(daemon.pid)) if p)
    before = niceness(os.getpid())
    least = max(before, NICE)
    return carrying == {least} and least in own and niceness(daemon.pid) == before


def niceness(thread: int) -> int:
    """Niceness of a thread."""
    return os.getpriority(os.PRIO_PROCESS, thread)


def place(daemon: Daemon) -> SavedPlace:
    """Where a node's learner is in the data."""
    (path,) = daemon.data_dir.glob("runs/*/data.place")
    return msgspec.msgpack.decode(path.read_bytes(), type=SavedPlace)


def test_nodes_join_and_agree_and_outlive_the_bootstrap(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        file = swarm.manifest(seats=("one", "two", "late"))
        text = file.read_text()
        assert "\nlog_versions = 16\n" in text
        file.write_text(text.replace("\nlog_versions = 16\n", f"\nlog_versions = {LOG_VERSIONS}\n"))
        bootstrap = swarm.bootstrap("--run", str(file))
        second = swarm.second_bootstrap(bootstrap)
        one = swarm.node("one", bootstrap, "--genesis")
        two = swarm.node("two", second, "--daemon-nice", str(NICE))
        swarm.training(one, two)
        swarm.advance(one, FRAGMENTS, 5)
        swarm.until(lambda: one.full_merges(2) + two.full_merges(2) >= 5, "both to take part")
        swarm.until(lambda: steps_back(two), "bulk work to step back")

        swarm.kill(bootstrap)
        swarm.advance(two, FRAGMENTS, 5)
        second.terminate()
        second = swarm.second_bootstrap(bootstrap)  # the first is gone, what it gave is here
        # Whoever comes before the log's end makes the outer steps itself, from what all begin with.
        swarm.until(lambda: min(map(two.number, FRAGMENTS)) > LOG_VERSIONS, "updates to be forgotten", 90.0)
        # A node's address is as good as a bootstrap's; it has the run, its members and its state.
        late = swarm.node("late", one)
        swarm.training(late)
        swarm.until(lambda: sum(d.full_merges(3) for d in (one, two, late)) >= 5, "all three to take part")
        swarm.advance(late, FRAGMENTS, 5)

        # All read the same data, and what one has begun is known to the others.
        begun: set[tuple[int, int]] = set()

        def known() -> bool:
            begun.add(place(late).reading)
            ours = place(one)
            bits = int.from_bytes(ours.taken, "big"), 8 * len(ours.taken) - 1
            return any(epoch == ours.epoch and bits[0] >> bits[1] - shard & 1 for epoch, shard in begun)

        swarm.until(known, "news of what others read")
        assert place(one).data == place(late).data
        # Not at once: while the others do not know of a newcomer, two may begin the same shard.
        swarm.until(lambda: place(one).reading != place(late).reading, "other data than the others'")

        assert "catchup" in {event.kind for event in late.events()}
        assert assert_digests_agree(one, two, late) > 20
        parts = [d.participation() for d in (one, two, late)]
        assert sum(merged for merged, _ in parts) >= 0.5 * sum(live for _, live in parts)
        status = swarm.command("status", "--join", two.address() or "", "--json")
        assert status.returncode == 0 and all(d.peer_id in status.stdout for d in (one, two, late))
        final = {row["final"] for row in json.loads(status.stdout)["fragments"]}
        assert min(final) >= 8, "two of three seats were here from the beginning"
        its_owner_stops_it_for_a_while(swarm, late, one)


def its_owner_stops_it_for_a_while(swarm: Swarm, node: Daemon, other: Daemon) -> None:
    """What the owner of a machine may ask of its node: pause, resume, a budget that is used up, finish."""

    def tell(*words: str) -> str:
        done = swarm.command(*words, "--data-dir", str(node.data_dir))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state() -> dict[str, Any]:
        return json.loads(tell("limits", "--json"))

    assert "what was made is handed over" in tell("pause")
    found = swarm.until(lambda: (s := state())["rest"]["handed_over"] and s, "its work in a version")
    assert found["state"] == "idle" and found["rest"]["reason"] == "paused"
    assert found["transfer"]["sent_bytes"] > 0
    status = json.loads(tell("status", "--json"))
    assert status["state"] == "idle" and status["rest"]["words"].startswith("idle: paused by its owner since")
    assert status["transfer"]["sent_bytes"] > 0 and any("paused" in line for line in status["recent"])
    asked = swarm.command("status", "--join", node.address() or "", "--json")  # a stranger
    others = json.loads(asked.stdout)
    assert others["answered_by"] == node.peer_id and others["state"] == "idle"
    assert others["rest"] is others["transfer"] is None and "paused" not in str(others["recent"])
    trained = status["data"]["tokens"]
    swarm.advance(other, FRAGMENTS, 3)  # who rests keeps nobody
    swarm.advance(node, FRAGMENTS, 1)  # and follows
    assert json.loads(tell("status", "--json"))["data"]["tokens"] == trained
    assert tell("resume").startswith("resumed: the learner goes on")
    step = node.inner_step()
    swarm.until(lambda: node.inner_step() > step + 2, "inner steps after the pause")

    assert "max-transfer is 1kB" in tell("limits", "--max-transfer", "1kB/month")
    swarm.until(lambda: state()["state"] == "away", "it to leave for the budget's sake")
    assert "used up" in state()["rest"]["words"]
    assert node.child("p2pd") is None and node.events("leave")[-1].reason == "nothing was pending"
    asked = swarm.command("status", "--data-dir", str(node.data_dir))
    assert asked.returncode == 3 and "the node here has left its run for now; idle: " in asked.stderr
    swarm.advance(other, FRAGMENTS, 2)
    tell("limits", "--max-transfer", "none")
    step = len(node.events("progress"))
    swarm.until(lambda: len(node.events("progress")) > step, "it to come back and train", START_S)

    assert "leaving, within" in tell("finish")
    node.wait_exit(0)
    assert node.events("leave")[-1].reason == "nothing was pending"
    gone = swarm.command("pause", "--data-dir", str(node.data_dir))
    assert gone.returncode == 4 and "no node runs here" in gone.stderr


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="no limits of other processes here")
def test_a_full_disk_costs_checkpoints_and_a_vote_and_stops_nobody(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm, ExitStack() as stack:
        bootstrap = swarm.bootstrap()
        one = swarm.node("one", bootstrap, "--genesis", "--checkpoint-every-s", "1")
        two = swarm.node("two", bootstrap)
        swarm.training(one, two)

        def together(what: str) -> None:
            before = one.full_merges(2) + two.full_merges(2)
            swarm.until(lambda: one.full_merges(2) + two.full_merges(2) > before + 2, what)

        processes = [psutil.Process(one.pid), one.child(LEARNER)]
        limits = {p: p.rlimit(psutil.RLIMIT_FSIZE) for p in processes if p is not None}
        assert len(limits) == 2
        for process, (_, hard) in limits.items():
            # Of the daemon less than a fragment's state. The learner cannot even write that it cannot write.
            process.rlimit(psutil.RLIMIT_FSIZE, (40_000 if process.pid == one.pid else 0, hard))
        swarm.until(lambda: "checkpoint-" in one.said() and "cannot save" in one.said(), "it to say so")
        swarm.until(lambda: "learner state not saved" in one.said(), "the learner to say so")
        swarm.advance(two, FRAGMENTS, 3)
        together("both to take part, without checkpoints")
        assert one.ended() is None and "the learner ended" not in one.said()
        for process, limit in limits.items():
            process.rlimit(psutil.RLIMIT_FSIZE, limit)

        together("both to take part, with room for all")
        ask = stack.enter_context(asking(one))

        def votes() -> bool:
            """Whether the other node counts the one in majorities."""
            (row,) = [row for row in ask()["members"] if row["peer"] == two.peer_id]
            return bool(row["votes"])

        assert votes()
        process = psutil.Process(two.pid)
        room = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (0, room[1]))
        merges = one.full_merges(2)
        swarm.until(lambda: not votes(), "word of the full disk")
        # More than a term of every fragment: offices are filled by the one vote that there is.
        swarm.advance(one, FRAGMENTS, 2 * TERM_VERSIONS)
        assert one.full_merges(2) > merges, "who cannot save takes part"
        process.rlimit(psutil.RLIMIT_FSIZE, room)
        swarm.until(votes, "its vote")
        assert_agree_at_last(swarm, one, two)
        one.terminate()
        assert list((one.data_dir / "runs").glob("*/learner.safetensors"))  # there was room again at the end


def a_killed_syncer_is_replaced_and_comes_back(swarm: Swarm, *nodes: Daemon) -> None:
    """Of three nodes that save often."""
    swarm.advance(nodes[0], FRAGMENTS, 5)
    saved = [d for d in nodes if swarm.until(lambda d=d: d.events("checkpoint"), "a checkpoint")]
    syncer = swarm.until(lambda: next((d for d in saved if d.is_syncer_of()), None), "a syncer")
    peer_id, fragments = syncer.peer_id, syncer.is_syncer_of()
    survivors = [d for d in nodes if d is not syncer]

    swarm.kill(syncer)  # its learner and its p2pd end by themselves
    lines = {d.name: len(d.events("progress")) for d in survivors}
    held = syncer.number(fragments[0])
    for survivor in survivors:
        swarm.advance(survivor, FRAGMENTS, 3)
        # Nothing that a peer does stops inner steps: no pause comes near a time-out of the protocol.
        gaps = [e.longest_gap_s for e in survivor.events("progress")[lines[survivor.name] :]]
        assert max(gaps, default=0.0) < Timing().suspect_s

    again = swarm.node(syncer.name, survivors[0], *SAVE_OFTEN)
    swarm.training(again)
    assert again.peer_id == peer_id
    swarm.until(lambda: again.number(fragments[0]) > held, "the restarted node to catch up")
    before = sum(d.full_merges(3) for d in survivors)
    swarm.until(lambda: sum(d.full_merges(3) for d in (*survivors, again)) > before + 4, "its contributions")
    assert_agree_at_last(swarm, *survivors, again)


def newest_checkpoint(daemon: Daemon, fragment: int) -> Path:
    folder = next((daemon.data_dir / "runs").iterdir()) / "fragments" / f"{fragment:03d}"
    return max(folder.glob("checkpoint-*.safetensors"), key=lambda p: int(p.stem.split("-")[1]))


def test_the_dead_are_replaced_in_place_and_who_comes_back_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    """A dead rank, a dead learner, a dead p2pd; then an orderly end, and checkpoints that are damaged."""
    with Swarm(tmp_path) as swarm:
        bootstrap = swarm.bootstrap()
        one = swarm.node("one", bootstrap, "--genesis")
        several = ("--nproc", "2", "--precision", "fp32")
        two = swarm.node("two", bootstrap, *several)
        swarm.training(one, two)

        def runs(daemon: Daemon) -> list[str]:
            return [e.device for e in daemon.events("learner") if e.reason == "running"]

        def together(what: str) -> None:
            before = one.full_merges(2) + two.full_merges(2)
            swarm.until(lambda: one.full_merges(2) + two.full_merges(2) > before + 3, what)

        # Two processes are one learner, to its peers as well.
        learner = swarm.until(lambda: two.child("p2pdiloco.learner"), "its learner")
        (rank,) = learner.children()
        together("contributions of both")

        def members() -> dict[str, Any]:
            status = swarm.command("status", "--join", one.address() or "", "--json")
            return {m["name"]: m for m in json.loads(status.stdout)["members"]}

        # Names come by the presence records, which a busy machine reads later than it merges.
        found = swarm.until(lambda: (m := members()).keys() == {"one", "two"} and m, "both by name")
        assert all(member["learning"] for member in found.values())
        life = psutil.Process(two.pid).create_time()
        rank.kill()
        swarm.until(lambda: len(runs(two)) == 2, "the learner to run again")
        assert "rank 1 of this learner ended (killed by SIGKILL)" in str(two.events("learner"))
        assert runs(two) == ["2 x cpu", "2 x cpu"] and not learner.is_running()
        assert psutil.Process(two.pid).create_time() == life and not one.events("leave")
        together("contributions of both, of two processes again")

        # One's learner and the other's network, at one time.
        network = swarm.until(lambda: two.child("p2pd"), "its p2pd")
        learner = swarm.until(lambda: one.child("p2pdiloco.learner"), "one's learner")
        peer_id, step = two.peer_id, two.inner_step()
        assert_digests_agree(one, two)
        learner.kill()
        network.kill()
        swarm.until(lambda: len(runs(one)) == 2, "one's learner to run again")
        fresh = swarm.until(
            lambda: (p := two.child("p2pd")) is not None and p.pid != network.pid and p, "a new p2pd"
        )
        assert fresh.is_running()
        together("contributions of both, over a new p2pd")
        swarm.until(lambda: two.inner_step() > step, "more inner steps")
        status = swarm.command("status", "--join", one.address() or "", "--json")
        assert peer_id in status.stdout
        # While neither heard the other, each may have made a version of its own: a fork, which heals.
        assert_agree_at_last(swarm, one, two)

        swarm.until(lambda: two.inner_step() > 100, "some training")
        two.terminate()
        swarm.until(lambda: [e for e in one.events("leave") if e.peer == peer_id], "the good-bye to be heard")
        assert two.events("shutdown") and two.inner_step() > 100
        assert not [e for e in two.events("leave") if "not merged" in e.reason]
        swarm.advance(one, FRAGMENTS, 3)

        flipped, cut = newest_checkpoint(two, 1), newest_checkpoint(two, 2)
        content = bytearray(flipped.read_bytes())
        content[len(content) // 2] ^= 0x10
        flipped.write_bytes(content)
        cut.write_bytes(cut.read_bytes()[:-100])
        restored = two.inner_step()
        again = swarm.node("two", bootstrap, *several)
        swarm.training(again)
        assert again.inner_step() >= restored  # the learner went on where it was
        assert again.said().count("set aside") == 2 and flipped.name in again.said()
        assert flipped.with_name(flipped.name + ".corrupt").exists()
        swarm.until(lambda: min(again.number(f) for f in FRAGMENTS) > one.number(0) - 50, "it to catch up")
        two = again
        together("contributions of both, from what it saved")
        assert_digests_agree(one, two)
        alone_it_finds_the_bootstrap(swarm, bootstrap, one, two)


def alone_it_finds_the_bootstrap(swarm: Swarm, bootstrap: Daemon, one: Daemon, two: Daemon) -> None:
    """Who starts again with the same address, or with none, dials what it joined through before, until it is
    back."""
    address = bootstrap.address() or ""
    for daemon in (bootstrap, one):
        swarm.kill(daemon)
    two.terminate()
    for given in (bootstrap, None):
        if given is None:
            swarm.kill(two)
        two = swarm.node("two", given)
        swarm.until(
            lambda node=two: "none of the initial peers can be reached yet" in node.said(),
            "it to find nobody, and to go on",
        )
    again = swarm.start(
        "bootstrap", "bootstrap", "--run", str(swarm.manifest()), listen=address.partition("/p2p/")[0]
    )
    swarm.until(lambda: again.address() == address, "the bootstrap to be back")
    found = swarm.command("status", "--join", address, "--json", "--timeout-s", "60")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["answered_by"] == two.peer_id


def test_a_node_alone_starts_only_when_told_and_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        bootstrap = swarm.bootstrap(seats=("alone",))
        alone = swarm.node("alone", bootstrap, "--genesis")
        swarm.training(alone)
        swarm.advance(alone, FRAGMENTS, 10)
        alone.terminate()
        assert not [e for e in alone.events("leave") if "not merged" in e.reason]
        held = [alone.number(f) for f in FRAGMENTS]
        again = swarm.node("alone", bootstrap, "--genesis")
        swarm.training(again)
        swarm.advance(again, FRAGMENTS, 2)
        first = [min(n for f, n in again.heads() if f == fragment) for fragment in FRAGMENTS]
        assert first == [number + 1 for number in held]

        learner = again.child("p2pdiloco.learner")
        assert learner is not None
        learner.suspend()  # so that saving takes its time
        try:
            again.signal(signal.SIGTERM)
            swarm.until(lambda: "leaving" in again.said(), "it to leave")
            again.signal(signal.SIGTERM)
            again.wait_exit(130)  # the person means it
        finally:
            learner.resume()

        # Last, since who starts a run waits 20 s for members that are listed and gone, as this one is then.
        waiting = swarm.node("waiting", bootstrap)
        swarm.until(lambda: "waiting: no member of run test" in waiting.said(), "it to say that it waits")
        assert "--genesis" in waiting.said()
        waiting.terminate()
        assert "running" not in [e.reason for e in waiting.events("learner")]


# Groups: five nodes, two in a group, and the loss of a root.


GROUP = 2
NODES = ("one", "two", "three", "four", "five")


def grouped_manifest(swarm: Swarm) -> Path:
    path = swarm.manifest("test", "--expected-members", str(len(NODES)), seats=NODES)
    text = path.read_text()
    assert "\nsize = 16\n" in text
    path.write_text(text.replace("\nsize = 16\n", f"\nsize = {GROUP}\n"))
    return path


def leaf_groups(*daemons: Daemon) -> set[str]:
    """Leaf groups whose syncers made partial merges."""
    return {e.group for d in daemons for e in d.events("partial") if e.contributors}


def roots(*daemons: Daemon) -> list[Daemon]:
    """The node that published the newest version of a fragment, of those that live."""
    newest: dict[int, tuple[int, Daemon]] = {}
    for daemon in daemons:
        for event in daemon.events("publish"):
            if event.digest and event.number > newest.get(event.fragment, (-1, daemon))[0]:
                newest[event.fragment] = (event.number, daemon)
    return [daemon for _, daemon in newest.values() if daemon.ended() is None]


def held(daemon: Daemon) -> set[tuple[int, int, str]]:
    """Fragment, number and digest of every version that it has had."""
    return {(*version, digest) for version, digest in daemon.heads().items()}


def last_published(daemon: Daemon) -> set[tuple[int, int, str]]:
    """Of every fragment the newest version that it published itself."""
    made = {e.fragment: (e.number, e.digest) for e in daemon.events("publish") if e.digest}
    return {(fragment, *version) for fragment, version in made.items()}


def largest_merge(*daemons: Daemon) -> int:
    """Contributors of the largest version so far."""
    return max((e.contributors for d in daemons for e in d.events("merge")), default=0)


@pytest.mark.timeout(300)
def test_groups_merge_into_one_version_and_outlive_their_root(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        bootstrap = swarm.bootstrap("--run", str(grouped_manifest(swarm)))
        nodes = [
            swarm.node(
                name, bootstrap, *(["--genesis"] if name == "one" else []), "--checkpoint-every-s", "5"
            )
            for name in NODES
        ]
        swarm.training(*nodes)
        for node in nodes:
            swarm.advance(node, FRAGMENTS, 3, timeout_s=120)
        # No group has more than its members, so a version of more contributors is of several groups.
        swarm.until(lambda: largest_merge(*nodes) > GROUP + 1, "a version of several groups", 120)
        assert len(leaf_groups(*nodes)) > 1
        swarm.until(lambda: [e for d in nodes for e in d.events("groups")], "the groups to rotate", 120)

        status = swarm.command("status", "--join", nodes[1].address() or "", "--json")
        assert status.returncode == 0, status.stderr
        rows = json.loads(status.stdout)["fragments"]
        assert all(row["groups"] > 1 and row["levels"] > 1 for row in rows)
        assert {row["root"] for row in rows} <= {d.peer_id for d in nodes}

        root = swarm.until(lambda: next(iter(roots(*nodes)), None), "a root")
        survivors = [d for d in nodes if d is not root]
        swarm.kill(root)
        lost = last_published(root) - {v for d in survivors for v in held(d)}
        for survivor in survivors:
            swarm.advance(survivor, FRAGMENTS, 4, timeout_s=120)
        before = len([e for d in survivors for e in d.events("merge") if e.contributors > GROUP])
        swarm.until(
            lambda: len([e for d in survivors for e in d.events("merge") if e.contributors > GROUP]) > before,
            "a version of several groups of the survivors",
            120,
        )
        again = swarm.node(root.name, survivors[0])
        swarm.until(
            lambda: [e for e in again.events("contribution") if e.reason == "merged"],
            "the root that was killed to take part again",
            120,
        )
        assert_agree_at_last(swarm, *survivors, again)
        assert assert_digests_agree(*nodes, again, lost=lost) > 20

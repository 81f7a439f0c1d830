"""An owner vouches, with real processes: a newcomer starts from that, whatever heavier run it is shown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner
from system_kit import PACE, Daemon, Swarm, asking

from attacks.heads import ForgedHead
from attacks.stranger import Work
from p2pdiloco.cli.group import cli
from p2pdiloco.daemon.run_files.known_runs import WaysIn

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


@contextmanager
def forger(swarm: Swarm, member: Daemon, run: str) -> Iterator[ForgedHead]:
    """A peer that says to everybody that it is a full member, and shows a heavier run that it made up."""
    address = member.address() or ""
    work = Work(
        attack="forged-head",
        folder=str(swarm.folder / "forger"),
        join=address,
        run=run,
        run_name="owned",
        members={member.peer_id: (address.rpartition("/p2p/")[0],)},
        manifest=str(next(member.data_dir.glob("runs/*/manifest.signed"))),
        seconds=240.0,
    )
    loop, started = asyncio.new_event_loop(), threading.Event()
    attack = ForgedHead(work)
    stranger = attack.strangers[0]

    async def lie() -> None:
        await stranger.start()
        try:
            started.set()
            await attack.attack()
        finally:
            await stranger.transport.close()

    lying = loop.create_task(lie())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([lying])))
    thread.start()
    try:
        assert started.wait(60.0)
        yield attack
    finally:
        loop.call_soon_threadsafe(lying.cancel)
        thread.join()
        loop.close()


def test_a_newcomer_starts_from_what_the_owner_vouched_for(visited_swarm: Swarm) -> None:
    swarm = visited_swarm
    bootstrap = swarm.bootstrap("--run", str(swarm.manifest("owned", seats=("member",))))
    member = swarm.node("member", bootstrap, "--genesis", *PACE)
    swarm.advance(member, [0, 1, 2, 3], 1, 120.0)  # of version 0 there is nothing to vouch for
    run = WaysIn.load(member.data_dir).runs[0]
    owner = ("--data-dir", str(bootstrap.data_dir), "--join", member.address() or "")
    done = CliRunner().invoke(cli, ["vouch", "owned", *owner])
    assert done.exit_code == 0, done.output
    assert "worked on by 1 member" in done.stdout and "versions vouched for" in done.stdout
    with forger(swarm, member, run) as attack:
        stranger = attack.strangers[0]
        swarm.until(lambda: stranger.done["heartbeat: taken"], "the forger to be heard")
        # A member is asked for the owner's notice before anybody is followed; through a bootstrap it comes
        # when one is met. Where that takes long, it begins with what the member says, and looks again.
        newcomer = swarm.node("newcomer", member)
        swarm.until(lambda: stranger.greeted_by - {member.peer_id}, "the newcomer to meet the forger")
        swarm.training(newcomer)
        vouched = {"basis": "vouched", "members": 1, "of": 1, "peer": ""}
        with asking(newcomer, run) as ask:
            swarm.until(lambda: ask()["start"] == vouched, "its start from the owner's word")
        assert "started from what the owner vouched for" in newcomer.said()
        swarm.until(lambda: member.full_merges(2), "versions of both")
        assert not stranger.done["states given"], "with one against one its run is the heavier one"
    with asking(member, run) as ask:
        amend_while_a_member_is_away(swarm, bootstrap, member, newcomer, ask)


def amend_while_a_member_is_away(
    swarm: Swarm, bootstrap: Daemon, member: Daemon, absent: Daemon, ask: Callable[[], dict[str, Any]]
) -> None:
    """The owner pauses the run while a member is away, which hears of it when it is back; then it goes on.
    `ask`: what the member says of the run."""

    def amend(*options: str) -> str:
        owner = ("--data-dir", str(bootstrap.data_dir), "--join", member.address() or "")
        done = CliRunner().invoke(cli, ["run", "amend", "owned", *owner, *options])
        assert done.exit_code == 0, done.output
        return done.stdout

    def course(of: Callable[[], dict[str, Any]] = ask) -> dict[str, Any]:
        found = of()["course"]
        assert isinstance(found, dict)
        return found

    swarm.kill(absent)
    soon = course()["tokens"] + 6_000  # some seconds ahead: the command takes its time, too
    said = amend("--pause", "--learning-rate-factor", "0.5", "--message", "to mend", "--at-tokens", str(soon))
    assert "amendment 1 of the run's owner holds from" in said
    swarm.until(lambda: course()["rests"] == "paused", "the pause")
    assert "amendments 1" in member.said()
    assert soon <= course()["tokens"]
    assert (course()["rate_factor"], course()["message"]) == (0.5, "to mend")
    absent = swarm.node("newcomer", bootstrap)
    swarm.until(lambda: "the run's owner has paused it" in absent.said(), "the other one's pause", 120.0)
    swarm.until(lambda: "all is merged and saved" in absent.said(), "its rest")
    stands, merged = member.inner_step(), member.full_merges(2) + absent.full_merges(2)
    assert amend("--resume", "--message", "").count("amendment 2") == 1
    swarm.until(lambda: member.full_merges(2) + absent.full_merges(2) > merged, "versions of both")
    swarm.until(lambda: member.inner_step() > stands, "inner steps")
    ours, theirs = member.heads(), absent.heads()
    assert all(ours[version] == theirs[version] for version in ours.keys() & theirs.keys())
    with asking(absent) as ask_it:
        found = course(ask_it)
    assert (found["rate_factor"], found["message"]) == (0.5, "")
    bootstrap.terminate()
    assert "leaving" in bootstrap.said()

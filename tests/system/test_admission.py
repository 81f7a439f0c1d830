"""A run that takes members by invite, with real processes: who has one trains, others change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest
from click.testing import CliRunner
from system_kit import Daemon, Swarm, asking
from test_swarm import SAVE_OFTEN, a_killed_syncer_is_replaced_and_comes_back

from p2pdiloco.adapters.framing import RefusedByPeer
from p2pdiloco.cli.group import cli
from p2pdiloco.cli.status_command import visitor
from p2pdiloco.core.api.messages import Announce, Message, OfficeQuery, Progress, VoteRequest
from p2pdiloco.core.api.types import WHOLE_RUN, Head, Reach
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.run_files.known_runs import WaysIn
from p2pdiloco.daemon.run_files.saved_state import load_result
from p2pdiloco.errors import UserError
from p2pdiloco.ports import Transport
from p2pdiloco.release import WIRE_VERSION

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
BOAST = Head(1 << 40, bytes(32), 1 << 50, 1 << 40)


async def _told(what: Awaitable[object]) -> str:
    try:
        await what
    except RefusedByPeer as error:
        return error.reason
    return "taken"


async def _stranger(address: str, run: str) -> list[str]:
    """What a stranger hears that heartbeats, announces, asks for votes and offices, pushes, and pulls."""
    peer = address.rpartition("/p2p/")[2]
    heartbeat = Progress(
        1, 1.0, 1, 1, 1.0, None, True, True, True, ((0, BOAST),), (), True, Reach.DIRECT, False, True
    )
    ask = VoteRequest(WHOLE_RUN, 0, BOAST.term, BOAST, "")
    messages: list[Message] = [heartbeat, Announce(0, BOAST, peer), ask, OfficeQuery(WHOLE_RUN, 0, 0)]

    async def all_of(transport: Transport) -> list[str]:
        said = [await _told(transport.send(peer, wire.message(run, m), 5.0)) for m in messages]
        pulls = (wire.PullUpdate(run, 0, 1), wire.PullState(run, 0, 0))
        said += [await _told(transport.pull(peer, wire.encode(pull), 1 << 24, 5.0)) for pull in pulls]
        return [*said, await _told(transport.push(peer, b"anything", (b"x" * 1000,), 5.0))]

    async with visitor((address,)) as transport:
        record = wire.Presence(WIRE_VERSION, 1, "stranger", ())
        await transport.put_record(wire.members_key(run), wire.encode(record), 60.0)
        return await all_of(transport)


def _run(*arguments: str) -> tuple[int, str]:
    """A command in this process: exit status and last line. (A process of its own takes seconds to start.)"""
    done = CliRunner().invoke(cli, list(arguments), standalone_mode=False)
    if isinstance(done.exception, UserError):
        return 2, str(done.exception)
    return done.exit_code or (done.return_value or 0), (done.stdout.splitlines() or [""])[-1]


def _seat_of(member: Daemon, *options: str, run: str = "closed") -> str:
    """What `p2pdiloco members` says of the paper of a member's seat; empty: it has none."""
    done = CliRunner().invoke(cli, ["members", run, *options])
    lines = [
        line for line in done.stdout.partition("without a seat")[0].splitlines() if member.peer_id in line
    ]
    return lines[0].rpartition(", ")[0] if lines else ""


def test_an_invite_run(visited_swarm: Swarm) -> None:
    swarm = visited_swarm
    file = swarm.folder / "closed.toml"
    new = ("run", "new", "closed", "--preset", "micro", "--admission", "invite")
    seat = ("--data-dir", str(swarm.folder / "owner"))
    assert _run(*new, *seat, "--out", str(file))[0] == 0
    owner = swarm.node("owner", None, "--genesis", "--run-file", str(file))
    swarm.training(owner)
    data = ("--data-dir", str(owner.data_dir))
    status, invite = _run("invite", "closed", *data, "--uses", "1", "--name", "anna")
    assert status == 0
    quick = ("--threads", "1", "--min-step-s", "0.05", "--name", "guest")
    guest = swarm.start("guest", "node", invite, *quick)
    swarm.until(lambda: any(e.full_merges(2) for e in (owner, guest)), "versions of both")
    run = WaysIn.load(owner.data_dir).runs[0]

    # A stranger is refused, and counted.
    said = asyncio.run(_stranger(owner.address() or "", run))
    assert said == ["not-admitted"] * len(said) and len(said) == 7

    with asking(owner, run) as report:
        assert report()["refusals"].get("not-admitted", 0) >= 7
        # A name comes with a record in the DHT, which is read now and then.
        swarm.until(lambda: {m["name"] for m in report()["members"]} == {"owner", "guest"}, "both names")
    swarm.advance(owner, [0], 1)
    assert owner.number(0) < BOAST.number

    # Whoever has the invite, though it is used up, and a member's folder read on, while its node runs.
    nobody, guests = (("--data-dir", str(swarm.folder / name)) for name in ("nobody", "guest"))
    theta, address = swarm.folder / "theta.safetensors", owner.address() or ""
    copy = ("checkpoint", "--out", str(theta))
    assert "are for its members" in _run(*copy, "--join", address, *nobody)[1] and not theta.exists()
    for way in (("--join", invite, *nobody), guests, ("--join", address, *guests)):
        assert _run(*copy, *way)[0] == 0, way
        found = load_result(theta)
        assert found.run == run and found.merges
        theta.unlink()

    # Used up, expired, in time.
    used_up = (1, "no: this link's 1 place is taken; ask the owner for another")
    assert _run("can-join", invite, *nobody) == used_up
    assert _run("can-join", invite, *guests)[0] == 0
    short = _run("invite", "closed", *data, "--expires", "1s")[1]
    expired = (1, "no: the invite has expired")
    swarm.until(lambda: _run("can-join", short, *nobody) == expired, "the invite's end")

    # The invite is closed: nobody comes or reads by it, and its member and its seat stay.
    swarm.until(lambda: _seat_of(guest, *data).endswith("by invite anna"), "a seat by the invite")
    status, said_at_last = _run("invite", "closed", "--close", "anna", *data)
    assert status == 0 and "revoked invites 0," in said_at_last
    over = "this run's owner has revoked the invite"
    assert _run("can-join", invite, *nobody) == (1, f"no: {over}")
    assert _run("can-join", invite, *guests)[0] == 0
    assert over in _run(*copy, "--join", invite, *nobody)[1]
    assert _run(*copy, *guests)[0] == 0
    swarm.advance(owner, [0, 1], 2)
    assert _seat_of(guest, *data).endswith("by invite anna"), "it stays"

    # The guest comes back with nothing but its folder. It is banned, though it was let in.
    assert _run("ban", "closed", "guest", *data)[0] == 2, "anybody may call himself so"
    guest.terminate()
    status, said_at_last = _run("ban", "closed", guest.peer_id, *data)
    assert status == 0 and "banned 1," in said_at_last
    assert _run("can-join", invite, *guests) == (1, "no: this run's owner has banned this node")
    guest = swarm.start("guest", "node", *quick)
    swarm.until(lambda: "has banned this node" in guest.said(), "the guest to hear of it")
    count = owner.full_merges(2)
    swarm.advance(owner, [0, 1], 2)
    assert owner.full_merges(2) == count


def test_seats_and_the_recovery_key_speak_without_the_owners_and_a_killed_syncer_is_replaced(
    visited_swarm: Swarm,
) -> None:
    swarm = visited_swarm
    boot = swarm.bootstrap(seats=("one", "two"))
    one = swarm.node("one", boot, "--genesis", *SAVE_OFTEN)
    two, three = (swarm.node(name, boot, *SAVE_OFTEN) for name in ("two", "three"))
    swarm.training(one, two, three)
    run, owners = "test", ("--data-dir", str(boot.data_dir))

    # The key of the owner is in the folder of the bootstrap alone.
    def says(node: Daemon, *word: str) -> tuple[int, str]:
        return _run("seat", run, *word, "--data-dir", str(node.data_dir))

    # Of two seats one is not more than half; a volunteer says nothing.
    assert says(three, three.peer_id) == (2, "this node has no seat: its word on another's does not count")
    assert "more than half of 2 seats" in says(one, three.peer_id)[1]
    swarm.advance(one, [0], 2)
    assert not _seat_of(three, *owners, run=run)
    assert says(two, three.peer_id)[0] == 0
    swarm.until(lambda: _seat_of(three, *owners, run=run), "the seat that two seats gave")
    # A seat gives its own up.
    assert "gives its seat up" in says(two, two.peer_id, "--end")[1]
    swarm.until(lambda: not _seat_of(two, *owners, run=run), "the end of the seat")

    # The recovery key in the place of owner.key; then the thief has its key still.
    key = boot.data_dir / "owner.key"
    stolen = key.read_bytes()
    key.write_bytes(next(swarm.folder.glob("*.recovery.key")).read_bytes())
    assert _run("seat", run, two.peer_id, "--yes", *owners)[0] == 0
    swarm.until(lambda: _seat_of(two, *owners, run=run), "the word of the recovery key")
    key.write_bytes(stolen)
    status, said = _run("seat", run, three.peer_id, "--end", "--yes", *owners)
    spoken = "the run's recovery key has spoken, and the owner's key signs nothing any more"
    assert (status, said) == (2, spoken)
    a_killed_syncer_is_replaced_and_comes_back(swarm, one, two, three)


def test_a_run_by_list(visited_swarm: Swarm) -> None:
    swarm = visited_swarm
    file = swarm.folder / "listed.toml"
    new = ("run", "new", "listed", "--preset", "micro", "--admission", "list")
    seat = ("--data-dir", str(swarm.folder / "owner"))
    assert _run(*new, *seat, "--out", str(file))[0] == 0
    owner = swarm.node("owner", None, "--genesis", "--run-file", str(file))
    data = ("--data-dir", str(owner.data_dir))
    swarm.training(owner)
    guest = swarm.node("guest", owner)
    swarm.until(
        lambda: "does not admit this node: this run's owner" in guest.said(), "the guest to be refused"
    )
    asked = ("can-join", "listed", "--join", owner.address() or "", "--data-dir", str(guest.data_dir))
    assert _run(*asked) == (1, "no: this run's owner has not put this node on its list")

    # Put on the list, it gets in without being started again; taken off, it is nobody's member.
    status, said_at_last = _run("admit", "listed", guest.peer_id, *data)
    assert status == 0 and "listed 1," in said_at_last
    swarm.training(guest)
    swarm.until(lambda: any(e.full_merges(2) for e in (owner, guest)), "versions of both")
    assert _run("dismiss", "listed", "guest", *data)[0] == 2, "anybody may call himself so"
    status, said_at_last = _run("dismiss", "listed", "guest", "--yes", *data)
    assert status == 0 and "listed 0," in said_at_last
    swarm.until(lambda: "its list: nobody of run listed takes" in guest.said(), "the guest to hear of it")
    swarm.advance(owner, [0, 1, 2, 3], 1)  # of what was in when the owner heard of it
    count = owner.full_merges(2)
    swarm.advance(owner, [0, 1], 2)
    assert owner.full_merges(2) == count

"""Names of peers: who has one now, and who had it lately."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_kit import Neighbourhood, until

from p2pdiloco.cli.owner_notice import reach_members
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.network.discovery import LATELY_S, MAX_NAMED, Names
from p2pdiloco.errors import RemoteError
from p2pdiloco.release import WIRE_VERSION


def test_who_took_a_name_off_again_had_it_for_a_while() -> None:
    now = [0.0]
    names = Names(lambda: now[0])
    names["eve"], names["bob"] = "bob", "bob"
    now[0] = 5.0
    names["eve"] = "nobody"
    assert names == {"eve": "nobody", "bob": "bob"}
    assert set(names.lately("bob")) == {"eve", "bob"} and names.lately("nobody") == ("eve",)
    now[0] = LATELY_S
    names["bob"] = "bob"
    assert names.lately("bob") == ("bob",) and names.lately("ann") == ()


def test_what_is_remembered_is_bounded_and_so_is_an_answer() -> None:
    names = Names()
    for i in range(MAX_NAMED + 9):
        names["eve"] = f"name {i}"
    assert names.lately("name 8") == () and names.lately("name 9") == ("eve",)
    many = tuple(f"peer{i}" for i in range(wire.MAX_BEARERS + 1))
    assert len(wire.decode(wire.encode(wire.NameAnswer(many[1:])), wire.NameAnswer).peers) == len(many) - 1
    with pytest.raises(RemoteError, match="garbage"):
        wire.decode(wire.encode(wire.NameAnswer(many)), wire.NameAnswer)


@pytest.mark.long
async def test_members_say_who_took_a_name_off_again(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as swarm:
        a, rogue, owner = await swarm.member("a", genesis=True), await swarm.rogue(), await swarm.rogue()
        key = wire.members_key(swarm.run.id)
        for name in ("bob", "somebody"):
            record = wire.Presence(WIRE_VERSION, 1, name, ("/memory/p2p/x",))
            await rogue.transport.put_record(key, wire.encode(record), 60.0)
            await until(lambda n=name: a.presence.names.get(rogue.id) == n, "it to be seen")
        reached = await reach_members(owner.transport, swarm.run.id, [a.transport.peer_id], "bob")
        assert reached.names[rogue.id] == "somebody" and reached.lately == {rogue.id}
        for name in ("", "x" * 64):
            assert not (
                await reach_members(owner.transport, swarm.run.id, [a.transport.peer_id], name)
            ).lately

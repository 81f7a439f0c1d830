"""A name of the DNS that led nowhere at a start is looked up again, until somebody behind it is reached."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from daemon_kit import until

from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network import discovery
from p2pdiloco.daemon.network.discovery import look_up_again
from p2pdiloco.errors import PeerUnreachable, UserError
from p2pdiloco.identity import Identity
from p2pdiloco_lab.memory_net import MemoryNetwork

NAME = "/dnsaddr/boot.example"


async def test_whom_a_name_lists_is_dialled_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = MemoryNetwork()
    me, boot = (hub.transport(Identity.generate().peer_id) for _ in range(2))
    gone = f"/ip4/203.0.113.9/tcp/1/p2p/{Identity.generate().peer_id}"
    await boot.start(FrontDoor())
    await me.start(FrontDoor())
    dialled: list[str] = []
    answers: list[list[str]] = [
        [],
        [gone],
        [gone, f"/ip4/127.0.0.1/tcp/1/p2p/{me.peer_id}", *boot.addresses()],
    ]

    def peers_behind(names: Sequence[str]) -> list[str]:
        assert list(names) == [NAME]
        found = answers.pop(0)
        if not found:
            raise UserError("the name cannot be looked up")
        return found

    async def connect(peer: str, _addresses: Sequence[str]) -> None:
        dialled.append(peer)
        if peer != boot.peer_id:
            raise PeerUnreachable("nobody")

    monkeypatch.setattr(discovery, "peers_behind", peers_behind)
    monkeypatch.setattr(discovery, "PAUSE_S", 0.0)
    monkeypatch.setattr(me, "connect", connect)
    looking = look_up_again(me, [NAME])
    await until(looking.done, "an end of it")
    assert looking.exception() is None and not answers
    assert dialled.count(boot.peer_id) == 1 and me.peer_id not in dialled


async def test_where_all_names_were_found_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "peers_behind", None)
    me = MemoryNetwork().transport(Identity.generate().peer_id)
    await look_up_again(me, [])

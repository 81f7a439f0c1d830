"""Two processes of one identity: they see each other's record in place of their own, in turns."""

from __future__ import annotations

import math

import pytest
from presence_kit import our_record

from p2pdiloco import WIRE_VERSION
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network import discovery as presence_module
from p2pdiloco.daemon.network import discovery as twins_module
from p2pdiloco.daemon.network.discovery import LOOKS, MIN_TURNS, Presence, Twins, refuse_beside_a_twin
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity
from p2pdiloco_lab.memory_net import MemoryNetwork

LIFETIME_S = 45.0
EARLIER, OURS, LATER = 10, 20, 30


def told(looks: list[tuple[float, int]], log: pytest.LogCaptureFixture) -> tuple[str, int]:
    """Take looks of (time, incarnation) each; return what ends us, and how often we warn."""
    twins = Twins(OURS, LIFETIME_S)
    log.clear()
    try:
        for now, incarnation in looks:
            twins.look(incarnation, "copy", now)
    except UserError as error:
        return str(error), len(log.records)
    return "", len(log.records)


def turns(other: int, every_s: float = 6.0, times: int = 20) -> list[tuple[float, int]]:
    """Ours, the other's, ours, ..."""
    return [(i * every_s, other if i % 2 else OURS) for i in range(times)]


def test_the_earlier_of_two_ends_and_the_later_one_says_so(caplog: pytest.LogCaptureFixture) -> None:
    reason, warned = told(turns(LATER), caplog)
    assert "another node (copy)" in reason and warned == 0
    reason, warned = told(turns(EARLIER), caplog)
    assert reason == "" and warned == 2
    assert "(copy)" in caplog.text and "--data-dir of its own" in caplog.text


@pytest.mark.parametrize("other", [EARLIER, LATER])
def test_of_two_with_different_clocks_the_one_that_nobody_sees_ends(
    other: int, caplog: pytest.LogCaptureFixture
) -> None:
    looks = [(0.0, OURS), *((3.0 + i * 3.0, other) for i in range(100))]
    reason, _ = told(looks, caplog)
    assert "others see that one" in reason
    assert told(looks[1:], caplog)[0] == reason, "also if ours never was there"
    assert told([(i * 3.0, OURS) for i in range(100)], caplog) == ("", 0), "and the other goes on"


@pytest.mark.parametrize("other", [EARLIER, LATER])
@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(lambda other: [(i * 3.0, other) for i in range(30)], id="never ours yet: an old record"),
        pytest.param(
            lambda other: [(i * 3000.0 + d, who) for i in range(9) for d, who in ((0, OURS), (6, other))],
            id="now and then a copy is tried out",
        ),
        pytest.param(
            lambda other: [*turns(other, times=14)[:14:2], (99.0, other)], id="once, after a cut perhaps"
        ),
        pytest.param(lambda other: turns(other, every_s=4.0, times=11), id="within the life of a record"),
    ],
)
def test_what_an_earlier_life_has_left_behind_is_nobody(
    looks: object, other: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(looks)
    assert told(looks(other), caplog) == ("", 0)


async def test_a_look_at_the_dht_ends_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_module, "LIFETIME_S", 1e-9)
    for bound in ("STANDS_FOR", "FORGOTTEN_AFTER"):
        monkeypatch.setattr(twins_module, bound, math.inf)
    transport = MemoryNetwork().transport(Identity.generate().peer_id)
    await transport.start(FrontDoor())
    presences = {
        n: Presence(transport, "run", our_record(n, f"life {n}"), lambda event: None) for n in (1, 2)
    }

    async def write(incarnation: int) -> None:
        record = wire.Presence(WIRE_VERSION, incarnation, f"life {incarnation}", ("/memory/p2p/x",))
        await transport.put_record(wire.members_key("run"), wire.encode(record), 60.0)
        await presences[2].look()

    for _ in range(MIN_TURNS - 1):
        for incarnation in (1, 2):
            await write(incarnation)
            await presences[1].look()
    await write(1)
    await presences[1].look()
    await write(2)
    with pytest.raises(UserError, match=r"another node \(life 2\) .* began later"):
        await presences[1].look()


class Elsewhere:
    """What a transport tells before it starts: at these places its own identity answers so many times."""

    def __init__(self, answers: dict[tuple[str, int], int]) -> None:
        self.peer_id = Identity.generate().peer_id
        self._answers = answers
        self.asked: list[tuple[str, int]] = []

    async def answers_at(self, peer: str, host: str, port: int, timeout_s: float) -> bool:
        assert peer == self.peer_id
        self.asked.append((host, port))
        self._answers[host, port] = self._answers.get((host, port), 0) - 1
        return self._answers[host, port] >= 0


async def look(answers: dict[tuple[str, int], int], addresses: list[str]) -> list[tuple[str, int]]:
    transport = Elsewhere(answers)
    await refuse_beside_a_twin(transport, [f"{a}/p2p/{transport.peer_id}" for a in addresses])  # type: ignore[arg-type]
    return transport.asked


ORIGINAL = "/ip4/192.0.2.7/tcp/31337"


async def test_a_copy_that_can_reach_the_original_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins_module, "TWINS_PAUSE_S", 0.0)
    for address, place in ((ORIGINAL, ("192.0.2.7", 31337)), ("/dns4/a.example/tcp/1", ("a.example", 1))):
        with pytest.raises(UserError, match=f"identity, at {place[0]} port {place[1]}") as told:
            await look({place: 99}, ["/ip4/127.0.0.1/tcp/9", address])
        assert "--data-dir of its own" in told.value.hint


async def test_neither_nobody_nor_who_is_about_to_end_is_a_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins_module, "TWINS_PAUSE_S", 0.0)
    assert await look({}, []) == []
    assert await look({}, [ORIGINAL, f"{ORIGINAL}/p2p-circuit"]) == [("192.0.2.7", 31337)]
    place = ("192.0.2.7", 31337)
    assert await look({place: LOOKS - 1}, [ORIGINAL]) == [place] * LOOKS, "p2pd of one that was killed"

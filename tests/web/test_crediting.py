"""Credits on the page: in order, bounded, with the node's own; of several keepers the one in the middle."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from p2pdiloco.daemon import wire
from p2pdiloco.daemon.history import EVERY_S, AskedCredits, believed
from p2pdiloco.daemon.wire import MAX_ROWS, CreditLine, CreditsAnswer, CreditsQuery
from p2pdiloco.errors import PeerUnreachable, RemoteError
from p2pdiloco.web.view import MAX_CREDITS, credit_views


def told(*tokens: int, fragments: int = 4, first_s: int = 1_800_000_000) -> CreditsAnswer:
    times = first_s, first_s and first_s + 60
    rows = tuple(
        CreditLine(f"p{n:03}", f"name {n}", amount * fragments, amount, 7, 8, *times)
        for n, amount in enumerate(tokens)
    )
    return CreditsAnswer(fragments, fragments * sum(tokens), 0, 0, len(rows), (), (), bytes(32), rows)


def test_rows_are_bounded_and_the_own_one_is_there() -> None:
    rows = credit_views(told(*range(1, MAX_ROWS + 1)), "p003")
    assert len(rows) == MAX_CREDITS and rows[-1].peer == "p003" and rows[-1].tokens == 4
    assert [row.tokens for row in rows[:-1]] == list(range(MAX_ROWS, MAX_ROWS - MAX_CREDITS + 1, -1))
    assert rows[0].first_at_s == 1_800_000_000.0 and rows[0].steps == 7 and rows[0].contributions == 8
    (old,) = credit_views(told(5, first_s=0))
    assert old.first_at_s is None and old.last_at_s is None
    assert credit_views(None) == ()


def test_who_alone_says_that_it_knows_all_is_not_believed() -> None:
    late = replace(told(20), before_fragment_tokens=8)
    assert believed({"a": late, "liar": told(10**9), "b": late}) != "liar"
    ahead = replace(told(21), before_fragment_tokens=40)
    assert believed({"ahead": ahead, "whole": told(20)}) == "whole"


class Keepers:
    """Transport to members, some of which keep the history."""

    def __init__(self, **answers: CreditsAnswer | Exception) -> None:
        self.answers, self.asked = answers, 0

    async def send(self, peer: str, data: bytes, _timeout_s: float) -> bytes:
        self.asked += 1
        assert wire.decode(data[1:], wire.Query) == CreditsQuery("run")  # type: ignore[arg-type]
        answer = self.answers[peer]
        if isinstance(answer, Exception):
            raise answer
        return wire.encode(answer)


async def test_of_several_keepers_the_one_in_the_middle_is_believed_now_and_then() -> None:
    now = [1000.0]
    members: Any = Keepers(
        a=told(10), b=told(10**9), c=told(11), d=RemoteError("keeps-no-history"), e=PeerUnreachable("gone")
    )
    credits = AskedCredits(lambda: now[0])
    await credits.look(members, "run", list("abcde"))
    assert [row.tokens for row in credit_views(credits.answer)] == [11] and members.asked == 5
    await credits.look(members, "run", list("abcde"))
    assert members.asked == 5
    now[0] += EVERY_S
    await credits.look(members, "run", ["d"])
    assert members.asked == 6 and credits.answer is not None, (
        "what was told stays, when those who know are gone"
    )
